"""The conformance suite: is a backend right, for this problem, in every respect that the engine relies on?"""

from __future__ import annotations

from .aten_search import search_aten
from .construction import construct
from .covering import cost, is_large
from .first_look import first_look, shrunk
from .fork import Lost, NoChild, in_child, why_not_in_child
from .problems import default_problems, real_layers
from .properties import PROPERTIES
from .property_check import calls_with
from .report import CheckReport, CheckResult
from .stress import STRESS
from .suite import accepts, check_problem, outputs_of
