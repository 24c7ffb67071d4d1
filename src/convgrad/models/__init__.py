"""Whole models: a process taken over for a while, a model accelerated in place, a script run unmodified."""

from .accelerate import accelerate_
from .layout import spatial_convolutions, to_channels_last
from .process import observe_aten, takeover
from .report import Report
from .script import run_script
from .trial import NO_COPY, arguments, copied, training_step, why_it_fails
from .usage import Usage, UsageRow, known_limits

__all__ = [
    "NO_COPY", "Report", "Usage", "UsageRow", "accelerate_", "arguments", "copied", "known_limits",
    "observe_aten", "run_script", "spatial_convolutions", "takeover", "to_channels_last", "training_step",
    "why_it_fails",
]  # fmt: skip
