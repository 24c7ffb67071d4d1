"""Reports: the cost of a training step, a script or a table of calls, as one page and as data (`diagnostics`)."""

from .diagnostics import (
    SCHEMA,
    Call,
    Change,
    Cost,
    Profile,
    Variant,
    changes,
    profile_model,
    profile_script,
    profile_table,
)

Row = Call

__all__ = [
    "SCHEMA", "Call", "Change", "Cost", "Profile", "Row", "Variant", "changes", "profile_model", "profile_script",
    "profile_table",
]  # fmt: skip
