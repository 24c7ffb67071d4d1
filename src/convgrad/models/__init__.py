"""Whole models: a process taken over for a while, a model accelerated in place, a script run unmodified."""

from .accelerate import accelerate_
from .classes import is_convolution
from .layout import inputs_to_channels_last, is_spatial, weights_to_channels_last
from .process import observe_aten, takeover
from .report import Report
from .script import run_script
from .trial import NO_COPY, copied, training_step, why_it_fails
from .usage import Usage, UsageRow, known_limits

__all__ = [
    "NO_COPY", "Report", "Usage", "UsageRow", "accelerate_", "copied", "inputs_to_channels_last",
    "is_convolution", "is_spatial", "known_limits", "observe_aten", "run_script", "takeover", "training_step",
    "weights_to_channels_last", "why_it_fails",
]  # fmt: skip
