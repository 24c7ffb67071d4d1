"""PyTorch's own descriptions of its convolutions: dtypes, sample calls, and calls that it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def op_info(name: str) -> Any:
    """Imported when first asked for: it takes 4 s, which every process would spend that collects tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    (found,) = (info for info in op_db if info.name == f"nn.functional.{name}")
    return found
