"""For C++: where the header ``convgrad.h`` lies."""

from __future__ import annotations

from pathlib import Path

__all__ = ["include_path"]


def include_path() -> str:
    """The folder to give to a compiler, so that ``#include <convgrad.h>`` is found.

    Equivalent to:
        >>> import os, convgrad
        >>> os.listdir(convgrad.include_path())
        ['convgrad.h']
    """
    return str(Path(__file__).parent / "include")
