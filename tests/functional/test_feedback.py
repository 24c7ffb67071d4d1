"""`feedback_convolution` against the rule written down in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import DtypeError, ShapeError

CASES = {
    "1d": ((2, 4, 9), (6, 4, 3), {}),
    "2d grouped": ((2, 4, 7, 6), (6, 2, 3, 2), {"groups": 2, "stride": (2, 1), "padding": (1, 0)}),
    "depthwise": ((2, 4, 7, 6), (8, 1, 3, 2), {"groups": 4, "dilation": (1, 2)}),
    "3d": ((1, 2, 5, 4, 6), (3, 2, 2, 3, 1), {"dilation": (1, 1, 2)}),
    "transposed": ((2, 4, 5, 4), (4, 3, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}),
}


def form(weight: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments behind the bias, as ATen has them."""
    d = weight.dim() - 2
    given = {"stride": 1, "padding": 0, "dilation": 1, "transposed": False, "output_padding": 0, "groups": 1, **options}
    return tuple(v if k in ("transposed", "groups") or isinstance(v, tuple) else (v,) * d for k, v in given.items())


class Definition(torch.autograd.Function):
    """Lillicrap et al. 2016, Fig. 1: the error goes back through B; B learns as W does (Akrout et al. 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, bias: Tensor | None, arguments: Any) -> Tensor:
        ctx.save_for_backward(x, b)
        ctx.arguments, ctx.bias = arguments, bias is not None
        return torch.convolution(x, w, bias, *arguments)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (g,), (x, b) = grad_outputs, ctx.saved_tensors
        sizes = [g.shape[1]]
        of_x, of_w, of_bias = torch.ops.aten.convolution_backward(g, x, b, sizes, *ctx.arguments, [True] * 3)
        return of_x, of_w, of_w, of_bias if ctx.bias else None, None


def tensors(input_size: tuple[int, ...], weight_size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (input_size, weight_size, weight_size)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("teaches", [False, True])
def test_gradients_of_both_orders(case: str, teaches: bool) -> None:
    input_size, weight_size, options = CASES[case]
    x, w, b = tensors(input_size, weight_size, torch.float64)
    channels = weight_size[1] * options.get("groups", 1) if options.get("transposed") else weight_size[0]
    bias = torch.randn(channels, dtype=torch.float64, requires_grad=True)
    b.requires_grad_(teaches)
    leaves = (x, w, bias, b) if teaches else (x, w, bias)
    ours = convgrad.feedback_convolution(x, w, b, bias, **options)
    theirs = Definition.apply(x, w, b, bias, form(w, options))
    torch.testing.assert_close(ours, theirs)
    g, *towards = (torch.randn_like(t) for t in (ours, *leaves))
    g.requires_grad_()
    first = [torch.autograd.grad(y.sin(), leaves, g, create_graph=True) for y in (ours, theirs)]
    second = [torch.autograd.grad(grads, (*leaves, g), towards) for grads in first]
    torch.testing.assert_close(first[0] + second[0], first[1] + second[1])


@pytest.mark.parametrize("transposed", [False, True])
def test_complex(transposed: bool) -> None:
    x, w, b = tensors((2, 4, 9), (4, 4, 3), torch.complex128)
    stock = F.conv_transpose1d if transposed else F.conv1d  # torch.convolution knows no complex numbers
    y = convgrad.feedback_convolution(x, w, b, stride=2, transposed=transposed)
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w, b), g)
    (of_input,) = torch.autograd.grad(stock(x, b, stride=2), x, g)
    (of_weight,) = torch.autograd.grad(stock(x, w, stride=2), w, g)
    torch.testing.assert_close(got, (of_input, of_weight, of_weight))


@pytest.mark.parametrize("needed", ["x", "w", "b", "bias", "xb", "wbias"])
def test_each_gradient_alone_and_nothing_kept_for_others(needed: str) -> None:
    x, w, b = tensors((2, 4, 9), (6, 4, 3), torch.float64)
    leaves = {"x": x, "w": w, "b": b, "bias": torch.randn(6, dtype=torch.float64, requires_grad=True)}
    chosen = {"xb": ("x", "b"), "wbias": ("w", "bias")}.get(needed, (needed,))
    for name, t in leaves.items():
        t.requires_grad_(name in chosen)
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        y = convgrad.feedback_convolution(leaves["x"], leaves["w"], leaves["b"], leaves["bias"])
    assert kept == [(2, 4, 9)] * bool({"w", "b"} & {*chosen}) + [(6, 4, 3)] * ("x" in chosen)
    g = torch.randn_like(y)
    y.backward(g)
    want = torch.ops.aten.convolution_backward(g, x, b, [6], (1,), (0,), (1,), False, (0,), 1, [True] * 3)
    expected = {"x": want[0], "w": want[1], "b": want[1], "bias": want[2]}
    for name, t in leaves.items():
        if name in chosen:
            torch.testing.assert_close(t.grad, expected[name].detach())
        else:
            assert t.grad is None


def test_one_sample_without_its_batch_dimension() -> None:
    x, w, b = tensors((4, 9), (6, 4, 3), torch.float64)
    y = convgrad.feedback_convolution(x, w, b, padding="same")
    assert y.shape == (6, 9)
    torch.testing.assert_close(y, torch.conv1d(x, w, padding="same"))
    want = torch.autograd.grad(torch.conv1d(x, b, padding="same").sum(), x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), want)


def test_forward_mode_is_that_of_the_convolution() -> None:
    x, w, b = (t.detach() for t in tensors((2, 3, 8), (4, 3, 3), torch.float64))
    bias = torch.randn(4, dtype=torch.float64)
    primals, moved = (x, w, bias), tuple(map(torch.randn_like, (x, w, bias)))
    got = torch.func.jvp(lambda x, w, bias: convgrad.feedback_convolution(x, w, b, bias), primals, moved)
    want = torch.func.jvp(torch.conv1d, primals, moved)
    torch.testing.assert_close(got, want)
    alone = torch.func.jvp(lambda bias: convgrad.feedback_convolution(x, w, b, bias), (bias,), (moved[2],))[1]
    torch.testing.assert_close(alone, moved[2][None, :, None].expand(2, 4, 6))


@pytest.mark.parametrize(("transposed", "dynamic"), [(False, False), (True, True)])
def test_compiled(transposed: bool, dynamic: bool) -> None:
    x, w, b = tensors((2, 4, 8, 8), (4, 4, 3, 3), torch.float32)

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convgrad.feedback_convolution(x, w, b, padding=1, transposed=transposed).relu()

    g = torch.randn(2, 4, 8, 8)
    expected = torch.autograd.grad(call(x, w, b), (x, w, b), g)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, w, b), (x, w, b), g), expected)


def test_what_is_refused() -> None:
    x, w, b = tensors((2, 3, 8), (4, 3, 3), torch.float64)
    wrong: Any = 3
    with pytest.raises(ShapeError, match=r"Expected feedback_weight of the size of weight, \[4, 3, 3\]"):
        convgrad.feedback_convolution(x, w, torch.zeros(4, 3, 5, dtype=torch.float64))
    with pytest.raises(DtypeError, match=r"Weight type .* and feedback_weight type .* should be the same"):
        convgrad.feedback_convolution(x, w, torch.zeros(4, 3, 3))
    with pytest.raises(DtypeError, match="weight on cpu and feedback_weight on meta"):
        convgrad.feedback_convolution(x, w, w.to("meta"))
    with pytest.raises(TypeError, match="argument 'feedback_weight' must be Tensor, not int"):
        convgrad.feedback_convolution(x, w, wrong)
    with pytest.raises(ShapeError):
        convgrad.feedback_convolution(x[0, 0], w, b)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [(0, None, None, None), (None, 0, 1, None), (1, 0, None, 1), (None, None, None, 0)])
def test_vmap_of_any_operand_and_its_derivatives(transposed: bool, dims: tuple[int | None, ...]) -> None:
    """Those of `vmap`, in both modes, as of a loop."""
    weight, channels = ((4, 2, 3), 4) if transposed else ((6, 2, 3), 6)

    def operand(shape: tuple[int, ...], dim: int | None) -> Tensor:
        size = shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        return torch.randn(size, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor, w: Tensor, bias: Tensor, b: Tensor) -> Tensor:
        return convgrad.feedback_convolution(x, w, b, bias, stride=2, padding=1, groups=2, transposed=transposed)

    def loop(*operands: Tensor) -> Tensor:
        each = [t.unbind(d) if d is not None else [t] * 3 for t, d in zip(operands, dims, strict=True)]
        return torch.stack([f(*one) for one in zip(*each, strict=True)])

    mapped = torch.func.vmap(f, dims)
    operands = [operand(s, d) for s, d in zip(((2, 4, 7), weight, (channels,), weight), dims, strict=True)]
    got, want = mapped(*operands), loop(*operands)
    torch.testing.assert_close(got, want)
    g = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, operands, g), torch.autograd.grad(want, operands, g))
    tangents = [torch.randn_like(t) for t in operands]
    plain = [t.detach() for t in operands]
    both = [torch.func.jvp(function, tuple(plain), tuple(tangents))[1] for function in (mapped, loop)]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("transposed", [False, True])
def test_vmap_over_no_weights(transposed: bool) -> None:
    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convgrad.feedback_convolution(x, w, b, transposed=transposed)

    w, b = (torch.randn(0, 4, 4, 3, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 4, 9, requires_grad=True)
    y = torch.func.vmap(f, (None, 0, 0))(x, w, b)
    assert y.shape == (0, *f(x, torch.randn(4, 4, 3), torch.randn(4, 4, 3)).shape)
    of_x, *of_weights = torch.autograd.grad(y.sum(), (x, w, b))
    assert of_x.count_nonzero() == 0
    assert [t.shape for t in of_weights] == [w.shape, b.shape]
