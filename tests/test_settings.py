"""The reader of PyTorch's flags: TF32, which two generations of switches allow and forbid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from convgrad.settings import cudnn_allows_tf32

cudnn: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = cudnn.conv.fp32_precision
    yield
    cudnn.conv.fp32_precision = before


@pytest.mark.parametrize("allowed", [False, True])
def test_the_old_switch(allowed: bool) -> None:
    cudnn.allow_tf32 = allowed
    assert cudnn_allows_tf32() == allowed


@pytest.mark.parametrize(("precision", "allowed"), [("ieee", False), ("tf32", True)])
def test_the_new_switches(precision: str, allowed: bool) -> None:
    """They make the old one unreadable."""
    cudnn.conv.fp32_precision = precision
    assert cudnn_allows_tf32() == allowed
