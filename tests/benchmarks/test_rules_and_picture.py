"""From the sweep to the rules, and from results to README's table: the commands themselves, on very little."""

import csv
import sys
from collections.abc import Iterable, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

import derive
import draw
import result_rows
import sweep
import time_layers
import time_steps

from convgrad.engine import backends, costs, measurements, rules
from convgrad.problem import PASSES, ConvProblem

CONDITIONS = dict(zip(result_rows.CONDITIONS, ("a processor", 1, "2.13.0", "0.1.0", "abc", "kept", 0), strict=True))


def written(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """A file of these rows, what they lack being empty; its name."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


# ---- the sweep ---------------------------------------------------------------------------------------


def test_problems_of_every_kind_repeat_and_are_no_larger_than_they_may_be() -> None:
    problems = [sweep.random_problem(n) for n in range(120)]
    assert problems == [sweep.random_problem(n) for n in range(120)]
    assert problems != [sweep.random_problem(n, threads=2) for n in range(120)]
    assert len({*problems}) == len(problems)
    assert {p.ndim for p in problems} == {1, 2, 3}
    assert {p.dtype for p in problems} == {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    assert {rules.kind_of(p, "") for p in problems} == {"depthwise", "other", None}
    assert {costs.library_of(p) for p in problems} == {"oneDNN", "columns"}
    for kind in ("depthwise", "channels_last", "transposed", "pointwise"):
        assert {getattr(p, kind) for p in problems} == {True, False}
    assert any(p.groups > 1 and not p.depthwise for p in problems)
    volumes = {problems[n] for n in range(120) if sweep._KINDS[n % len(sweep._KINDS)] is sweep._volume}
    assert max(p.flops for p in {*problems} - volumes) <= sweep._MOST_FLOPS
    assert max(p.flops for p in volumes) <= sweep._VOLUME_FLOPS[1]


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


def made_up(path: Path) -> str:
    """A sweep in which native wins twofold, four times out of five, and dense problems are PyTorch's."""
    row, rows = {"pass": "forward", "aten": 1, "noise": 0.02, **CONDITIONS}, []
    for number in range(50):
        depthwise = {"problem": f"g8mb{1 + number}ic8ih9oc8kh3", "native": 0.5 if number % 5 else 1.25}
        slow = {"problem": f"mb{2 + number}ic8ih9oc9kh3", "native": 1.1, "aten:channels_last": 0.5}
        rows += [row | depthwise, row | slow]
    return written(path, sweep.COLUMNS, rows)


def test_the_table_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    copies = {"RULES": tmp_path / "rules.py", "COSTS": tmp_path / "costs.py"}
    for (name, copy), module in zip(copies.items(), (rules, costs), strict=True):
        copy.write_text(Path(module.__file__).read_text(encoding="utf-8"), encoding="utf-8")
        monkeypatch.setattr(derive, name, copy)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sweep -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(derive, "DOCS", page)
    monkeypatch.setattr(sys, "argv", ["derive.py", made_up(tmp_path / "sweep.csv"), "--write"])
    assert derive.main() == 0
    printed = capsys.readouterr().out
    texts = [copy.read_text(encoding="utf-8") for copy in copies.values()]
    found: dict[str, Any] = {"Costs": None}
    for text in texts:
        exec(text.split(derive.LINES[0])[1].split(derive.LINES[1])[0], found)
    assert found["TABLE"] == {"depthwise": {"native": 1.7}, "emulated": {}}  # 2 ** 0.8 * 0.8 ** 0.2
    assert {*found["COSTS"]} == {"native", "oneDNN"}
    assert found["COSTS"]["oneDNN"]["call"] == 1
    # 1.25 ** 0.2 and 2 ** 0.8 times as slow as the fastest way.
    assert "| depthwise | 50 | 5 % | 0.80x | 20.0 % (0.0 %) | 74 % | 0.0 % |" in printed
    said = page.read_text(encoding="utf-8")
    assert said.startswith("before\n<!-- sweep -->\n| held out |")
    assert said.endswith("|\n<!-- end -->\nafter\n")
    assert derive.main() == 0  # again, over what it wrote
    assert [copy.read_text(encoding="utf-8") for copy in copies.values()] == texts
    assert page.read_text(encoding="utf-8") == said


def row(fold: int = 0, **times: float) -> derive.Row:
    """A row of an emulated problem and a few ways, which the others cannot compute."""
    named = {way.replace("_", ":", 1): time for way, time in times.items()}
    problems = (ConvProblem.parse(f"g2mb{n}ic8ih9oc8kh3") for n in count(1))
    rows = (derive.Row(p, "emulated", "forward", {"aten": 1.0, **named}, 0.02, "all", "", {}) for p in problems)
    return next(row for row in rows if row.fold == fold)


@pytest.mark.parametrize(
    ("rows", "gains"),
    [
        ([{"native": 0.25, "aten_float32": 0.5}, {"aten_float32": 0.25}], {"native": 4.0, "aten:float32": 4.0}),
        # Compared where both were measured, of which float32 gains more, 4.0 instead of 2.5.
        ([{"native": 0.8}, {"native": 0.2, "aten_float32": 0.25}], {"native": 2.5}),
        ([{"native": 0.99}, {"native": 1.0}], {}),
        ([{"native": 0.5}, {"native": 2.2}], {}),
    ],
)
def test_what_a_way_gains(rows: list[dict[str, float]], gains: dict[str, float]) -> None:
    assert derive.derived([row(**times) for times in rows])["emulated"] == gains


def test_a_second_way_where_the_first_cannot() -> None:
    rows = [row(native=0.25, aten_float32=0.5), row(aten_float32=0.25)]
    ways = [derive.taken({}, derive.derived(rows), r) for r in (*rows, row())]
    assert ways == ["native", "aten:float32", "aten"]


def test_what_is_held_out_has_no_say() -> None:
    """Native wins in the problems of one fold alone: elsewhere it is taken, there it is not."""
    rows = [row(fold, native=2 / 3 if fold else 0.01) for fold in range(derive.FOLDS)]
    assert {way for _, way in derive.held_out(rows)} == {"native"}
    rows = [row(fold, native=1.5 if fold else 0.01) for fold in range(derive.FOLDS)]
    assert [way for _, way in derive.held_out(rows)] == ["aten", *["native"] * (derive.FOLDS - 1)]


def estimated(texts: Iterable[str], prices: dict[str, dict[str, float]]) -> list[derive.Row]:
    """Rows whose times are those of these prices."""
    rows = []
    for problem, pass_ in product(map(ConvProblem.parse, texts), PASSES):
        work = {kernels: costs.work(problem, pass_, kernels) for kernels in ("oneDNN", "native")}
        takes = {k: sum(prices[k].get(what, 0) * n for what, n in found.items()) for k, found in work.items()}
        times = {"aten": 1.0, "native": takes["native"] / takes["oneDNN"]}
        rows.append(derive.Row(problem, "other", pass_, times, 0.02, "", "oneDNN", work))
    return rows


def test_prices_are_those_that_the_times_were_made_of() -> None:
    prices = {"oneDNN": {"call": 1.0, "convolution": 0.2}, "native": {"call": 0.1, "convolution": 0.4}}
    sizes = product((1, 2, 8), (8, 32), (7, 28, 56))
    rows = estimated((f"mb{n}ic{c}ih{size}oc{c}kh3ph1" for n, c, size in sizes), prices)
    found = derive.fitted(rows)
    assert found["native"]["call"] == pytest.approx(0.1, rel=0.1)
    assert found["native"]["convolution"] / found["oneDNN"]["convolution"] == pytest.approx(2, rel=0.1)
    for one in rows:
        assert derive.taken(found, {}, one) == ("native" if one.times["native"] < 1 / 1.45 else "aten")
        assert derive.taken({}, {}, one) == "aten"


# ---- the picture -------------------------------------------------------------------------------------


def results(folder: Path) -> list[str]:
    layer = {"problem": "g8ic8ih9oc8kh3", "models": "one two", "layout": "contiguous", "output": "forward"} | CONDITIONS
    layers = [layer | {"rules_speed": 2, "measured_speed": 4}, layer | {"rules_speed": 1, "measured_speed": 1}]
    step = {"model": "one", "layout": "channels_last", "replaced": 3, "speed": 1.5, "low": 1.25, "high": 2} | CONDITIONS
    steps = [step, step | {"speed": "", "note": "wrong"}, step | {"threads": 8, "speed": 9}]
    return [
        written(folder / "layers.csv", time_layers.COLUMNS, layers),
        written(folder / "steps.csv", time_steps.COLUMNS, steps),
    ]


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
