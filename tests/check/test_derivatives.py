"""A registered function under autograd and the function transforms: a backend like any other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import ConvProblem
from convgrad.diagnostics import explain_problem

from .functions import DEPTHWISE, WIDE, Counted, accepts, counted, depthwise, forward, grad_input, grad_weight, operands


def test_derivatives_of_every_order() -> None:
    mine = counted()
    x, w = operands()
    y = depthwise(x, w)
    assert mine.calls == 1
    torch.testing.assert_close(y, F.conv2d(x, w, padding=1, groups=8))
    assert torch.autograd.gradcheck(depthwise, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(depthwise, (x, w), fast_mode=True)


def test_one_pass_of_three() -> None:
    """A grad_weight alone: forward and grad_input stay with the engine, and the function is called once a backward."""
    mine = Counted(grad_weight)
    convgrad.register("mine", grad_weight=mine, accepts=accepts, dtypes=WIDE, verify=False)
    x, w = operands()
    for fresh in (True, False):
        mine.calls = 0
        got = torch.autograd.grad(depthwise(x, w).square().sum(), (x, w))
        expected = torch.autograd.grad(F.conv2d(x, w, padding=1, groups=8).square().sum(), (x, w))
        torch.testing.assert_close(got, expected)
        assert mine.calls == 1, fresh
    torch.autograd.grad(depthwise(x, w).sum(), x)
    assert mine.calls == 1


def test_all_three_passes() -> None:
    functions = {"forward": Counted(forward), "grad_input": Counted(grad_input), "grad_weight": Counted(grad_weight)}
    convgrad.register("mine", **functions, accepts=accepts, dtypes=WIDE, verify=False)
    depthwise(*operands()).sum().backward()
    assert [f.calls for f in functions.values()] == [1, 1, 1]
    chosen = explain_problem(DEPTHWISE).chosen()
    assert [chosen[o] for o in ("forward", "grad_input", "grad_weight")] == ["mine"] * 3


def test_function_transforms() -> None:
    mine = counted()
    x, w = operands()
    many = torch.randn(3, *x.shape, dtype=torch.float64)
    got = torch.func.vmap(lambda x: depthwise(x, w))(many)
    assert mine.calls == 1
    torch.testing.assert_close(got, torch.stack([F.conv2d(x, w, padding=1, groups=8) for x in many]))
    _, tangent = torch.func.jvp(lambda x: depthwise(x, w), (x,), (many[0],))
    torch.testing.assert_close(tangent, F.conv2d(many[0], w, padding=1, groups=8))
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: depthwise(x[None], w).square().sum()), (None, 0))(w, x)
    expected = [torch.autograd.grad(F.conv2d(one[None], w, padding=1, groups=8).square().sum(), w)[0] for one in x]
    torch.testing.assert_close(per_sample, torch.stack(expected))


def test_a_transposed_convolution_uses_grad_input() -> None:
    mine = Counted(grad_input)
    convgrad.register("mine", grad_input=mine, accepts=accepts, dtypes=WIDE, verify=False)
    x, w, b = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(3)
    torch.testing.assert_close(
        convgrad.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
    )
    assert mine.calls == 1


def test_the_function_is_not_differentiated_through() -> None:
    """It sees plain tensors without a history, whatever it does with them."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
            return forward(input, weight, p)

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise AssertionError("differentiated through")

    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        assert not input.requires_grad
        assert not weight.requires_grad
        with torch.enable_grad():
            return Inner.apply(input, weight, p)  # pyright: ignore[reportReturnType]

    convgrad.register("mine", forward=mine, accepts=accepts, verify=False)
    x, w = operands()
    depthwise(x, w).sum().backward()
    torch.func.grad(lambda x: depthwise(x, w).sum())(x)
