"""The operators' arguments, from those that users write: integers, sequences of them, words and pairs of padding."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor

from ..errors import ShapeError

Ints = int | Sequence[int]
#: Integers for both sides, or low and high of each dimension, flat or in pairs.
Padding = Ints | Sequence[Sequence[int]]


def integers(value: Any, d: int, name: str) -> tuple[int, ...]:
    """Return an integer for each dimension, of any type that PyTorch accepts; of a tuple only the first is no bool."""
    if type(value) is int:
        return (value,) * d
    try:
        if not isinstance(value, (tuple, list)):
            return (_integer(value),) * d
        if not value or not isinstance(value[0], bool):
            return tuple([v if isinstance(v, int) else _integer(v) for v in value])
    except TypeError:
        pass
    raise TypeError(f"{name} is an integer or a tuple of {d} integers, got {as_text(value)}")


def _integer(value: Any) -> int:
    """Return a value as an integer; raise a TypeError for a bool."""
    if isinstance(value, torch.SymInt):
        return value  # pyright: ignore[reportReturnType]
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        raise TypeError
    return index(value)


def as_text(value: object) -> str:
    """Return a value as text for a message; a tensor is shown by its shape."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def require_bool(name: str, value: object) -> None:
    """Refuse anything but a bool, as PyTorch does."""
    if value is not True and value is not False:
        hint = " (conv2d_input and conv2d_weight take the arguments of torch.nn.grad)" if name == "transposed" else ""
        raise TypeError(f"{name} is True or False, got {as_text(value)}{hint}")


def paddings(
    padding: Padding | str, weight_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return padding as integers, one for each dimension or low and high of each: ``same`` has the odd one high."""
    d = len(weight_size) - 2
    if not isinstance(padding, str):
        return _padding_integers(padding, d)
    if padding == "valid" or d < 1:  # no weight, which is refused when its shape is looked at
        return (0,) * d
    kernel = constant_sizes(weight_size[2:])
    steps = dilation if len(dilation) == d else tuple(dilation) * d
    totals = [dil * (k - 1) for k, dil in zip(kernel, steps, strict=False)]
    if padding == "causal":
        if d == 1:
            return (totals[0], 0)
        raise ShapeError(
            "padding='causal' is for 1-D convolutions; write a pair (low, high) for each dimension, "
            f"(dilation * (kernel - 1), 0) for one that is causal: padding=(({totals[0]}, 0), ...)"
        )
    if padding != "same":
        raise ShapeError(f"Invalid padding string: {padding!r}, should be one of 'valid', 'same', 'causal'")
    if any(s != 1 for s in stride):
        raise ShapeError("padding='same' is not supported for strided convolutions")
    return _shortest(tuple(p for total in totals for p in (total // 2, total - total // 2)))


def _padding_integers(padding: Any, d: int) -> tuple[int, ...]:
    """Return padding in the operators' flat form, from integers or, as in `ConvProblem`, pairs (low, high)."""
    if isinstance(padding, (tuple, list)) and padding and isinstance(padding[0], (tuple, list)):
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in padding):
            raise ShapeError(
                f"expected padding to be integers, or a pair (low, high) for each dimension, got {padding}"
            )
        padding = [side for pair in padding for side in pair]
    pads = integers(padding, d, "padding")
    if len(pads) in (1, d) and any(isinstance(p, int) and p < 0 for p in pads):
        # the operators crop where low and high are given
        return tuple(p for p in pads * (d // len(pads)) for _ in "lh")
    return _shortest(pads) if len(pads) == 2 * d else pads


def _shortest(both: tuple[int, ...]) -> tuple[int, ...]:
    """Return low and high of each dimension as one number where they agree, as PyTorch's operators take them."""
    return both[::2] if both[::2] == both[1::2] and all(p >= 0 for p in both) else both


def constant_sizes(sizes: Sequence[Any]) -> Sequence[int]:
    """Return sizes as integers, also in a jit trace, where they are tensors, without its warning."""
    if not sizes or type(sizes[0]) is not Tensor:
        return sizes
    with catch_warnings():
        simplefilter("ignore")
        return [int(n) for n in sizes]


def all_arguments(
    d: int, weight_size: Sequence[int], stride: Ints, padding: Padding | str, dilation: Ints, transposed: bool,
    output_padding: Ints, groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the operator's arguments; a plain convolution ignores output_padding, and its gradients refuse it."""
    require_bool("transposed", transposed)
    s, dil = integers(stride, d, "stride"), integers(dilation, d, "dilation")
    extra = integers(output_padding, d, "output_padding")
    pads = _padding_integers(padding, d) if transposed else paddings(padding, weight_size, s, dil)
    try:
        return (s, pads, dil, transposed, extra, groups if type(groups) is int else _integer(groups))
    except TypeError:
        raise TypeError(f"groups is an integer, got {as_text(groups)}") from None
