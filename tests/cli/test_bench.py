"""``convgrad bench``: checked first, then timed; a wrong backend gets no time."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("typer")

from rich.console import Console

from convgrad.backends.reference import ReferenceBackend
from convgrad.cli import bench
from convgrad.cli.app import run
from convgrad.engine import register, unregister

SMALL = "g4mb2ic4ih6oc4kh3ph1"


def test_a_table_with_a_ratio_and_the_conditions(capsys) -> None:
    assert run(["bench", SMALL, "--backend", "im2col", "--seconds", "0.05", "--return-memory"]) == 0
    printed = capsys.readouterr().out
    for text in ("forward", "grad_input", "grad_weight", "im2col", f"torch {torch.__version__}"):
        assert text in printed
    assert "as given" in printed or "channels_last" in printed
    assert "x [" in printed or "no difference" in printed
    assert "speed is the median of the ratios inside a round" in printed
    rows = [line.split("│") for line in printed.splitlines() if "im2col" in line]
    assert len(rows) == 3
    for *_, ours, theirs, _, speed, _, _ in rows:
        shown = float(speed.split("x")[0])
        assert float(theirs) / float(ours) == pytest.approx(shown, rel=0.002, abs=0.006)  # all three are rounded


def test_a_wrong_backend_gets_no_time(capsys) -> None:
    class Wrong(ReferenceBackend):
        name = "wrong"

        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)
            return lambda *args: kernel(*args) + 1

    register(Wrong())
    try:
        status = run(["bench", SMALL, "-b", "wrong", "-o", "forward", "--seconds", "0.05", "--return-memory"])
        printed = capsys.readouterr().out
    finally:
        unregister("wrong")
    assert status == 1
    assert "not timed" in printed
    assert "wrong:" in printed


def test_reasons_stand_in_the_table(capsys) -> None:
    assert run(["bench", "mb1ic20ih5oc2kh3", "-b", "native", "-o", "forward", "--return-memory"]) == 0
    assert "at most 16 channels a group" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        [SMALL, "-o", "nothing"],
        [SMALL, "--seconds", "0"],
        [SMALL, "--seconds", "nan"],
        [SMALL, "--device", "nosuch"],
        ["mb0ic1iw3oc1kw1"],
        ["mb1ic1000000iw1000000000oc1kw1"],
    ],
)
def test_bad_requests_are_one_line(capsys, args: list[str]) -> None:
    assert run(["bench", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convgrad: ")
    assert error.count("\n") == 1


def test_what_pytorch_does_not_compute_is_said(capsys) -> None:
    assert run(["bench", f"{SMALL} int64", "-o", "grad_input", "--return-memory"]) == 0
    assert "PyTorch does not compute it" in capsys.readouterr().out


def test_interrupted_it_keeps_the_lines_that_it_has(capsys, monkeypatch) -> None:
    compare, calls = bench.compare, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:  # two of each line
            raise KeyboardInterrupt
        return compare(*args, **kwargs)

    monkeypatch.setattr(bench, "compare", interrupted)
    assert run(["bench", SMALL, "--backend", "im2col", "--seconds", "0.05", "--return-memory"]) == 130
    printed, error = capsys.readouterr()
    assert [line.split()[1] for line in printed.splitlines() if "im2col" in line] == ["forward"]
    assert error == "convgrad: interrupted\n"


def test_a_narrow_terminal_loses_no_figure(capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "out", lambda: Console(width=50))
    assert run(["bench", SMALL, "-b", "im2col", "-o", "forward", "--seconds", "0.05", "--return-memory"]) == 0
    assert "…" not in capsys.readouterr().out
