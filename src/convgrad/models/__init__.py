"""Whole models: a process taken over for a while, a model accelerated in place, a script run unmodified."""

from typing import Any

from .accelerate import accelerate_
from .process import observe_aten, takeover
from .report import Report
from .script import run_script
from .usage import Usage

__all__ = ["Report", "Usage", "accelerate_", "observe_aten", "run_script", "takeover"]


def __getattr__(name: str) -> Any:
    if name != "watch_stock":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    warnings.warn("convgrad.models.watch_stock is now observe_aten", DeprecationWarning, stacklevel=2)
    return observe_aten
