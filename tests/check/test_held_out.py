"""Bugs of other kinds than those of `planted` are refused, too."""

from __future__ import annotations

import pytest

import convgrad
from convgrad import CheckError

from .authors import BUGS as THIRD
from .functions import WIDE
from .held_out import BUGS, RIGHT

#: Those that take many seconds to find.
LONG = {"65,535 images", "16-bit index into a plane", "wide kernel"}


@pytest.mark.parametrize("name", [*BUGS, *(pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in THIRD)])
def test_it_is_refused(name: str) -> None:
    output, bug = (BUGS | THIRD)[name]
    with pytest.raises(CheckError, match="'bug' is refused: its "):
        convgrad.register(
            "bug", **{output: bug.kernel, "accepts": bug.accepts, "dtypes": WIDE, **bug.options}, seconds=100
        )


@pytest.mark.parametrize("name", RIGHT)
def test_right_ones_are_not(name: str) -> None:
    kernel, accepts = RIGHT[name]
    convgrad.register("right", forward=kernel, accepts=accepts, dtypes=WIDE, seconds=0.5, prefer=False)
