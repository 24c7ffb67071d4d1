"""The public conformance suite, and the timer: is this backend right, and is it faster?

The library checks its own backends with it. A new backend needs no other test::

    from convgrad.testing import check_backend

    def test_mine():
        check_backend(MyBackend()).raise_if_failed()

It also takes a forward function, as `convgrad.register` does, and a convolution module with its own backward.
"""

from __future__ import annotations

from .check import CheckReport, CheckResult, check_backend, check_problem, default_problems, outputs_of, problems
from .engine.measure import compare, conditions, keep_memory

__all__ = ["CheckReport", "CheckResult", "check_backend", "check_problem", "compare", "conditions",
           "default_problems", "keep_memory", "outputs_of", "problems"]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
