"""What happened in a block, summed by convolution and output."""

import pytest
import torch

from convgrad.diagnostics import Call, Limits, limited
from convgrad.engine import Event
from convgrad.models import Usage
from convgrad.problem import ConvProblem

P = "g4mb2ic4ih9oc4kh3ph1"
FLOPS = ConvProblem.parse(P).flops


def used(*calls: tuple[str, float]) -> Usage:
    """A block with calls of these problems that took so many seconds."""
    usage = Usage()
    for text, seconds in calls:
        usage(Event(ConvProblem.parse(text), ("forward",), "reference", "cpu", "", (), seconds))
    return usage


def test_the_most_expensive_comes_first_and_what_is_left_out_is_summed() -> None:
    assert used().table(first=1) == "no convolution ran"
    one, two, three = (f"mb{n}ic1iw4oc1kw1" for n in (1, 2, 3))
    usage = used((one, 1e-3), (two, 3e-3), (three, 2e-3), (one, 1.5e-3))
    found = [(row.convolution.batch, row.calls, row.total) for row in usage.rows]
    assert found == [(2, 1, 3), (1, 2, pytest.approx(2.5)), (3, 1, 2)]
    assert ([*usage], len(usage)) == (usage.rows, 3)
    assert usage.table(first=3) == usage.table()
    _, first, more, total = [line.split() for line in usage.table(first=1).splitlines()][:4]
    assert first[-1].startswith("g1mb2")
    assert more == ["3", "2", "more", "4.50", "60.0%"]
    assert total == ["4", "sum", "7.50", "100.0%"]


def test_the_first_calls_hardly_count_but_in_the_total() -> None:
    (row,) = used(*((P, seconds) for seconds in (9.0, 1e-3, 1e-3, 1e-3, 1e-3))).rows
    assert (row.milliseconds, row.total) == pytest.approx((1.0, 9004.0))


def test_a_limit_that_a_row_exceeds_is_measured_again_once(monkeypatch) -> None:
    def known(*milliseconds: float, measure: bool = True) -> list[Limits]:
        return limited([Call(P, "forward", "aten", milliseconds=ms) for ms in milliseconds], measure)[1]

    measured: list[torch.dtype] = []
    busy, idle = (Limits(1e30, FLOPS * per_second, "float32", "made up") for per_second in (500.0, 2000.0))
    monkeypatch.setattr("convgrad.diagnostics.records.limits_of", lambda *_, **__: idle if measured else busy)
    monkeypatch.setattr("convgrad.diagnostics.records.measure_limits", measured.append)
    assert known(2.5, 2.0) == [busy]  # 2 ms at best
    assert known(1.0, measure=False) == [busy]
    assert limited([Call(P, "forward", "native:winograd winograd", milliseconds=1.0)])[1] == [busy]
    assert known(2.5, 1.0, 0.9) == [idle]
    assert measured == [torch.float32]


@pytest.mark.parametrize(("part", "exceeds"), [(0.25, False), (0.5, False), (1.04, False), (1.5, True)])
def test_the_part_of_the_limit_and_how_to_measure_one_again_that_is_exceeded(part, exceeds, monkeypatch) -> None:
    limits = Limits(1e30, 1e6, "float32", "made up")
    monkeypatch.setattr("convgrad.diagnostics.records.limits_of", lambda *_, **__: limits)
    usage = used((P, FLOPS / 1e6 / part))
    assert usage.to_dict()["rows"][0]["fraction_of_limit"] == pytest.approx(part)
    text = usage.table()
    assert exceeds or f"{part:.0%}" in text
    assert ("convgrad info --measure" in text) == exceeds
    assert max(map(len, usage.table(width=60).splitlines())) <= 60
