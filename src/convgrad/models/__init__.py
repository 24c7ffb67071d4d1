"""Whole models: a process taken over for a while, a model accelerated in place, a script run unmodified."""

from .accelerate import accelerate_
from .process import takeover, watch_stock
from .report import Report
from .script import run_script
from .usage import Usage

__all__ = ["Report", "Usage", "accelerate_", "run_script", "takeover", "watch_stock"]
