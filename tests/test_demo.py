"""What the demonstration says of itself: that it can tell rounding from a wrong gradient."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")
pytest.importorskip("rich")


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    yield __import__("demo")
    for name in ("demo", "digits"):
        sys.modules.pop(name, None)


def exact(input: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """As right as float32 can be: every sum is rounded once."""
    return torch.conv2d(input.double(), weight.double(), *rest).float()  # pyright: ignore[reportCallIssue, reportArgumentType]


def moved(input: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """A depthwise layer forgets one column of its images."""
    mask = torch.ones_like(input)
    mask[..., 0] = 0 if weight.shape[1] == 1 < input.shape[1] else 1
    return torch.conv2d(input * mask, weight, *rest)  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize(("function", "agrees"), [(None, True), (exact, True), (moved, False)])
def test_the_check_of_the_gradients_sees_a_missed_border_and_no_rounding(demo, monkeypatch, function, agrees):
    if function is not None:
        monkeypatch.setattr(demo.convgrad, "conv2d", function)
    agreement = demo.Agreement()
    agreement.check(demo.network(nn.Conv2d), *next(demo.Digits.load().batches(1)))
    assert agreement.holds is agrees, (agreement.difference, agreement.share)
    assert agrees or agreement.share > 1000
