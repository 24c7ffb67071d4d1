"""A stride that no index ever multiplies must not matter: a dimension of size 1 may have any.

PyTorch 2.13 on the CPU (oneDNN) returns wrong numbers, silently, for a grouped convolution whose channels_last weight
has an odd stride in a dimension of size 1. Found by the check's aspect "layouts".
"""

from __future__ import annotations

import pytest
import torch

import convgrad


@pytest.mark.parametrize("backend", ["im2col", "reference", "aten"])
@pytest.mark.parametrize("kernel", [(1, 2), (2, 1), (1, 1, 2), (2, 1, 1)], ids=str)
def test_a_channels_last_weight_of_groups(backend: str, kernel: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[len(kernel)]
    input = torch.randint(-3, 4, (2, 4, *(3 for _ in kernel)), generator=generator).float()
    weight = torch.randint(-3, 4, (2, 2, *kernel), generator=generator).float()
    conv = {2: convgrad.conv2d, 3: convgrad.conv3d}[len(kernel)]
    with convgrad.use_backend("reference"):
        expected = conv(input, weight, groups=2)

    last = weight.contiguous(memory_format=layout)
    strides = [123 if n == 1 else s for n, s in zip(last.shape, last.stride(), strict=True)]
    odd = last.as_strided(last.shape, strides)
    assert torch.equal(odd, weight)
    with convgrad.use_backend(backend):
        assert torch.equal(conv(input.contiguous(memory_format=layout), odd, groups=2), expected)
