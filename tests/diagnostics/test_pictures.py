"""The roofline: where its points and its roof are, and what a page and a notebook get of it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib", reason="the extra [report] brings matplotlib")

import convgrad
from convgrad.diagnostics import Call, Limits, by_pytorch, draw_roofline, explain, svg

LIMITS = Limits(2e10, 1e11, "float32", "made up")
P = "g8mb2ic8ih9oc8kh3ph1"


def call(milliseconds: float = 0.0, backend: str = "native", problem: str = P) -> Call:
    return Call(problem, "forward", backend, milliseconds=milliseconds, total=milliseconds)


def test_points_stand_at_what_they_reached_and_below_the_roof() -> None:
    flops, moved = call().work
    calls = [call(1e-3), call(0.0, "aten Mkldnn"), call(1.0, problem="mb0ic1ih3oc1kh3")]
    (axes,) = draw_roofline(calls, [LIMITS]).axes
    placed = [tuple(c.get_offsets()[0]) for c in axes.collections if len(c.get_offsets())]
    x = pytest.approx(flops / moved)
    roof = min(100.0, 20.0 * flops / moved)
    assert placed == [(x, pytest.approx(flops * 1e-3)), (x, pytest.approx(roof))]  # the other one at the roof
    line = axes.lines[0].get_xydata()
    assert [tuple(p) for p in line][1] == (pytest.approx(5.0), pytest.approx(100.0))
    names = {"native forward", "aten Mkldnn forward", "20 GB/s", "100 GFLOP/s float32"}
    assert {t.get_text() for t in axes.texts} >= names


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_roofline([call()], [])


def test_for_a_page_its_colors_are_variables_and_its_points_are_numbered() -> None:
    figure = draw_roofline([call(1e-3), call(1.0, problem="mb0ic1ih3oc1kh3"), *[call(1e-2, "aten")] * 2], [LIMITS])
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
    assert [by_pytorch(row.backend) for row in other.rows] == [True]  # its kernels in another layout
    for i, one in enumerate((there, t)):
        one.plot(tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")
    unknown = explain(P)
    assert "<svg" not in unknown._repr_html_()  # nothing was measured, nothing is known
    with pytest.raises(ValueError, match="nothing to draw"):
        unknown.plot()
