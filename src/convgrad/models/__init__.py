"""Whole models: a process taken over for a while, a model accelerated in place, a script run unmodified."""

from .accelerate import accelerate_
from .process import takeover, watch_stock
from .report import Report

__all__ = ["Report", "accelerate_", "takeover", "watch_stock"]
