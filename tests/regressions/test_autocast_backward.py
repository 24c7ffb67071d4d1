"""Autocast around the forward only: what a backward outside of it computes with must have the forward's dtype.

The saved operands of a feedback convolution were those before the cast, and its backward was refused.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad


def leaves(*sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(s, requires_grad=True) for s in sizes]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_feedback_weight(transposed: bool, inside: bool, compiled: bool) -> None:
    x, w, b, w_b = leaves((2, 4, 8), (4, 4, 3), (4,), (4, 4, 3))

    def ours(x: Tensor, w: Tensor, b: Tensor, w_b: Tensor) -> Tensor:
        return convgrad.feedback_convolution(x, w, w_b, b, transposed=transposed)

    theirs = F.conv_transpose1d if transposed else F.conv1d
    call = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want, through = call(x, w, b, w_b), theirs(x, w, b), theirs(x, w_b)
    assert y.dtype == torch.bfloat16
    # Not with PyTorch's own, which rounds each sum where the processor has no arithmetic for 16 bits.
    exact = theirs(*(t.bfloat16().float() for t in (x, w, b))).bfloat16()
    torch.testing.assert_close(y, exact, rtol=0.016, atol=0.02)  # it rounds once more before the bias is added
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        got = torch.autograd.grad(y.sum(), (x, w, b, w_b))
    (grad_x,) = torch.autograd.grad(through.sum(), x)
    grad_w, grad_b = torch.autograd.grad(want.sum(), (w, b))
    for ours_, theirs_ in zip(got, (grad_x, grad_w, grad_b, grad_w), strict=True):
        assert ours_.dtype == torch.float32
        torch.testing.assert_close(ours_, theirs_, rtol=1e-2, atol=1e-2)


def test_the_saved_operands_are_the_cast_ones() -> None:
    x, w, w_b = leaves((2, 4, 8), (4, 4, 3), (4, 4, 3))
    kept: list[torch.dtype] = []
    saved = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t)
    with saved, torch.autocast("cpu", dtype=torch.bfloat16):
        convgrad.feedback_convolution(x, w, w_b)
    assert set(kept) == {torch.bfloat16}


def test_a_feedback_weight_of_another_dtype_is_cast_like_the_weight() -> None:
    x, w, w_b = leaves((2, 4, 8), (4, 4, 3), (4, 4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = convgrad.feedback_convolution(x, w, w_b.half())
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("way", ["once", "twice", "takeover", "feedback"])
def test_a_float32_layer_stays_one_in_a_backward_inside(way: str) -> None:
    """As in PyTorch, whose convolutions cast nothing in their backward; our kernels' matrix products were cast."""
    x, w = leaves((2, 4, 8, 8), (4, 4, 1, 1))
    with convgrad.takeover() if way == "takeover" else nullcontext(), convgrad.use_backend("aten:matmul"):
        if way == "feedback":
            y = convgrad.feedback_convolution(x, w, w)
        else:
            y = (F if way == "takeover" else convgrad).conv2d(x, w)
        want = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = torch.autograd.grad(y.sum(), (x, w), create_graph=way == "twice")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_second_derivative_of_a_float32_layer_stays_one_inside(groups: int) -> None:
    """As in PyTorch: the products of a gradient penalty were of 16 bits."""
    x, w = leaves((2, 4, 8, 8), (4, 4 // groups, 3, 3))
    y = convgrad.conv2d(x, w, groups=groups)

    def second() -> Any:
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), (x, w), retain_graph=True)

    want = second()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = second()
    torch.testing.assert_close(got, want)


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return convgrad.conv1d(x, w, padding=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad_input = convgrad.conv1d_input(x.shape, w, *grads, padding=1)
        return grad_input, convgrad.conv1d_weight(x, w.shape, *grads, padding=1)


class Decorated(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(Plain.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Plain.backward, device_type="cpu"))


class AtOnce(Decorated):
    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return convgrad.convolution_backward(*grads, x, w, padding=1)[:2]


@pytest.mark.parametrize("function", [Decorated, AtOnce])
@pytest.mark.parametrize("inside", [False, True])
def test_an_own_function(function: Any, inside: bool) -> None:
    x, w = leaves((2, 4, 8), (4, 4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, want = function.apply(x, w), F.conv1d(x, w, padding=1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        y.sum().backward()
    for t, theirs in zip((x, w), torch.autograd.grad(want.sum(), (x, w)), strict=True):
        assert t.grad.dtype == torch.float32
        torch.testing.assert_close(t.grad, theirs, rtol=1e-2, atol=1e-2)


def test_an_own_function_without_the_decorators_is_told_of_them() -> None:
    x, w = leaves((2, 4, 8), (4, 4, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y: Any = Plain.apply(x, w)
    with pytest.raises(convgrad.DtypeError, match=r"decorate forward and backward with torch\.amp\.custom_fwd"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose1d"])
def test_a_compiled_module_that_names_its_backend(name: str) -> None:
    layer, x = getattr(convgrad.nn, name)(2, 2, 3, backend="im2col"), torch.randn(1, 2, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.compile(layer, backend="aot_eager")(x).dtype == torch.bfloat16
