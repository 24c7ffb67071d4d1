"""Whole models: a process taken over for a while, and a model accelerated in place."""

from typing import TYPE_CHECKING, Any

from .accelerate import accelerate_
from .layout import spatial_convolutions, to_channels_last
from .main_script import accelerating, as_main, run_main
from .process import observe_aten, takeover
from .report import Report
from .trial import NO_COPY, arguments, copied, is_lazy, random_states_restored, training_step, why_it_fails

if TYPE_CHECKING:
    from ..diagnostics import Usage, run_script

__all__ = [
    "NO_COPY", "Report", "Usage", "accelerate_", "accelerating", "arguments", "as_main", "copied", "is_lazy",
    "observe_aten", "random_states_restored", "run_main", "run_script", "spatial_convolutions", "takeover",
    "to_channels_last", "training_step", "why_it_fails",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load `Usage` and `run_script`, which live in `convgrad.diagnostics`, when they are first named."""
    if name not in ("Usage", "run_script"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .. import diagnostics

    return getattr(diagnostics, name)
