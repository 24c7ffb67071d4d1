"""An image of 6 x 6 in a padding of a million: a kernel that writes the padding out asks for a hundred terabytes."""

import pytest
import torch

import convgrad


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("wide", [3_000, 1_000_000])
def test_a_dilation_wider_than_the_image_is_left_to_pytorch(groups, wide):
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 4 // groups, 3, 3, dtype=torch.float64, requires_grad=True)
    options = {"padding": wide, "dilation": wide, "groups": groups}
    want, got = torch.conv2d(x, w, **options), convgrad.conv2d(x, w, **options)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(y.sum(), (x, w)) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
