"""Bugs of other kinds than those of `planted` are refused, too."""

from __future__ import annotations

import pytest

import convgrad
from convgrad import CheckError

from .functions import WIDE
from .held_out import BUGS, RIGHT


@pytest.mark.parametrize("name", BUGS)
def test_it_is_refused(name: str) -> None:
    output, bug = BUGS[name]
    with pytest.raises(CheckError):
        convgrad.register(
            "bug", **{output: bug.kernel, "accepts": bug.accepts, "dtypes": WIDE, **bug.options}, seconds=100
        )


@pytest.mark.parametrize("name", RIGHT)
def test_right_ones_are_not(name: str) -> None:
    kernel, accepts = RIGHT[name]
    convgrad.register("right", forward=kernel, accepts=accepts, dtypes=WIDE, seconds=0.5, prefer=False)
