"""The conformance suite: is a backend right, for this problem, in every respect that the engine relies on?"""

from __future__ import annotations

from .aten_search import search_aten
from .first_look import first_look
from .problems import default_problems
from .properties import PROPERTIES
from .report import CheckReport, CheckResult
from .shrink import shrunk
from .suite import check_backend, check_problem, outputs_of

__all__ = [
    "PROPERTIES",
    "CheckReport",
    "CheckResult",
    "check_backend",
    "check_problem",
    "default_problems",
    "first_look",
    "outputs_of",
    "search_aten",
    "shrunk",
]
