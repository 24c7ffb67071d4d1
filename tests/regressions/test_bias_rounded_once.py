"""The definition, and im2col, round a result of 16 bits once: after the bias is added.

They rounded before and after, so a sum that the bias cancels had a whole ulp of the sum as its error.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import convgrad


@pytest.mark.parametrize("backend", ["reference", "im2col", "native"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_that_cancels_the_sum(backend: str, dtype: torch.dtype, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "conv_transpose1d" if transposed else "conv1d"
    for groups in (1, 4):
        x = torch.randn(2, 16, 64, generator=generator).to(dtype)
        w = torch.randn(16, 16 // groups, 5, generator=generator).to(dtype)
        bias = torch.full((16,), -4.0, dtype=dtype)
        exact = getattr(F, name)(x.double(), w.double(), bias.double(), groups=groups)
        try:
            with convgrad.use_backend(backend):
                y = getattr(convgrad, name)(x, w, bias, groups=groups)
        except convgrad.BackendError as error:
            pytest.skip(str(error))
        ulp = exact.abs() * torch.finfo(dtype).eps
        assert ((y.double() - exact).abs() <= ulp.clamp(min=1e-4)).all()  # half an ulp, and what float32 sums lose
