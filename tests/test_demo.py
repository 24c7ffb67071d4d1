"""What the demonstration says of itself: that it can tell rounding from a wrong gradient."""

import io
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sklearn")
pytest.importorskip("rich")

from rich.console import Console

from convgrad.engine.measure import Comparison


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    yield __import__("demo")
    for name in ("demo", "digits"):
        sys.modules.pop(name, None)


def exact(input: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """As right as float32 can be: every sum is rounded once."""
    return torch.conv2d(input.double(), weight.double(), *rest).float()


def moved(input: Tensor, weight: Tensor, *rest: object) -> Tensor:
    """A depthwise layer forgets one column of its images."""
    mask = torch.ones_like(input)
    mask[..., 0] = 0 if weight.shape[1] == 1 < input.shape[1] else 1
    return torch.conv2d(input * mask, weight, *rest)


@pytest.mark.parametrize(("function", "agrees"), [(None, True), (exact, True), (moved, False)])
def test_the_check_of_the_gradients_sees_a_missed_border_and_no_rounding(demo, monkeypatch, function, agrees):
    if function is not None:
        monkeypatch.setattr(demo.convgrad, "conv2d", function)
    agreement = demo.Agreement()
    agreement.check(demo.network(nn.Conv2d), *next(demo.Digits.load().batches(1)))
    assert agreement.holds is agrees, (agreement.difference, agreement.share)
    assert agrees or agreement.share > 1000


@pytest.mark.parametrize("width", [132, 80, 60])
def test_the_table_shows_every_figure_in_any_terminal(demo, monkeypatch, width):
    times = Comparison("PyTorch", {"convgrad": [0.0123] * 9, "PyTorch": [0.0456] * 9})
    parts = (("grad_input+grad_weight", "native", "expected 3.0x as fast as ATen"),)
    shown = Console(width=width, file=io.StringIO())
    monkeypatch.setattr(demo, "console", shown)
    demo.show_layers([demo.Row("depthwise 3x3 s2  128 x 16x16", parts, times)])
    text = shown.file.getvalue()
    assert "…" not in text
    assert all(figure in text for figure in ("12.30", "45.60", "3.71x"))
    assert "native: expected 3.0x as fast as ATen" in text
