"""The old name of `convgrad.diagnostics.aten_rules`; leaves with the next version."""

from __future__ import annotations

import warnings

from .diagnostics.aten_rules import *  # noqa: F403

warnings.warn("convgrad.pipeline is now convgrad.diagnostics.aten_rules", DeprecationWarning, stacklevel=2)
