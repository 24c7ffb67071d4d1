"""``convgrad bench``: checked first, then timed; a wrong backend gets no time."""

from __future__ import annotations

import csv
import json

import pytest
import torch

pytest.importorskip("typer")

from tests.check.broken import around

from convgrad.backends.reference import ReferenceBackend
from convgrad.cli import bench_problems as bench
from convgrad.cli.app import run
from convgrad.diagnostics import Limits
from convgrad.engine import register
from convgrad.problem import PASSES, ConvProblem

SMALL = "g4mb2ic4ih6oc4kh3ph1"


@pytest.fixture(autouse=True)
def _eighty_columns_and_a_known_limit(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(bench, "limits_of", lambda *args, **kwargs: Limits(1e9, 1e9, "float32", "a test"))


def test_a_table_with_a_ratio_and_the_conditions(capsys) -> None:
    assert run(["bench", SMALL, "--backend", "im2col", "--seconds", "0.05", "--return-memory"]) == 0
    printed = capsys.readouterr().out
    for text in ("forward", "grad_input", "grad_weight", "im2col", f"torch {torch.__version__}"):
        assert text in printed
    assert "as given" in printed or "channels_last" in printed
    assert "x [" in printed or "no difference" in printed
    assert "speed is the median of the ratios inside a round" in " ".join(printed.split())
    rows = [line.split() for line in printed.splitlines() if "im2col" in line]
    assert len(rows) == 3
    for _, _, ours, theirs, speed, *_ in rows:
        shown = float(speed.removesuffix("x"))
        assert float(theirs) / float(ours) == pytest.approx(shown, rel=0.002, abs=0.006)  # all three are rounded
    assert printed.count("GFLOP/s: ") == 3
    assert printed.count("of limit: ") == 3


def test_a_file_of_problems_and_files_of_times(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "limits_of", lambda *args, measured: measured or None)
    shapes = tmp_path / "shapes"
    shapes.write_text(f'# as benchdnn has them\n--reset --dir=FWD_B\n{SMALL}n"one"\nmb1ic4iw9oc4kw3 float64\n')
    as_csv = tmp_path / "times.csv"
    args = ["-o", "grad_weight", "-b", "im2col", "--seconds", "0.05", "--return-memory", "--no-limit"]
    assert run(["bench", str(shapes), *args, "--json", "--csv", str(as_csv)]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["conditions"].endswith("system") or "kept" in data["conditions"]
    assert [x["problem"] for x in data["problems"]] == [
        'g4mb2ic4ih6oc4oh6kh3sh1ph1dh0n"one"', "g1mb1ic4iw9oc4ow7kw3sw1pw0dw0 float64"
    ]  # fmt: skip
    for line in data["problems"]:
        flops = ConvProblem.parse(line["problem"]).flops
        assert line["gflops_per_second"] == pytest.approx(flops / line["milliseconds"] / 1e6)
        assert line["speed"] == pytest.approx(line["pytorch_milliseconds"] / line["milliseconds"])
        assert line["fraction_of_limit"] is None
    with open(as_csv, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["milliseconds"]) for r in rows] == [x["milliseconds"] for x in data["problems"]]


def test_a_part_of_the_limit(capsys, monkeypatch) -> None:
    limits = Limits(1e9, 1e12, "float32", "a test")
    monkeypatch.setattr(bench, "limits_of", lambda *args, **kwargs: limits)
    assert run(["bench", SMALL, "-o", "forward", "-b", "im2col", "--seconds", "0.05", "--return-memory", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["data"]["problems"]
    least = limits.seconds(ConvProblem.parse(SMALL))
    assert line["fraction_of_limit"] == pytest.approx(least / line["milliseconds"] * 1e3)


def test_a_problem_for_which_there_is_no_memory_does_not_end_the_others(capsys, tmp_path) -> None:
    shapes = tmp_path / "shapes"
    shapes.write_text(f"mb1ic1000000iw1000000000oc1kw1\n{SMALL}\n")
    args = ["-o", "forward", "-b", "im2col", "--seconds", "0.05", "--return-memory"]
    assert run(["bench", str(shapes), *args, "--json"]) == 0
    large, small = json.loads(capsys.readouterr().out)["data"]["problems"]
    assert (large["speed"], large["note"]) == (None, "no memory for it")
    assert small["speed"] > 0


def test_all_backends_and_one_of_them_are_all(capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_timed", lambda *_: {})
    tables = []
    for more in ([], ["-b", "im2col"]):
        assert run(["bench", SMALL, "-o", "forward", "-b", "all", *more, "--return-memory"]) == 1  # nothing is timed
        printed = capsys.readouterr().out
        tables.append(printed[printed.index("g4") :])  # after what may be said of a busy machine
    assert tables[0] == tables[1]
    assert "im2col" in tables[0]


def test_a_files_directions_say_what_is_timed_unless_the_command_does(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(bench, "_timed", lambda *_: {})
    shapes = tmp_path / "shapes"
    shapes.write_text(
        f"--dir=BWD_W {SMALL}\n--dir=FWD_B,BWD_D\nic2iw9oc2kw3\nic2iw8oc2kw3 transposed\n--reset ic2iw7oc2kw3\n"
    )
    for options, expected in (
        ((), [{"grad_weight"}, {"forward", "grad_input"}, {"forward", "grad_input"}, {*PASSES}]),
        (("-o", "forward"), [{"forward"}] * 4),
    ):
        assert run(["bench", str(shapes), *options, "--json", "--return-memory", "--no-limit"]) == 1
        found: dict[str, set[str]] = {}
        for line in json.loads(capsys.readouterr().out)["data"]["problems"]:
            found.setdefault(line["problem"], set()).add(line["output"])
        assert [*found.values()] == expected


def test_a_wrong_backend_gets_no_time(capsys) -> None:
    register(
        around(ReferenceBackend, lambda kernel, *_: lambda *args: kernel(*args) + 1, name="wrong"), candidate=False
    )
    assert run(["bench", SMALL, "-b", "wrong", "-o", "forward", "--seconds", "0.05", "--return-memory"]) == 1
    printed = capsys.readouterr().out
    assert "not timed" in printed
    assert "wrong:" in printed


def test_reasons_stand_in_the_table(capsys) -> None:
    assert run(["bench", "mb1ic80ih5oc2kh3", "-b", "native", "-o", "forward", "--return-memory"]) == 1
    assert "channels a group, and pointwise ones without padding" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "args",
    [
        ["mb0ic1iw3oc1kw1"],
        [SMALL, "--input", "1x3x9x9"],
        ["steps"],
        ["steps", "nosuch"],
        ["steps", "--seconds", "nan"],
    ],
)
def test_bad_requests(capsys, args: list[str]) -> None:
    assert run(["bench", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convgrad: ")
    assert "Traceback" not in error


def test_what_pytorch_does_not_compute_is_said(capsys) -> None:
    assert run(["bench", f"{SMALL} int64", "-o", "grad_input", "--return-memory"]) == 1
    assert "PyTorch does not compute it" in capsys.readouterr().out


def test_a_padding_mode_is_compared_with_pytorchs_padded_copy(capsys) -> None:
    args = ["-o", "forward", "--seconds", "0.05", "--return-memory", "--json"]
    assert run(["bench", "ic64ih8oc64kh3ph1 circular", *args]) == 0
    (line,) = json.loads(capsys.readouterr().out)["data"]["problems"]
    assert line["backend"] == "aten (padded copy)"
    assert line["speed"] > 0


def test_a_file_without_a_problem(capsys, tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert run(["bench", str(tmp_path / "empty.txt")]) == 1
    assert capsys.readouterr().out.startswith("nothing could be timed\n")


def test_interrupted_it_keeps_the_lines_that_it_has(capsys, monkeypatch) -> None:
    compared, calls = bench.compared, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compared(*args, **kwargs)

    monkeypatch.setattr(bench, "compared", interrupted)
    assert run(["bench", SMALL, "--backend", "im2col", "--seconds", "0.05", "--return-memory"]) == 130
    printed, error = capsys.readouterr()
    assert [line.split()[0] for line in printed.splitlines() if "im2col" in line] == ["forward"]
    assert error == "convgrad: interrupted\n"


def test_a_narrow_terminal_loses_no_figure(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert run(["bench", SMALL, "-b", "im2col", "-o", "forward", "--seconds", "0.05", "--return-memory"]) == 0
    printed = capsys.readouterr().out
    assert "speed: " in printed
    assert max(map(len, printed.splitlines())) <= 50
