"""Shift weights: rounding, constructors, and integers that reproduce a layer with shifts and additions alone."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from convgrad import nn

LAYERS = [f"Conv{t}{d}dShift{q}" for t in ("", "Transpose") for d in (1, 2, 3) for q in ("", "Q")]


# ---- rounding ---------------------------------------------------------------------------------------------------


def test_every_power_of_two_is_exact() -> None:
    powers = torch.tensor([math.ldexp(1, n) for n in range(-126, 128)])
    for x in (powers, -powers, powers.double()):
        shift, sign = nn.get_shift_and_sign(x)
        assert shift.tolist() == list(range(-126, 128))
        assert torch.equal(sign, x.sign())
        assert torch.equal(nn.round_power_of_2(x), x)
    largest = torch.tensor([65504.0, -65504.0], dtype=torch.float16)  # nearer to 2 ** 16, which float16 has not
    assert nn.round_power_of_2(largest).tolist() == [2.0**15, -(2.0**15)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_to_the_nearest_logarithm_within_the_range(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(500), torch.zeros(2)]).to(dtype)
    shift, sign = nn.get_shift_and_sign(x, shift_range=(-3, 0))
    want = [-3 if v == 0 else max(-3, min(0, round(math.log2(abs(v))))) for v in x.tolist()]
    assert shift.dtype == sign.dtype == dtype
    assert shift.tolist() == want
    assert sign.tolist() == [float(np.sign(v)) for v in x.tolist()]


def test_stochastic_rounding_is_right_on_average_and_exact_on_powers() -> None:
    x = torch.full((20_000,), 0.3)
    shift, _ = nn.get_shift_and_sign(x, "stochastic")
    assert set(shift.tolist()) == {-2, -1}
    mean, spread = float(shift.mean()), 0.5 / math.sqrt(x.numel())
    assert abs(mean - math.log2(0.3)) < 5 * spread
    powers = torch.tensor([0.125, 1.0, 8.0]).repeat(1000)
    assert torch.equal(nn.round_power_of_2(powers, "stochastic"), powers)


@pytest.mark.parametrize("name", ["Conv1dShift", "Conv1dShiftQ"])
def test_stochastic_weights_are_those_of_training_only(name: str) -> None:
    layer = getattr(nn, name)(8, 8, 3, rounding="stochastic")
    assert not torch.equal(layer.quantized_weight(), layer.quantized_weight())
    layer.eval()
    assert torch.equal(layer.quantized_weight(), layer.quantized_weight())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [(4, 2), (1, 7), (16, 16)])
def test_fixed_point_numbers(dtype: torch.dtype, bits: tuple[int, int]) -> None:
    integer, fraction = bits
    x = torch.cat([torch.randn(200) * 4, torch.tensor([60000.0, -60000.0])]).to(dtype).requires_grad_()
    y = nn.round_to_fixed(x, integer, fraction)
    units = [math.floor(v * 2**fraction) for v in x.tolist()]
    low, high = -(2 ** (integer + fraction - 1)), 2 ** (integer + fraction - 1) - 1
    limited = torch.tensor([min(max(u, low), high) for u in units], dtype=torch.float64) / 2**fraction
    fits = limited.to(dtype).double() == limited  # the largest fixed-point number can have more bits than the dtype
    assert torch.equal(y.double()[fits], limited[fits])
    assert (y.double() <= high / 2**fraction).all()
    assert fits.sum() >= 201
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# ---- constructors -----------------------------------------------------------------------------------------------


def test_the_constructor_is_deepshifts() -> None:
    theirs = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias",
              "padding_mode", "check_grad", "freeze_sign"]  # fmt: skip
    assert list(inspect.signature(nn.Conv2dShift).parameters)[:11] == theirs
    assert list(inspect.signature(nn.Conv2dShiftQ).parameters)[:10] == theirs[:10]
    assert {"rounding", "weight_bits", "act_integer_bits", "act_fraction_bits"} <= {
        *inspect.signature(nn.Conv2dShift).parameters
    }
    layer = nn.Conv2dShift(4, 6, 3, 1, 1, 1, 2, False, "replicate", True, True)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert (layer.shift.requires_grad, layer.sign.requires_grad, layer.bias) == (True, False, None)
    assert layer(torch.randn(1, 4, 5, 5, dtype=torch.float64)).shape == (1, 6, 5, 5)
    assert torch.nn.utils.skip_init(nn.Conv2dShift, 4, 6, 3).shift.shape == (6, 4, 3, 3)


def test_bits_are_ranges() -> None:
    """As in the authors' code: one bit is the sign; zero needs a code where the sign is a parameter."""
    assert (nn.ShiftQ().limits, nn.ShiftPS().limits) == ((-15, 0), (-14, 0))
    assert (nn.ShiftQ(weight_bits=3).limits, nn.ShiftPS(weight_bits=3).limits) == ((-3, 0), (-2, 0))
    assert nn.ShiftQ(weight_bits=8).limits == nn.ShiftPS(weight_bits=8).limits == (-126, 0)  # of normal floats
    layer = nn.Conv1dShiftQ(4, 4, 3, shift_range=(-2, 1))
    layer.weight.data.mul_(100)
    assert layer.quantized_weight().abs().max() == 2


def test_the_gradient_of_the_input_is_exact() -> None:
    """What ``check_grad`` is for."""
    layer = nn.Conv2dShiftQ(2, 3, 3, check_grad=True, padding=1)
    torch.autograd.gradcheck(layer, torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True))


BAD = [
    ({"weight_bits": 1}, ValueError, "weight_bits must be an integer from 2 to 8, got 1"),
    ({"weight_bits": 2.5}, ValueError, "weight_bits"),
    ({"shift_range": (0, -3)}, ValueError, r"shift_range must be two integers.*got \(0, -3\)"),
    ({"shift_range": 4}, ValueError, "shift_range"),
    ({"shift_range": (-1.5, 0)}, ValueError, "shift_range"),
    ({"rounding": "up"}, ValueError, "rounding must be 'deterministic' or 'stochastic', got 'up'"),
    ({"act_integer_bits": 0}, ValueError, "1 to 32 integer bits"),
    ({"act_fraction_bits": 40}, ValueError, "0 to 30 fraction bits"),
    ({"check_grad": True, "dtype": torch.float32}, ValueError, "check_grad=True means float64"),
    ({"padding_mode": "circular_split", "padding": "same"}, ValueError, "one non-negative integer for each dimension"),
    ({"padding_mode": "circular_split", "padding": -1}, ValueError, "circular_split"),
    ({"padding_mode": "round"}, ValueError, "padding_mode"),
    ({"groups": 3}, ValueError, "divisible by groups"),
    ({"use_kernel": True}, TypeError, "use_kernel"),
    ({"backend": "misspelt"}, KeyError, "no backend is called"),
]


@pytest.mark.parametrize("name", ["Conv2dShift", "Conv2dShiftQ"])
@pytest.mark.parametrize(("options", "error", "words"), BAD, ids=[str(b[0]) for b in BAD])
def test_bad_arguments(name: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        getattr(nn, name)(4, 4, 3, **options)


def test_a_missing_argument() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'kernel_size'"):
        nn.Conv2dShift(4, 4)


# ---- integers ---------------------------------------------------------------------------------------------------


def convolve(layer: Any, x: Tensor, exported: nn.ShiftIntegers) -> tuple[Tensor, int]:
    """The convolution of integers by shifted ones, without padding, and how many bits are behind the point."""
    low = min(0, int(exported.shift.min()))
    weight = torch.bitwise_left_shift(exported.sign.long(), exported.shift.long() - low)
    function = getattr(torch.nn.functional, f"conv{'_transpose' * layer.transposed}{x.dim() - 2}d")
    total = function(x, weight, stride=layer.stride, dilation=layer.dilation, groups=layer.groups)
    if layer.transposed:
        total = total[(..., *(slice(p, -p or None) for p in layer.padding))]
    if exported.bias is not None:
        total = total + torch.bitwise_left_shift(exported.bias, -low).view(-1, *[1] * (x.dim() - 2))
    return total, exported.fraction_bits - low


def in_units(x: Tensor, exported: nn.ShiftIntegers) -> Tensor:
    limit = 2 ** (exported.integer_bits + exported.fraction_bits - 1)
    return (x.double() * 2**exported.fraction_bits).floor().clamp(-limit, limit - 1).long()


@pytest.mark.parametrize("bits", [{"weight_bits": 4, "act_integer_bits": 3, "act_fraction_bits": 4}, {}], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_shifts_and_additions_of_integers_reproduce_a_layer(name: str, bits: dict[str, int]) -> None:
    d = int(name.split("d", maxsplit=1)[0][-1])
    transposed = "Transpose" in name
    # float32 holds the few bits exactly; the default ones need float64
    layer = getattr(nn, name)(
        4, 6, 3, 2, padding=1, dilation=2, groups=2, check_grad=not bits, **{"act_fraction_bits": 16, **bits}
    )
    x = torch.randn(2, 4, *[7] * d, dtype=layer.bias.dtype) * 3
    exported = nn.export_shift(layer)
    assert (exported.shift.dtype, exported.sign.dtype, exported.bias.dtype) == (torch.int8, torch.int8, torch.int64)
    integers = in_units(x, exported)
    if not transposed:
        integers = torch.from_numpy(np.pad(integers.numpy(), [(0, 0)] * 2 + [(1, 1)] * d))
    got, point = convolve(layer, integers, exported)
    assert torch.equal(got.double() * 2.0**-point, layer(x).double())
    assert got.any()


MODES = {
    "zeros": ("constant", lambda p: (p, p)),
    "circular": ("wrap", lambda p: (p, p)),
    "circular_split": ("wrap", lambda p: ((p + 1) // 2, p // 2)),
    "reflect": ("reflect", lambda p: (p, p)),
    "replicate": ("edge", lambda p: (p, p)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Shift", "ShiftQ"])
def test_padding_modes_in_integers(kind: str, d: int, mode: str) -> None:
    """Numpy pads, so that its meaning of each mode is what counts; different amounts in each dimension."""
    padding = (3, 2, 1)[:d]
    layer = getattr(nn, f"Conv{d}d{kind}")(
        2, 3, 3, padding=padding, padding_mode=mode, check_grad=True, act_fraction_bits=16
    )
    x = torch.randn(2, 2, *[5] * d, dtype=torch.float64)
    exported = nn.export_shift(layer)
    how, sides = MODES[mode]
    padded = np.pad(in_units(x, exported).numpy(), [(0, 0), (0, 0), *map(sides, padding)], mode=how)
    got, point = convolve(layer, torch.from_numpy(padded), exported)
    assert torch.equal(got.double() * 2.0**-point, layer(x))


def test_integers_of_what_has_none() -> None:
    with pytest.raises(TypeError, match="BinaryConv1d has no shift weights"):
        nn.export_shift(nn.BinaryConv1d(1, 1, 1))
    with pytest.raises(TypeError, match="Conv1d has no shift weights"):
        nn.export_shift(torch.nn.Conv1d(1, 1, 1))
    with pytest.raises(ValueError, match="act_fraction_bits=None"):
        nn.export_shift(nn.Conv1dShift(1, 1, 1, act_fraction_bits=None))


def test_infinities_are_rounded_to_the_limits() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.5], requires_grad=True)
    fixed = nn.round_to_fixed(x, integer_bits=4, fraction_bits=2)
    torch.testing.assert_close(fixed, torch.tensor([7.75, -8.0, math.nan, 0.5]), equal_nan=True)
    powers = nn.round_power_of_2(x, shift_range=(-3, 2))
    torch.testing.assert_close(powers[[0, 1, 3]], torch.tensor([4.0, -4.0, 0.5]))
    (gradient,) = torch.autograd.grad(fixed[[0, 1, 3]].sum(), x)
    assert gradient.tolist() == [0.0, 0.0, 0.0, 1.0]
