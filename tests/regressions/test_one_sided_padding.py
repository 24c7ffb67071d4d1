"""A kernel that fits thanks to the high padding: PyTorch, asked for the layout with the low side only, refused it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

import convgrad


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 0), (-1, 5), (4, -1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_a_kernel_that_needs_one_side(ndim: int, transposed: bool, low: int, high: int) -> None:
    size, kernel = (1, 5) if transposed else (4, 5)
    x = torch.randn(2, 3, *[size] * ndim, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 3, *[kernel] * ndim, dtype=torch.float64, requires_grad=True)
    arguments = ([1] * ndim, [low, high] * ndim, [1] * ndim, transposed, [0] * ndim, 1)
    y = convgrad.convolution(x, w, None, *arguments)
    if transposed:
        full = torch.convolution(x, w, None, [1] * ndim, [0] * ndim, [1] * ndim, True, [0] * ndim, 1)
        want = pad(full, [-low, -high] * ndim)
    else:
        padded = pad(x, [low, high] * ndim)
        want = torch.convolution(padded, w, None, [1] * ndim, [0] * ndim, [1] * ndim, False, [0] * ndim, 1)
    torch.testing.assert_close(y, want)
    g = torch.randn_like(y)
    for ours, theirs in zip(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(want, (x, w), g), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.ops.convgrad.convolution(x.to("meta"), w.to("meta"), None, *arguments).shape == y.shape
