"""The error bound is no wider than its formula."""

from __future__ import annotations

import pytest
import torch

from convgrad.check.bounds import error_bound, reduction_length
from convgrad.problem import ConvProblem


def test_the_bound_is_not_wide() -> None:
    p = ConvProblem.parse("mb1ic64iw4oc1kw4 f32")
    length = reduction_length(p, "forward")
    exact, size = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    direct = error_bound("direct", torch.float32, length, exact, size)
    assert float(direct) == pytest.approx((length + 1) * 2**-24, rel=1e-3)
    low = error_bound("low-precision accumulation", torch.bfloat16, length, exact, size)
    assert float(low) == pytest.approx(256 * 2**-8 + 2**-8 * 2, rel=1e-2)
    assert (
        error_bound("direct", torch.float64, length, exact, size)
        < direct
        < error_bound("tf32", torch.float32, length, exact, size)
    )


def test_integers_are_exact_up_to_the_largest() -> None:
    size = torch.tensor([0.0, 127.0, 128.0], dtype=torch.float64)
    assert error_bound("direct", torch.int8, 5, size.long(), size).tolist() == [0, 0, float("inf")]
