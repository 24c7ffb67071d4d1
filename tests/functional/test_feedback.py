"""grad_input through other weights: feedback alignment and Kolen-Pollack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import convgrad
from convgrad import DtypeError, ShapeError, UnsupportedError

CASES = {
    "1d": ((2, 4, 9), (6, 4, 3), {}),
    "2d grouped": ((2, 4, 7, 6), (6, 2, 3, 2), {"groups": 2, "stride": (2, 1), "padding": (1, 0)}),
    "3d": ((1, 2, 5, 4, 6), (3, 2, 2, 3, 1), {"dilation": (1, 1, 2)}),
    "transposed": ((2, 4, 5, 4), (4, 3, 3, 3), {"transposed": True, "stride": 2, "output_padding": 1}),
    "same": ((2, 4, 7), (4, 4, 4), {"padding": "same"}),
}


def tensors(input_size: tuple[int, ...], weight_size: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (input_size, weight_size, weight_size)]


def stock(x: Tensor, w: Tensor, options: dict) -> Tensor:
    """PyTorch's own, so that the expected gradients don't come from the code under test."""
    d = x.dim() - 2
    if options.get("transposed"):
        rest = {k: v for k, v in options.items() if k != "transposed"}
        return getattr(torch.nn.functional, f"conv_transpose{d}d")(x, w, **rest)
    return getattr(torch.nn.functional, f"conv{d}d")(x, w, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("teaches", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_gradients(case: str, dtype: torch.dtype, teaches: bool) -> None:
    input_size, weight_size, options = CASES[case]
    x, w, w_b = tensors(input_size, weight_size, dtype)
    y = convgrad.convolution(x, w, backward_weight=w_b, backward_weight_grad=teaches, **options)
    expected = stock(x, w, options)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w, w_b), g, allow_unused=True)
    (expected_input,) = torch.autograd.grad(stock(x, w_b, options), x, g)
    (expected_weight,) = torch.autograd.grad(expected, w, g)
    torch.testing.assert_close(got[0], expected_input)
    torch.testing.assert_close(got[1], expected_weight)
    if teaches:
        torch.testing.assert_close(got[2], expected_weight)
    else:
        assert got[2] is None


def test_bias_gets_its_gradient() -> None:
    x, w, w_b = tensors((2, 3, 8), (4, 3, 3), torch.float64)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    y = convgrad.convolution(x, w, bias, backward_weight=w_b)
    y.sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((4,), 12.0, dtype=torch.float64))


@pytest.mark.parametrize("wanted", [0, 1])
def test_differentiating_twice_raises(wanted: int) -> None:
    x, w, w_b = tensors((2, 3, 8), (4, 3, 3), torch.float64)
    y = convgrad.convolution(x, w, backward_weight=w_b)
    grads = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated twice: its grad_input is computed with backward_weight"):
        grads[wanted].sum().backward()


def test_forward_mode_raises() -> None:
    x, w, w_b = tensors((2, 3, 8), (4, 3, 3), torch.float64)
    with pytest.raises(UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda x: convgrad.convolution(x, w, backward_weight=w_b), (x,), (x,))


def test_function_transforms() -> None:
    x, w, w_b = (t.detach() for t in tensors((2, 3, 8), (4, 3, 3), torch.float64))

    def loss(x: Tensor) -> Tensor:
        return convgrad.convolution(x, w, backward_weight=w_b).sum()

    expected = torch.func.grad(lambda x: stock(x, w_b, {}).sum())(x)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    per_sample = torch.func.vmap(torch.func.grad(lambda x: loss(x[None])))(x)
    torch.testing.assert_close(per_sample, expected)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: loss(x) ** 2)(x).sum())(x)


@pytest.mark.parametrize("transposed", [False, True])
def test_compiled(transposed: bool) -> None:
    x, w, w_b = tensors((2, 4, 8, 8), (4, 4, 3, 3), torch.float32)

    def call(x: Tensor, w: Tensor, w_b: Tensor) -> Tensor:
        return convgrad.convolution(
            x, w, padding=1, transposed=transposed, backward_weight=w_b, backward_weight_grad=True
        ).relu()

    g = torch.randn(2, 4, 8, 8)
    expected = torch.autograd.grad(call(x, w, w_b), (x, w, w_b), g)
    got = torch.autograd.grad(torch.compile(call, backend="aot_eager", fullgraph=True)(x, w, w_b), (x, w, w_b), g)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_refused() -> None:
    x, w, w_b = tensors((2, 3, 8), (4, 3, 3), torch.float64)
    wrong: Any = 3
    with pytest.raises(ShapeError, match=r"Expected backward_weight of the size of weight, \[4, 3, 3\]"):
        convgrad.convolution(x, w, backward_weight=torch.zeros(4, 3, 5, dtype=torch.float64))
    with pytest.raises(DtypeError, match=r"Weight type .* and backward_weight type .* should be the same"):
        convgrad.convolution(x, w, backward_weight=torch.zeros(4, 3, 3))
    with pytest.raises(DtypeError, match="weight on cpu and backward_weight on meta"):
        convgrad.convolution(x, w, backward_weight=w.to("meta"))
    with pytest.raises(TypeError, match="argument 'backward_weight' must be Tensor, not int"):
        convgrad.convolution(x, w, backward_weight=wrong)
    with pytest.raises(TypeError, match="backward_weight_grad is True or False, got 3"):
        convgrad.convolution(x, w, backward_weight=w_b, backward_weight_grad=wrong)
    with pytest.raises(ValueError, match="backward_weight_grad=True needs a backward_weight"):
        convgrad.convolution(x, w, backward_weight_grad=True)


def test_kolen_pollack_aligns() -> None:
    """With weight decay on both, the two weights become one, though they begin apart."""
    w, w_b = (torch.randn(4, 3, 3, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.SGD([w, w_b], lr=0.05, weight_decay=1.0)
    apart = (w - w_b).norm().item()
    for _ in range(100):
        x = torch.randn(4, 3, 8)
        loss = convgrad.convolution(x, w, backward_weight=w_b, backward_weight_grad=True).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (w - w_b).norm().item() < 0.01 * apart
