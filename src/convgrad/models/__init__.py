"""Whole models: a process taken over for a while, a model accelerated in place, a script run unmodified."""

from .process import takeover, watch_stock

__all__ = ["takeover", "watch_stock"]
