"""Compiled graphs that PyTorch keeps on disk: it finds them by the program, which does not show what is registered.

A graph holds the choice that was made when it was traced, so the registered kernels become part of the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch.compiler import config

from .backend import CustomBackend

__all__ = ["mark"]

_MARK = re.compile(r"\[convgrad [^\]]*\]")


def mark(backends: Iterable[CustomBackend]) -> None:
    """Let graphs be found again only with the same kernels registered; a tag of the user's own stays."""
    kernels = " ".join(f"{b.name}={b.version}" for b in backends if b.preferred)
    rest = _MARK.sub("", config.cache_key_tag)
    config.cache_key_tag = f"{rest}[convgrad {kernels}]" if kernels else rest
