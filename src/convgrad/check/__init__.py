"""The conformance suite: is a backend right, for this problem, in every respect that the engine relies on?"""

from __future__ import annotations

from .memory_guards import PeakMemory, Poison, guarded_copy
from .problems import default_problems
from .properties import ASPECTS
from .report import CheckReport, CheckResult
from .suite import check_backend, check_problem, outputs_of

__all__ = [
    "ASPECTS",
    "CheckReport",
    "CheckResult",
    "PeakMemory",
    "Poison",
    "check_backend",
    "check_problem",
    "default_problems",
    "guarded_copy",
    "outputs_of",
]
