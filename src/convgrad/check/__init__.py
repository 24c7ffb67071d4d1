"""Is a kernel right: register one, the conformance suite, its problems, operands, bounds and guards, and the report."""

from __future__ import annotations

from .aten_search import search_aten
from .loading import foreign_frames, load_kernels
from .problem_set import default_problems, problems, shrunk
from .properties import PROPERTIES, STRESS
from .registration import register, unregister
from .results import CheckReport, CheckResult
from .suite import accepts, check_backend, check_problem, first_look, outputs_of, problems_for
from .unregistered import problem_of_module
