"""The reader of PyTorch's flags: TF32, which two generations of switches allow and forbid."""

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


@pytest.mark.parametrize(
    ("where", "name", "value", "allowed"),
    [
        (cudnn, "allow_tf32", False, False),
        (cudnn, "allow_tf32", True, True),
        (cudnn.conv, "fp32_precision", "ieee", False),  # which makes the old switch unreadable
        (cudnn.conv, "fp32_precision", "tf32", True),
    ],
)
def test_either_switch_is_read(where: Any, name: str, value: object, allowed: bool) -> None:
    setattr(where, name, value)
    assert cudnn_allows_tf32() == allowed
