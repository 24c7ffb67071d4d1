"""Values and gradients of every quantized layer and parametrization, against the definitions in the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import convgrad
from convgrad import nn

from . import definitions

BASES = [*(f"Conv{t}{d}d" for t in ("", "Transpose") for d in (1, 2, 3)), "Linear"]
#: scheme, how its layers are called, and its definition.
SCHEMES = {
    "bwn": (nn.Binary(), "Binary{}", definitions.bwn),
    "binary_connect": (nn.Binary(scale=False), "Binary{}", definitions.binary_connect),
    "xnor": (nn.Xnor(), "Xnor{}", definitions.bwn),
    "bnn": (nn.Xnor(scale=False), "Xnor{}", definitions.binary_connect),
    "twn": (nn.Ternary(), "Ternary{}", definitions.twn),
    "shift_q": (nn.ShiftQ(act_fraction_bits=None), "{}ShiftQ", definitions.shift_q),
    "shift_ps": (nn.ShiftPS(act_fraction_bits=None), "{}Shift", definitions.shift_ps),
}


def stock(base: str, **more: Any) -> torch.nn.Module:
    """A layer of torch's with groups, stride and dilation; float64, so that only formulas can differ."""
    if base == "Linear":
        return torch.nn.Linear(4, 6, dtype=torch.float64)
    layer = getattr(torch.nn, base)(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, dtype=torch.float64, **more)
    layer.weight.data.mul_(4)  # magnitudes on both sides of 1
    return layer


def an_input(base: str) -> Tensor:
    d = 0 if base == "Linear" else int(base[-2])
    return torch.randn(2, 4, *[7] * d, dtype=torch.float64)


def quantized(base: str, scheme: Any, way: str) -> torch.nn.Module:
    layer = stock(base)
    if way == "parametrization":
        return nn.parametrize_(layer, scheme)
    assert nn.convert_(layer, scheme) == [""]
    return layer


def gradients(output: Tensor, *wanted: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A cotangent and what it gives."""
    cotangent = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    return cotangent, torch.autograd.grad(output, wanted, cotangent)


@pytest.mark.parametrize("way", ["layer", "parametrization"])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("base", BASES)
def test_values_and_gradients(base: str, name: str, way: str) -> None:
    scheme, called, define = SCHEMES[name]
    layer: Any = quantized(base, scheme, way)
    if way == "layer":
        assert type(layer) is getattr(nn, called.format(base))
    held = layer.parametrizations["weight"] if way == "parametrization" else layer
    shadows = [p for n, p in held.named_parameters() if n != "bias"]  # of DeepShift-PS: the shift and the sign
    if name == "shift_ps":
        with torch.no_grad():
            shadows[0].uniform_(-16, 1)
            shadows[1].uniform_(-1.4, 1.4)
    binary_input = isinstance(scheme, nn.Xnor)
    x = an_input(base).requires_grad_()
    y = layer(x)
    cotangent, got = gradients(y, x, layer.bias, *shadows)

    plain, known = [p.detach() for p in shadows], (getattr(layer, "transposed", False), getattr(layer, "groups", 1))
    value = define(*plain, plain[0], *known)[0].requires_grad_()
    seen = (definitions.sign(x.detach()) if binary_input else x.detach()).requires_grad_()
    want_y = definitions.convolve(layer, seen, value, layer.bias)
    by_input, by_value, by_bias = torch.autograd.grad(want_y, (seen, value, layer.bias), cotangent)
    if binary_input:  # BNN, arXiv:1602.02830, section 1.3, equation 4
        by_input = by_input * (x.detach().abs() <= 1)
    torch.testing.assert_close(y, want_y)
    torch.testing.assert_close(got, (by_input, by_bias, *define(*plain, by_value, *known)[1:]))
    assert (value == 0).any() or name != "shift_ps"


def input_scale(layer: Any, x: Tensor) -> Tensor:
    """K of XNOR-Net (arXiv:1603.05279, section 3.2), one number at a time; 1-D. [N, groups, out]

    For transposed convolutions the mean of the inputs that reach the output position.
    """
    (k,), (s,), (p,), (dilation,), groups = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups
    a = x.abs().view(x.shape[0], groups, -1, x.shape[-1]).mean(2)
    size = definitions.convolve(layer, x, layer.weight, None).shape[-1]
    columns = []
    for o in range(size):
        if layer.transposed:
            hits = [i for i in range(x.shape[-1]) for t in range(k) if i * s - p + t * dilation == o]
            columns.append(a[..., hits].mean(-1) if hits else torch.zeros_like(a[..., 0]))
        else:
            at = [o * s - p + t * dilation for t in range(k)]
            columns.append(sum((a[..., i] for i in at if 0 <= i < x.shape[-1]), torch.zeros_like(a[..., 0])) / k)
    return torch.stack(columns, -1)


@pytest.mark.parametrize("base", ["Conv1d", "ConvTranspose1d"])
def test_the_input_scale_of_xnor_net(base: str) -> None:
    layer: Any = stock(base)
    nn.convert_(layer, nn.Xnor(scale_input=True))
    x = an_input(base).requires_grad_()
    y = layer(x)
    cotangent, (by_input, by_weight) = gradients(y, x, layer.weight)

    known = (layer.transposed, layer.groups)
    value = definitions.bwn(layer.weight.detach(), layer.weight.detach(), *known)[0].requires_grad_()
    seen = definitions.sign(x.detach()).requires_grad_()
    raw = definitions.convolve(layer, seen, value, None)
    scale = input_scale(layer, x)
    want = (raw.view(2, 2, 3, -1) * scale[:, :, None]).view_as(raw) + layer.bias[:, None]
    by_seen, by_value, through_scale = torch.autograd.grad(want, (seen, value, x), cotangent)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(by_input, by_seen * (x.detach().abs() <= 1) + through_scale)
    torch.testing.assert_close(by_weight, definitions.bwn(layer.weight.detach(), by_value, *known)[1])


@pytest.mark.parametrize("base", BASES)
def test_the_input_scale_in_every_dimension(base: str) -> None:
    """Where every magnitude is the same, K is that magnitude, except that zero padding counts as zeros."""
    layer: Any = stock(base)
    if base.startswith("Conv"):
        layer.padding = (0,) * len(layer.padding)
    nn.convert_(layer, nn.Xnor(scale_input=True))
    x = an_input(base).sign() * 3
    plain = definitions.convolve(layer, x, layer.quantized_weight(), layer.bias)
    torch.testing.assert_close(layer(x), plain)
    if base != "Linear":
        torch.testing.assert_close(layer(x[0]), plain[0])


def test_zero_is_positive_and_nan_stays() -> None:
    x = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    assert nn.binarize(x).tolist()[:3] == [1, 1, 1]
    assert nn.binarize(x)[3].isnan()
    assert nn.Binary(scale=False).quantize(torch.zeros(2, 2)).tolist() == [[1, 1], [1, 1]]
    assert nn.Ternary().quantize(torch.zeros(2, 2)).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    "scheme", [nn.Binary(), nn.Ternary(), nn.ShiftQ(), nn.ShiftPS(), nn.Xnor(scale=False)], ids=repr
)
def test_forward_mode_agrees_with_backward(scheme: Any) -> None:
    layer: Any = quantized("ConvTranspose1d", scheme, "layer")
    names = [n for n, _ in layer.named_parameters()]
    x, values = an_input("ConvTranspose1d"), tuple(p.detach() for p in layer.parameters())
    tangents = tuple(torch.randn_like(v) for v in (x, *values))

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    y, forward = torch.func.jvp(run, (x, *values), tangents)
    _, pull = torch.func.vjp(run, x, *values)
    cotangent = torch.randn_like(y)
    backward = sum((g * t).sum() for g, t in zip(pull(cotangent), tangents, strict=True))
    torch.testing.assert_close((forward * cotangent).sum(), backward)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["bwn", "binary_connect", "twn", "shift_q"])
def test_the_value_is_exact_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    scheme, _, define = SCHEMES[name]
    weight = torch.randn(6, 4, 3, dtype=torch.float64).to(dtype)
    got = scheme.quantize(weight)
    assert got.dtype == dtype
    want = define(weight.double(), weight.double(), False, 1)[0]
    if name in ("binary_connect", "shift_q"):
        assert torch.equal(got.double(), want)
    else:
        torch.testing.assert_close(got.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert all(row.abs().unique().numel() <= 2 for row in got)  # alpha, and 0 where ternary


@pytest.mark.parametrize("threshold", [-1, "half", float("nan"), True])
def test_a_threshold_that_is_none(threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold must be a number of at least 0"):
        convgrad.nn.TernaryConv2d(1, 1, 3, threshold=threshold)
