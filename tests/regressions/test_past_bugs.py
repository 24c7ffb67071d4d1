"""Gradients of convolutions that somebody's library once got wrong, silently. Each is compared with the definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

import convgrad

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], torch.dtype]] = {
    "pytorch 51430: torch.nn.grad with groups": ((2, 6, 9, 9), (8, 3, 3, 3), {"groups": 2}, torch.float32),
    "pytorch 50042: weight gradient, 24 groups, stride 2":
        ((2, 24, 15, 15), (24, 1, 3, 3), {"groups": 24, "stride": 2, "padding": 1}, torch.float32),
    "pytorch 15501: weight gradient, stride and dilation":
        ((2, 1, 2), (2, 1, 2), {"stride": 2, "dilation": 2, "padding": 1}, torch.float32),
    "pytorch 163539: bfloat16 in three dimensions": ((1, 8, 5, 6, 7), (8, 8, 3, 3, 3), {"padding": 1}, torch.bfloat16),
}  # fmt: skip


def gradients(x: Tensor, w: Tensor, g: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = convgrad.convolution(x, w, **options)
    return torch.autograd.grad(y, (x, w), g)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_definition(name: str) -> None:
    input_size, weight_size, options, dtype = CASES[name]
    x, w = torch.randint(-3, 4, input_size).to(dtype), torch.randint(-2, 3, weight_size).to(dtype)
    with convgrad.use_backend("reference"):
        y = convgrad.convolution(x.double(), w.double(), **options)
        g = torch.randint(-2, 3, y.shape).to(dtype)
        want = gradients(x.double(), w.double(), g.double(), options)
    exact = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0} if dtype.itemsize == 2 else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(convgrad.convolution(x, w, **options).double(), y, **exact)
    direct = (convgrad.grad_input(x.shape, w, g, **options), convgrad.grad_weight(x, w.shape, g, **options))
    for got in (gradients(x, w, g, options), direct):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, **exact)


def test_a_transposed_convolution_with_gaps() -> None:
    """pytorch 63314: stride 2 and a kernel of one element; the gradient skips the gaps."""
    x = torch.tensor([[[[-2.0, -3.0]]]], requires_grad=True)
    w = torch.tensor([[[[5.0]]]])
    y = convgrad.conv_transpose2d(x, w, stride=2)
    (got,) = torch.autograd.grad(y, x, torch.tensor([[[[1.5, 100.0, 0.7]]]]))
    torch.testing.assert_close(got, torch.tensor([[[[7.5, 3.5]]]]))


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_per_sample_gradients_with_dilation(d: int, groups: int) -> None:
    """Opacus 137: per-sample weight gradients ignored the dilation."""
    x, w = torch.randn(3, 4, *[7] * d).double(), torch.randn(4, 4 // groups, *[2] * d).double()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return convgrad.convolution(x[None], w, None, 1, 1, 2, groups=groups).pow(2).sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    with convgrad.use_backend("reference"):
        want = torch.stack([torch.func.grad(loss)(w, xi) for xi in x])
    torch.testing.assert_close(got, want)
