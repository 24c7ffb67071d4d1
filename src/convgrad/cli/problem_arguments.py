"""Problems on a command line: as they are, or files of them, benchdnn's included."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..problem import ConvProblem
from ..problem_text import read_problem_file
from .app import fail

__all__ = ["read_problems"]


def read_problems(whats: Sequence[str], transposed: bool = False) -> tuple[list[ConvProblem], list[ValueError]]:
    """The problems of some arguments, and what of their files could not be read.

    Raises:
        ValueError: an argument that is no problem and no file.
    """
    problems: list[ConvProblem] = []
    unread: list[ValueError] = []
    read = partial(ConvProblem.parse, transposed=transposed)
    for what in whats:
        if Path(what).is_file():
            for _, found in read_problem_file(what, read):
                if isinstance(found, ConvProblem):
                    problems.append(found)
                else:
                    unread.append(found)
        elif "/" in what or Path(what).exists():
            raise fail(f"{what!r} is no file", "a problem such as g32ic32ih14oc32kh3ph1, or a file of them")
        else:
            problems.append(read(what))
    return problems, unread
