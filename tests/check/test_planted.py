"""Every planted bug is refused, however little its kernel accepts, and right kernels are not."""

from __future__ import annotations

import pytest

import convgrad
from convgrad import CheckError

from .planted import FORWARD, GRADIENTS, RIGHT, WIDE

#: Those that take seconds to find; the others are found in tenths of one.
LONG = {"crash at 64x64", "65,535 planes", "more than 64 columns", "more than 64 images", "three images and more"}
#: Two of the right ones are checked for a short time; all are for long.
SHORT = ("depthwise", "one layer of one network")
#: What accepts so little that the user names a problem.
NAMED = {"one layer of one network": "mb1ic128ih28oc128kh3sh2ph1 channels_last"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in FORWARD])
def test_forward(name: str) -> None:
    bug = FORWARD[name]
    options = {"dtypes": WIDE, **bug.options}  # in 16 bits PyTorch's own kernels, of which these are made, are refused
    with pytest.raises(CheckError):
        convgrad.register("bug", forward=bug.kernel, accepts=bug.accepts, seconds=100, **options)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    output, bug = GRADIENTS[name]
    with pytest.raises(CheckError):
        convgrad.register("bug", accepts=bug.accepts, dtypes=WIDE, seconds=100, **{output: bug.kernel})


@pytest.mark.parametrize("name", SHORT)
def test_right(name: str) -> None:
    kernel, accepts = RIGHT[name]
    convgrad.register("right", forward=kernel, accepts=accepts, seconds=0.3, problems=NAMED.get(name, ()))


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_for_long(name: str) -> None:
    kernel, accepts = RIGHT[name]
    backend = convgrad.register("right", forward=kernel, accepts=accepts, seconds=200, problems=NAMED.get(name, ()))
    assert backend.verified
