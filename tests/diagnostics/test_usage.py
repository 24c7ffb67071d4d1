"""What happened in a block, summed by convolution and output."""

import torch

import convgrad
from convgrad.diagnostics import Call, Limits, limited
from convgrad.engine import Event
from convgrad.models import Usage
from convgrad.problem import ConvProblem

P = "g4mb2ic4ih9oc4kh3ph1"


def test_the_most_expensive_comes_first() -> None:
    usage = Usage()
    for channels, seconds in ((1, 1.0), (2, 3.0), (3, 2.0), (1, 1.5)):
        problem = ConvProblem.parse(f"ic{channels}ih3oc1kh1")
        usage(Event(problem, ("forward",), "reference", "cpu", "", (), seconds))
    assert [(row.convolution.in_channels, row.calls, row.total) for row in usage.rows] == [
        (2, 1, 3000),
        (1, 2, 2500),
        (3, 1, 2000),
    ]


def test_what_runs_after_the_block_is_not_counted() -> None:
    x, w = torch.randn(1, 2, 5), torch.randn(2, 2, 3)
    with Usage() as usage:
        convgrad.conv1d(x, w)
    convgrad.conv1d(x, w)
    assert [row.calls for row in usage.rows] == [1]


def test_a_limit_that_a_row_exceeds_is_measured_again_once(monkeypatch) -> None:
    def took(milliseconds: float) -> Call:
        return Call(P, "forward", "aten", milliseconds=milliseconds)

    def known(calls: list[Call], measure: bool = True) -> list[Limits]:
        return limited(calls, measure)[1]

    p, measured = ConvProblem.parse(P), []
    busy, idle = (Limits(1e30, p.flops * per_second, "float32", "made up") for per_second in (500.0, 2000.0))
    monkeypatch.setattr("convgrad.diagnostics.calls.limits_of", lambda *_, **__: idle if measured else busy)
    monkeypatch.setattr("convgrad.diagnostics.calls.measure_limits", measured.append)
    assert known([took(2.5), took(2.0)]) == [busy]  # 2 ms at best
    assert known([took(1.0)], measure=False) == [busy]
    assert known([took(2.5), took(1.0), took(0.9)]) == [idle]
    assert measured == [torch.float32]


def test_a_table_that_exceeds_the_limit_says_how_to_measure_it_again(monkeypatch) -> None:
    monkeypatch.setattr(
        "convgrad.diagnostics.calls.limits_of", lambda *_, **__: Limits(1e30, 1e6, "float32", "made up")
    )
    p = ConvProblem.parse(P)
    for part, said in ((1.04, False), (1.5, True)):
        usage = Usage()
        usage(Event(p, ("forward",), "reference", "cpu", "", (), p.flops / 1e6 / part))
        assert ("convgrad info --measure" in usage.table()) == said
        assert max(map(len, usage.table(width=60).splitlines())) <= 60
