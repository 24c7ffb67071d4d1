"""The roofline: where its points and its roof are, and what a page and a notebook get of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib", reason="the extra [report] brings matplotlib")

import convgrad
from convgrad.diagnostics import Limits, Point, draw_roofline, explain, svg

LIMITS = Limits(2e10, 1e11, "float32", "made up")
P = "g8mb2ic8ih9oc8kh3ph1"


def test_points_stand_at_what_they_reached_and_below_the_roof() -> None:
    points = [Point("a", 400, 100, 1e-8), Point("b", 100, 200, ours=False), Point("", 0, 5, 1.0)]
    (axes,) = draw_roofline(points, [LIMITS]).axes
    placed = [tuple(c.get_offsets()[0]) for c in axes.collections if len(c.get_offsets())]  # pyright: ignore
    assert placed == [(4.0, pytest.approx(40.0)), (0.5, pytest.approx(10.0))]  # the other one at the roof
    roof = axes.lines[0].get_xydata()
    assert [tuple(p) for p in roof][1] == (pytest.approx(5.0), pytest.approx(100.0))  # pyright: ignore
    assert {t.get_text() for t in axes.texts} >= {"a", "b", "20 GB/s", "100 GFLOP/s float32"}


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_roofline([Point("", 1, 1)], [])


def test_for_a_page_its_colors_are_variables_and_its_points_are_numbered() -> None:
    figure = draw_roofline(
        [Point("", 400, 100, 1e-8), Point("", 0, 1, 1.0), *[Point("", 400, 100, 1e-7, False)] * 2], [LIMITS]
    )
    text = svg(figure, "What it shows")
    assert re.findall(r'data-row="(\d)"', text) == ["0", "2", "3"]
    assert 'role="img" aria-label="What it shows"' in text
    assert set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"var\([^)]*\)", "", text))) <= {"#000000"}
    assert "GFLOP/s" in text  # text is text
    assert svg(figure, "What it shows") == text


def test_explanations_and_traces_show_and_write_themselves(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    there = explain(P, device="h100 cudnn 9.10")
    assert "<svg" in there._repr_html_()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    assert "<svg" in explain(model, torch.empty(1, 3, 9, 9), device="h100 cudnn 9.10")._repr_html_()
    with convgrad.trace() as t:
        convgrad.conv2d(torch.ones(1, 1, 5, 5), torch.ones(1, 1, 3, 3))
    assert "<svg" in t._repr_html_()
    with convgrad.trace() as other, convgrad.use_backend("aten:channels_last"):
        convgrad.conv2d(torch.ones(1, 1, 5, 5), torch.ones(1, 1, 3, 3))
    assert [point.ours for point in other._points()] == [False]  # PyTorch's kernels on another way to them
    for i, one in enumerate((there, t)):
        one.plot(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")
    unknown = explain(P)
    assert "<svg" not in unknown._repr_html_()  # nothing was measured, nothing is known
    with pytest.raises(ValueError, match="nothing to draw"):
        unknown.plot()
