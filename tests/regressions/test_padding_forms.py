"""Every form of padding means the same in the functions and in the modules, in each padding mode.

Modules with low and high padding handed PyTorch's constructor what it does not know, and padded the batch and the
channels; a negative integer was refused where a pair of it was not.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad

PAIRS = ((1, 2), (2, 0), (0, 1))
#: By name: the padding of a layer in d dimensions, and what it means.
FORMS = {
    "flat": lambda d: ([p for pair in PAIRS[:d] for p in pair], PAIRS[:d]),
    "pairs": lambda d: (PAIRS[:d], PAIRS[:d]),
    "negative": lambda d: (-1, ((-1, -1),) * d),
    "negative list": lambda d: ([-1] * d, ((-1, -1),) * d),
    "same": lambda d: ("same", ((1, 2),) * d),
}


def padded(x: Tensor, pairs: Any, mode: str) -> Tensor:
    sides = [p for pair in reversed(pairs) for p in pair]
    return F.pad(x, sides, mode="constant" if mode == "zeros" else mode)


def gradients(y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("form", FORMS)
def test_modules(d: int, mode: str, form: str) -> None:
    padding, sides = FORMS[form](d)
    size, stride = (4, 1) if form == "same" else (3, 2)
    layer = getattr(convgrad.nn, f"Conv{d}d")(
        4, 6, size, stride, padding, groups=2, padding_mode=mode, dtype=torch.float64
    )
    x = torch.randn(2, 4, *[6] * d, dtype=torch.float64, requires_grad=True)
    conv = getattr(F, f"conv{d}d")
    want = conv(padded(x, sides, mode), layer.weight, layer.bias, stride=stride, groups=2)
    y = layer(x)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(layer(x[0]), want[0])
    operands = (x, layer.weight, layer.bias)
    torch.testing.assert_close(gradients(y, *operands), gradients(want, *operands))
    assert "padding=" in repr(layer)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("padding", [-1, (-1,), "list", "mixed"])
def test_a_negative_integer_is_a_pair_of_it(d: int, padding: Any) -> None:
    each = [-1, 1, -2][:d] if padding == "mixed" else [-1] * d
    padding = each if isinstance(padding, str) else padding
    pairs = tuple((p, p) for p in each)
    x = torch.randn(2, 3, *[8] * d, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, *[3] * d, dtype=torch.float64, requires_grad=True)
    wants = (
        getattr(F, f"conv{d}d")(padded(x, pairs, "zeros"), w),
        padded(getattr(F, f"conv_transpose{d}d")(x, w), tuple((-p, -p) for p in each), "zeros"),
    )
    for want, transposed in zip(wants, (False, True), strict=True):
        name = f"conv_transpose{d}d" if transposed else f"conv{d}d"
        module = getattr(convgrad.nn, f"ConvTranspose{d}d" if transposed else f"Conv{d}d")
        layer = module(3, 3, 3, padding=padding, bias=False, dtype=torch.float64)
        layer.weight = torch.nn.Parameter(w.detach().clone())
        torch.testing.assert_close(layer(x), want)
        y = getattr(convgrad, name)(x, w, padding=padding)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(convgrad.convolution(x, w, padding=padding, transposed=transposed), want)
        theirs, g = gradients(want, x, w), torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view_as(want)
        options: Any = {"padding": padding, "transposed": transposed}
        by_one = (convgrad.grad_input(x.shape, w, g, **options), convgrad.grad_weight(x, w.shape, g, **options))
        for ours in (gradients(y, x, w), by_one, convgrad.convolution_backward(g, x, w, **options)[:2]):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("padding", [-1, "causal"])
def test_compiled(padding: Any) -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(3, 3, 3)
    compiled = torch.compile(convgrad.conv1d, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w, padding=padding), convgrad.conv1d(x, w, padding=padding))


@pytest.mark.parametrize("padding", [(1, 0), ((2, 1),), -1])
@pytest.mark.parametrize("more", [0, 1])
def test_an_output_size_counts_both_sides(padding: Any, more: int) -> None:
    layer = convgrad.nn.ConvTranspose1d(2, 2, 3, stride=2, padding=padding)
    x = torch.randn(1, 2, 5)
    size = layer(x).shape[2] + more
    for output_size in ([size], [1, 2, size]):
        assert layer(x, output_size=output_size).shape == (1, 2, size)
    with pytest.raises(ValueError, match="requested an output size"):
        layer(x, output_size=[size + 2])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_causal(stride: int, mode: str) -> None:
    layer = convgrad.nn.Conv1d(2, 3, 3, stride, "causal", 2, padding_mode=mode)
    x = torch.randn(2, 2, 9)
    want = F.conv1d(padded(x, ((4, 0),), mode), layer.weight, layer.bias, stride=stride, dilation=2)
    torch.testing.assert_close(layer(x), want)
    if mode == "zeros":
        y = convgrad.conv1d(x, layer.weight, layer.bias, stride, "causal", 2)
        torch.testing.assert_close(y, want)
        got = convgrad.conv1d_weight(x, layer.weight.shape, torch.ones_like(y), stride, "causal", 2)
        (theirs,) = torch.autograd.grad(want.sum(), layer.weight)
        torch.testing.assert_close(got, theirs)


@pytest.mark.parametrize("d", [2, 3])
def test_causal_in_more_dimensions_names_what_to_write(d: int) -> None:
    x, w = torch.randn(1, 2, *[6] * d), torch.randn(2, 2, *[3] * d)
    for call in (
        lambda: getattr(convgrad, f"conv{d}d")(x, w, padding="causal"),
        lambda: getattr(convgrad.nn, f"Conv{d}d")(2, 2, 3, padding="causal"),
    ):
        with pytest.raises(
            convgrad.ShapeError, match=r"for 1-D convolutions; write a pair .*padding=\(\(2, 0\), \.\.\.\)"
        ):
            call()


@pytest.mark.parametrize("padding", ["same", "causal"])
def test_a_word_is_refused_for_every_transposed_gradient_as_for_the_forward(padding: Any) -> None:
    x, w = torch.randn(1, 2, 6), torch.randn(2, 2, 3)
    for call in (
        lambda: convgrad.convolution(x, w, padding=padding, transposed=True),
        lambda: convgrad.grad_input(x.shape, w, x, padding=padding, transposed=True),
    ):
        with pytest.raises(TypeError, match="padding is an integer or a tuple"):
            call()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_keeps_its_backend(strict: bool) -> None:
    layer = convgrad.nn.Conv1d(2, 2, 3, backend="im2col")
    program = torch.export.export(layer, (torch.randn(1, 2, 6),), strict=strict)
    (call,) = [n for n in program.graph.nodes if n.op == "call_function"]
    assert call.target is torch.ops.convgrad.convolution.with_backend
    assert "im2col" in call.kwargs["backend"]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 0), (-1, 5), (4, -1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_kernel_that_needs_one_side(ndim: int, transposed: bool, low: int, high: int) -> None:
    """Asked for the layout with the low side only, PyTorch refused it."""
    size, kernel = (1, 5) if transposed else (4, 5)
    x = torch.randn(2, 3, *[size] * ndim, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, *[kernel] * ndim, dtype=torch.float64, requires_grad=True)
    arguments = ([1] * ndim, [low, high] * ndim, [1] * ndim, transposed, [0] * ndim, 1)
    y = convgrad.convolution(x, w, None, *arguments)
    if transposed:
        full = torch.convolution(x, w, None, [1] * ndim, [0] * ndim, [1] * ndim, True, [0] * ndim, 1)
        want = F.pad(full, [-low, -high] * ndim)
    else:
        padded = F.pad(x, [low, high] * ndim)
        want = torch.convolution(padded, w, None, [1] * ndim, [0] * ndim, [1] * ndim, False, [0] * ndim, 1)
    torch.testing.assert_close(y, want)
    g = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(want, (x, w), g))
    assert torch.ops.convgrad.convolution(x.to("meta"), w.to("meta"), None, *arguments).shape == y.shape
