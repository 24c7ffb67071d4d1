"""From the sweep to the rules, and from results to README's table: the commands themselves, on very little."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

np = pytest.importorskip("numpy")
pytest.importorskip("typer")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import derive  # noqa: E402
import draw  # noqa: E402
import sweep  # noqa: E402

from convgrad.cli import bench_layers, bench_results, bench_steps  # noqa: E402
from convgrad.engine import backends, measurements, rules  # noqa: E402
from convgrad.problem import ConvProblem  # noqa: E402

CONDITIONS = dict(zip(bench_results.CONDITIONS, ("a processor", 1, "2.13.0", "0.1.0", "abc", "kept", 0), strict=True))


# ---- the sweep ---------------------------------------------------------------------------------------


def test_problems_of_every_kind_repeat_and_are_no_larger_than_they_may_be() -> None:
    problems = [sweep.random_problem(n) for n in range(120)]
    assert problems == [sweep.random_problem(n) for n in range(120)]
    assert problems != [sweep.random_problem(n, threads=2) for n in range(120)]
    assert len({*problems}) == len(problems)
    assert {p.ndim for p in problems} == {1, 2, 3}
    assert {p.dtype for p in problems} == {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    for kind in ("depthwise", "channels_last", "transposed", "pointwise"):
        assert {getattr(p, kind) for p in problems} == {True, False}
    assert any(p.groups > 1 and not p.depthwise for p in problems)
    assert max(p.flops for p in problems) <= sweep._MOST_FLOPS


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "random_problem", lambda n, threads: ConvProblem.parse(f"g4mb{n + 1}ic4ih6oc4kh3"))
    monkeypatch.setattr(sweep, "keep_candidates", lambda: None)
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    file = tmp_path / "sweep.csv"

    def run(problems: int, *options: str) -> list[dict[str, str]]:
        monkeypatch.setattr(sys, "argv", ["sweep.py", str(file), "--problems", str(problems), *options])
        try:
            assert sweep.main() == 0
        finally:
            measurements.reload()
        with file.open(encoding="utf-8", newline="") as lines:
            return list(csv.DictReader(lines))

    one = run(1)
    assert [r["pass"] for r in one] == ["forward", "grad_input", "grad_weight"]
    assert {r["aten"] for r in one} == {"1"}
    assert all(float(r["im2col"]) > 0 and float(r["noise"]) >= 0 for r in one)
    two = run(2)
    assert two[:3] == one
    assert [r["problem"][:6] for r in two] == ["g4mb1i"] * 3 + ["g4mb2i"] * 3
    both = run(3, "--threads", "1", "2")
    assert both[:6] == two
    assert [r["threads"] for r in both[6:]] == ["2"] * 3  # of two turns of one thread both are there
    assert set(sweep.WAYS) <= {*backends()}


# ---- the rules ---------------------------------------------------------------------------------------


def made_up(path: Path) -> Path:
    """A sweep in which native wins twofold but in channels_last, where it loses; nothing else can."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, sweep.COLUMNS, restval="")
        writer.writeheader()
        for number in range(240):
            layout = " channels_last" if number % 4 == 0 else ""
            p = ConvProblem.parse(f"g8mb{1 + number}ic8ih{8 + number % 11}oc8kh3{layout}")
            row = {"problem": p, "emulated": 0, "pass": "forward", "aten": 1, "noise": 0.02}
            writer.writerow({**row, "native": 2.0 if layout else 0.5, **CONDITIONS})
    return path


def test_a_condition_is_found_and_holds_where_it_was_not_seen(tmp_path: Path) -> None:
    kinds = derive.read([made_up(tmp_path / "sweep.csv")])
    found = {kind: derive.fitted(rows) for kind, rows in kinds.items()}
    assert derive.lines(found) == [("depthwise", "not channels_last", "native", "2.0x")]
    [fitted] = found.values()
    assert (fitted.held_out.slower, fitted.held_out.worst, fitted.held_out.often) == ("0 %", "1.00x", "0.0 %")
    report = list(derive.report(kinds, found))
    assert "| depthwise | 240 | 0 % | 1.00x | 0.0 % (0.0 %) | 68 % | 0.0 % | 1 |" in report  # 2 ** 0.75


def test_the_table_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    copy = tmp_path / "rules.py"
    copy.write_text(Path(rules.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(derive, "RULES", copy)
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- sweep -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(derive, "DOCS", page)
    monkeypatch.setattr(sys, "argv", ["derive.py", str(made_up(tmp_path / "sweep.csv")), "--write"])
    assert derive.main() == 0
    printed = capsys.readouterr().out
    text = copy.read_text(encoding="utf-8")
    compile(text, str(copy), "exec")
    assert rules.rules_of(text.split(derive.RULE_LINES[0])[1].split(derive.RULE_LINES[1])[0]) == {
        "depthwise": (rules.Rule(("not channels_last",), "native", "2.0x"),)
    }
    assert "depthwise  not channels_last  native  2.0x" in printed
    said = page.read_text(encoding="utf-8")
    assert said.startswith("before\n<!-- sweep -->\n| held out |")
    assert said.endswith("|\n<!-- end -->\nafter\n")
    assert derive.main() == 0  # again, over what it wrote
    assert (copy.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")) == (text, said)


def rows_of(noise: float = 0.0, **times: Any) -> derive.Rows:
    """Rows of a few ways, which the others cannot compute; all features are the same."""
    n = len(next(iter(times.values())))
    every = np.full((n, len(sweep.WAYS)), np.nan)
    for way, values in {"aten": np.zeros(n), **times}.items():
        every[:, sweep.WAYS.index(way)] = values
    features = np.ones((n, len(rules.FEATURES)))
    return derive.Rows(np.arange(n), features, every, np.nanmin(every, axis=1), np.full(n, noise))


def test_a_second_way_where_the_first_cannot() -> None:
    native = np.where(np.arange(20) % 2 == 0, np.nan, -2.0)
    rows = rows_of(native=native, **{"aten:float32": np.full(20, -1.0)})
    leaves = derive.grown(rows, 1.0)
    assert leaves == [derive.Leaf({}, "native", 2.0), derive.Leaf({}, "aten:float32", 1.0)]
    loss = derive.lost(leaves, rows)
    assert (loss.slower, loss.own.any()) == ("0 %", False)


@pytest.mark.parametrize(
    ("slower", "noise", "expected"),
    [
        (2.0, 0.0, []),
        (1.05, 0.0, ["native"]),  # hardly slower is no harm
        (1.2, 0.0, []),
        (1.2, 0.1, ["native"]),  # what the noise of the row may explain is none either
    ],
)
def test_what_sometimes_loses_clearly_is_not_taken(slower: float, noise: float, expected: list[str]) -> None:
    """Faster by a third in three rows of four and slower in the fourth, as no feature tells."""
    native = np.log(np.where(np.arange(40) % 4 == 0, slower, 0.7))
    leaves = derive.grown(rows_of(noise, native=native), 1.0)
    assert [leaf.way for leaf in leaves] == expected


@pytest.mark.parametrize(
    ("low", "high", "threshold"), [(8, 16, 10), (1, 2, 2), (0, 1, 1), (1.22, 1.31, 1.3), (2, 3, 3)]
)
def test_thresholds_are_short(low: float, high: float, threshold: float) -> None:
    assert low < derive._round(low, high) <= high
    assert derive._round(low, high) == threshold


# ---- the picture -------------------------------------------------------------------------------------


def results(folder: Path) -> list[str]:
    layer = dict.fromkeys(bench_layers.COLUMNS, "") | CONDITIONS
    layer |= {"problem": "g8ic8ih9oc8kh3", "models": "one two", "layout": "contiguous", "output": "forward"}
    speeds = {"rules_speed": 2, "measured_speed": 4}
    step = dict.fromkeys(bench_steps.COLUMNS, "") | CONDITIONS
    step |= {"model": "one", "layout": "channels_last", "replaced": 3, "speed": 1.5, "low": 1.25, "high": 2}
    files = []
    for name, columns, rows in (
        ("layers", bench_layers.COLUMNS, [layer | speeds, layer | {"measured_speed": 1, "rules_speed": 1}]),
        (
            "steps",
            bench_steps.COLUMNS,
            [step, step | {"speed": "", "note": "wrong"}, step | {"threads": 8, "speed": 9}],
        ),
    ):
        files.append(str(folder / f"{name}.csv"))
        with open(files[-1], "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    return files


def test_the_table_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    readme, picture = tmp_path / "README.md", tmp_path / "picture.svg"
    readme.write_text(f"before\n{draw.BEGIN}old\n{draw.END}after\n", encoding="utf-8")
    options = ["--threads", "1", "--picture", str(picture), "--into", str(readme)]
    monkeypatch.setattr(sys, "argv", ["draw.py", *results(tmp_path), *options])
    assert draw.main() == 0
    printed = capsys.readouterr().out
    assert "| one | 2.00 / 1.00 |  |  |  |  | 1.50x |" in printed
    assert "| two | 2.00 / 1.00 |  |  |  |  |  |" in printed
    assert "| **all** | 2.00 / 1.00 |  |  |  |  | 1.50x |" in printed
    assert "| by rules alone | 1.41 / 1.00 |" in printed
    assert "a processor, 1 thread, torch 2.13.0, convgrad 0.1.0 (abc), kept." in printed
    assert readme.read_text(encoding="utf-8") == f"before\n{draw.BEGIN}{printed}{draw.END}after\n"
    first = picture.read_text(encoding="utf-8")
    assert first.startswith("<?xml")
    assert draw.main() == 0
    assert picture.read_text(encoding="utf-8") == first  # the same results, the same file


def test_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["draw.py", *results(tmp_path), "--threads", "3"])
    with pytest.raises(SystemExit, match="nothing with 3 threads"):
        draw.main()
