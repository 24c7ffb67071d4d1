"""PyTorch's own descriptions of its convolutions: dtypes, sample calls, and calls that it refuses."""

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from convgrad.backends import DEFECTS

#: A defect of PyTorch's kernels that most processors here have; those with AMX have it, too.
KNOWN = next(d for d in DEFECTS if d.name == "narrow rows")
where_known = pytest.mark.skipif(not KNOWN.here(), reason="PyTorch's kernels have this defect with AVX-512 alone")


@cache
def op_info(name: str) -> Any:
    """Imported when first asked for: it takes 4 s, which every process would spend that collects tests.

    The import forbids to change PyTorch's flags for good, which tests of the flags do.
    """
    with mock.patch.object(torch.backends, "disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db

    (found,) = (info for info in op_db if info.name == f"nn.functional.{name}")
    return found
