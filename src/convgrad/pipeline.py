"""The old name of `convgrad.diagnostics.aten_rules`; leaves with the next version."""

from __future__ import annotations

import warnings

from .diagnostics.aten_rules import *  # noqa: F403
from .diagnostics.aten_rules import AtenTrace as Walk  # noqa: F401
from .diagnostics.aten_rules import ConvCall as Call
from .diagnostics.aten_rules import KernelRun as Step  # noqa: F401
from .diagnostics.aten_rules import trace_aten as walk  # noqa: F401

make_call = Call.of

warnings.warn("convgrad.pipeline is now convgrad.diagnostics.aten_rules", DeprecationWarning, stacklevel=2)
