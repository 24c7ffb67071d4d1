"""Padding and dilation near 2**61 that cancel each other: an ordinary output, and integers that overflow on the way.

``native`` read outside of its operands and died; a volume whose output fits in no memory kept PyTorch busy for half a
minute before it was refused.
"""

from time import monotonic
from typing import Any

import pytest
import torch

import convgrad


@pytest.mark.parametrize("backend", [None, "native", "aten", "im2col", "reference"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_padding_that_no_kernel_can_count(backend: str | None, device: str, transposed: bool, ndim: int) -> None:
    x = torch.randn(1, 3, *[64] * ndim, dtype=torch.float64, device=device)
    w = torch.randn(3 if transposed else 12, 1, *[3] * ndim, dtype=torch.float64, device=device)
    extent = 2 ** (60 // ndim)
    options: Any = {"padding": extent, "dilation": extent + 31, "groups": 3, "transposed": transposed}
    words = "an output with its padding" if transposed else "a padded input"
    with convgrad.use_backend(backend), pytest.raises(convgrad.ShapeError, match=f"{words} of size .* does not fit"):
        convgrad.convolution(x, w, **options)
    with convgrad.use_backend(backend), pytest.raises(convgrad.ShapeError, match="does not fit in any memory"):
        convgrad.grad_weight(x, w.shape, x.new_empty(1, 12 if not transposed else 3, *[64] * ndim), **options)


def test_wide_padding_is_still_computed() -> None:
    x, w = torch.randn(1, 2, 8), torch.randn(2, 2, 3)
    y = convgrad.conv1d(x, w, padding=2**40, dilation=2**40)
    torch.testing.assert_close(y, convgrad.conv1d(x, w[..., 1:2]))


def test_a_volume_that_fits_in_no_memory_is_refused_at_once() -> None:
    x, w = torch.randn(1, 16, 32, 32, 32), torch.randn(16, 1, 3, 3, 3)
    start = monotonic()
    with pytest.raises(convgrad.ShapeError, match=r"an output of size .* does not fit in any memory"):
        convgrad.conv3d(x, w, padding=(2**31 - 1, 1, 1), groups=16)
    assert monotonic() - start < 20


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("wide", [3_000, 1_000_000])
def test_a_dilation_wider_than_the_image_is_left_to_pytorch(groups: int, wide: int) -> None:
    """An image of 6 x 6 in a padding of a million: a kernel that writes it out asks for a hundred terabytes."""
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4 // groups, 3, 3, dtype=torch.float64, requires_grad=True)
    options: Any = {"padding": wide, "dilation": wide, "groups": groups}
    want, got = torch.conv2d(x, w, **options), convgrad.conv2d(x, w, **options)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), (x, w)) for y in (got, want)))
