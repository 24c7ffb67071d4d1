"""Shift weights: each weight is a power of two with a sign, so that integers need shifts and additions only.

DeepShift (Elhoushi, Chen, Shafiq, Tian and Li, arXiv:1905.13298, section 3) trains them in two forms. DeepShift-Q keeps
a float weight and rounds it; DeepShift-PS keeps the shift and the sign themselves as parameters. Names and defaults are
those of the authors' PyTorch repository.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from .schemes import Scheme, straight_through

__all__ = ["ShiftIntegers", "ShiftPS", "ShiftQ", "get_shift_and_sign", "round_power_of_2", "round_to_fixed"]


def get_shift_and_sign(
    x: Tensor, rounding: str = "deterministic", shift_range: tuple[int, int] = (-126, 127)
) -> tuple[Tensor, Tensor]:
    """Return the shift and the sign with which ``sign * 2 ** shift`` is nearest to ``x``, on the scale of logarithms.

    Both have the shape and the dtype of ``x``; a sign is -1, 0 (for zero, whose shift is the smallest) or 1.

    Args:
        rounding: how ``log2(abs(x))`` is rounded: to the nearest integer, or up with a probability equal to its
            fraction.
        shift_range: the smallest and the largest shift; beyond them a shift is the nearer of the two.

    Raises:
        ValueError: an unknown rounding, or an invalid range.

    Equivalent to:
        >>> import torch, convgrad
        >>> shift, sign = convgrad.nn.get_shift_and_sign(torch.tensor([0.3, -0.8, 5.0]))
        >>> shift.tolist(), sign.tolist()
        ([-2.0, 0.0, 2.0], [1.0, -1.0, 1.0])
    """
    _check(rounding, shift_range)
    logarithm = _wide(x).abs().log2()
    return _round(logarithm.clamp(*shift_range), rounding).to(x.dtype) + 0, x.sign()  # + 0: no -0.0


def round_power_of_2(x: Tensor, rounding: str = "deterministic", shift_range: tuple[int, int] = (-126, 127)) -> Tensor:
    """Return ``x`` rounded to a power of two with a sign (zero stays zero), with the gradient passed on unchanged.

    DeepShift-Q's weights, arXiv:1905.13298, section 3.1. Arguments and errors are those of `get_shift_and_sign`.

    Equivalent to:
        >>> import torch, convgrad
        >>> convgrad.nn.round_power_of_2(torch.tensor([0.3, -0.8, 5.0, 0.0])).tolist()
        [0.25, -1.0, 4.0, 0.0]
    """
    shift, sign = get_shift_and_sign(x.detach(), rounding, shift_range)
    return straight_through(sign * _power(shift), _finite(x))


def round_to_fixed(input: Tensor, integer_bits: int = 16, fraction_bits: int = 16) -> Tensor:
    """Return ``input`` as fixed-point numbers: ``integer_bits`` (one is the sign), the point, and ``fraction_bits``.

    It is rounded down and clipped to what the bits can hold; the gradient is passed on unchanged (an infinity gets
    none). DeepShift's own function stops at ``2 ** (integer_bits - 1) - 1``; this one uses the numbers above too.

    Raises:
        ValueError: a number of bits that is not an integer, too small or too large.

    Equivalent to:
        >>> import torch, convgrad
        >>> convgrad.nn.round_to_fixed(torch.tensor([0.3, -0.3, 9.0]), integer_bits=4, fraction_bits=2).tolist()
        [0.25, -0.5, 7.75]
    """
    _check_bits(integer_bits, fraction_bits)
    if not isinstance(input, Tensor):  # torch.fx traces
        return handle_torch_function(round_to_fixed, (input,), input, integer_bits, fraction_bits)
    limit = 2.0 ** (integer_bits - 1)
    # The largest number below the limit: of the fixed-point numbers, or of the input's, if those are coarser.
    largest = limit - max(2.0**-fraction_bits, limit * torch.finfo(input.dtype).eps / 2)
    fixed = (_wide(input.detach()) * 2.0**fraction_bits).floor() * 2.0**-fraction_bits
    return straight_through(fixed.clamp(-limit, largest).to(input.dtype), _finite(input))


def _finite(x: Tensor) -> Tensor:
    """``x`` without infinities, whose difference from themselves would be NaN."""
    return x.nan_to_num(nan=math.nan)


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32: a logarithm or a product with ``2**16`` does not fit into half precision."""
    return x if x.dtype.itemsize >= 4 else x.float()


def _power(shift: Tensor) -> Tensor:
    """``2 ** shift``, at most the dtype's largest; rounded to a few bits, as ``exp2`` may be off in the last one."""
    return shift.clamp(max=math.frexp(torch.finfo(shift.dtype).max)[1] - 1).exp2().bfloat16().to(shift.dtype)


def _round(x: Tensor, rounding: str) -> Tensor:
    if rounding == "deterministic":
        return x.round()
    down = x.floor()
    return down + (torch.rand_like(x) < x - down)


def _check(rounding: str, shift_range: tuple[int, int]) -> None:
    if rounding not in ("deterministic", "stochastic"):
        raise ValueError(f"rounding must be 'deterministic' or 'stochastic', got {rounding!r}")
    low_high = tuple(shift_range) if isinstance(shift_range, tuple | list) else ()
    if len(low_high) != 2 or not all(_is_int(n) for n in low_high) or not -126 <= low_high[0] <= low_high[1] <= 127:
        raise ValueError(f"shift_range must be two integers, -126 <= smallest <= largest <= 127, got {shift_range!r}")


def _check_bits(integer_bits: int, fraction_bits: int) -> None:
    if not (_is_int(integer_bits) and _is_int(fraction_bits) and 1 <= integer_bits <= 32 and 0 <= fraction_bits <= 30):
        raise ValueError(
            "a fixed-point number has 1 to 32 integer bits and 0 to 30 fraction bits, "
            f"got {integer_bits!r} and {fraction_bits!r}"
        )


def _is_int(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool)


class ShiftIntegers(NamedTuple):
    """A shift layer in integers: what hardware without a multiplier needs to know.

    With ``x`` the input in units of ``2 ** -fraction_bits`` and ``low = min(0, shift.min())``, the output in units of
    ``2 ** (low - fraction_bits)`` is the sum of ``sign * (x << (shift - low))`` and of ``bias << -low``.
    """

    shift: Tensor  # int8, the shape of the weight
    sign: Tensor  # int8: -1, 0 or 1
    bias: Tensor | None  # int64, in units of 2 ** -fraction_bits
    integer_bits: int
    fraction_bits: int


@dataclass(frozen=True)
class ShiftQ(Scheme):
    """DeepShift-Q (arXiv:1905.13298, section 3.1): a float weight, rounded to a power of two with a sign.

    ``W~ = sign(W) * 2 ** round(log2(abs(W)))``, and the float weight gets the gradient of W~ unchanged. The input and
    the bias are rounded to fixed-point numbers (`round_to_fixed`). Its layers take ``check_grad=True``, which makes
    float64 parameters. The ``padding_mode`` of its convolutions may also be ``"circular_split"``, which pads
    ``(padding + 1) // 2`` and ``padding // 2``, as PyTorch before 1.5 and DeepShift do; ``"circular"`` pads each side.

    Args:
        rounding: "deterministic", or "stochastic", which is deterministic in ``eval()``.
        weight_bits: bits of one weight, including its sign: shifts from ``1 - 2 ** (weight_bits - 1)`` to 0.
        shift_range: the smallest and the largest shift, instead of ``weight_bits``.
        act_integer_bits: bits of the input and the bias before the binary point, including the sign.
        act_fraction_bits: bits after the point. None: the input and the bias are not rounded.

    Raises:
        ValueError: an option that is out of its range.
    """

    rounding: str = "deterministic"
    weight_bits: int = 5
    shift_range: tuple[int, int] | None = None
    act_integer_bits: int = 16
    act_fraction_bits: int | None = 16

    _leading: ClassVar[tuple[str, ...]] = ("check_grad",)
    #: Codes of a weight that are no shift: the sign of DeepShift-PS needs one for zero.
    _reserved: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not _is_int(self.weight_bits) or not 2 <= self.weight_bits <= 8:
            raise ValueError(f"weight_bits must be an integer from 2 to 8, got {self.weight_bits!r}")
        _check(self.rounding, self.limits)
        _check_bits(self.act_integer_bits, 0 if self.act_fraction_bits is None else self.act_fraction_bits)

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest shift."""
        if self.shift_range is not None:
            return self.shift_range
        return max(self._reserved - 2 ** (self.weight_bits - 1), -126), 0  # 2 ** -127 is no normal float

    def quantize(self, *originals: Tensor, transposed: bool = False, groups: int = 1, training: bool = False) -> Tensor:
        return round_power_of_2(originals[0], self.rounding if training else "deterministic", self.limits)

    @property
    def quantizes_input(self) -> bool:
        return self.act_fraction_bits is not None

    def input(self, input: Tensor) -> Tensor:
        if self.act_fraction_bits is None:
            return input
        return round_to_fixed(input, self.act_integer_bits, self.act_fraction_bits)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else self.input(bias)

    def clip_(self, *originals: Tensor) -> None:
        """Magnitudes into the range of the shifts; zero stays zero. The authors' code does so before each forward."""
        low, high = self.limits
        (weight,) = originals
        weight.copy_(weight.sign() * weight.abs().clamp(2.0**low, 2.0**high))


@dataclass(frozen=True)
class ShiftPS(ShiftQ):
    """DeepShift-PS (arXiv:1905.13298, section 3.2): the shift P and the sign S of each weight are the parameters.

    ``W~ = sign(round(S)) * 2 ** round(P)``, so a weight can be zero. With C the loss, ``dC/dP = dC/dW~ * W~ * ln 2``
    and ``dC/dS = dC/dW~``. The other arguments are those of `ShiftQ`; zero needs a code too, so ``weight_bits`` means
    shifts from ``2 - 2 ** (weight_bits - 1)`` to 0.

    Args:
        freeze_sign: do not train the sign.
    """

    freeze_sign: bool = False

    names: ClassVar[tuple[str, ...]] = ("shift", "sign")
    _leading: ClassVar[tuple[str, ...]] = ("check_grad", "freeze_sign")
    _reserved: ClassVar[int] = 2

    def originals(self, weight: Tensor) -> tuple[Tensor, ...]:
        return get_shift_and_sign(weight, shift_range=self.limits)

    def quantize(self, *originals: Tensor, transposed: bool = False, groups: int = 1, training: bool = False) -> Tensor:
        shift, sign = originals
        rounding = self.rounding if training else "deterministic"
        power = _power(_round(shift.detach().clamp(*self.limits), rounding))
        value = power * _round(sign.detach(), rounding).sign()
        return straight_through(value, shift * (value * math.log(2)) + sign)

    def clip_(self, *originals: Tensor) -> None:
        """The shift into its range. The authors' code does so before each forward."""
        originals[0].clamp_(*self.limits)

    def reset_(self, shift: Tensor, sign: Tensor) -> None:
        """The start of training in the authors' code."""
        shift.uniform_(-10, -1).clamp_(*self.limits)
        sign.uniform_(-1, 1)
