"""A stride of a dimension of size 1 becomes what PyTorch expects, in the same memory."""

from __future__ import annotations

import pytest
import torch

from convgrad._compat import usual_strides
from convgrad.backends.aten_defects import tidy


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (1, 3, 2, 4, 5)])
@pytest.mark.parametrize("last", [False, True])
def test_of_one_image(shape: tuple[int, ...], last: bool) -> None:
    usual = usual_strides(shape, last)
    t = torch.randn(1000).as_strided(shape, (777, *usual[1:]))
    tidied = tidy(t)
    assert tidied.stride() == usual
    assert tidied.data_ptr() == t.data_ptr()
    assert torch.equal(tidied, t)
    assert tidy(tidied) is tidied


def test_of_what_is_channels_last_but_for_that_stride() -> None:
    t = torch.randn(1000).as_strided((1, 3, 4, 5), (7, 1, 15, 3))
    assert tidy(t).is_contiguous()
    assert torch.equal(tidy(t), t)


@pytest.mark.parametrize("shape", [(2, 3), (1, 4, 5), (3, 1, 1, 7), (2, 3, 1, 4), (0, 3, 2, 2), (1, 2, 3, 1, 5)])
def test_usual_strides_are_those_of_a_new_tensor(shape):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    assert usual_strides(shape, channels_last=False) == torch.empty(shape).stride()
    if len(shape) in formats:
        new = torch.empty(shape, memory_format=formats[len(shape)])
        assert usual_strides(shape, channels_last=True) == new.stride()
