"""The rules from the sweep: for each kind of problem the ways that are faster than PyTorch's call, written as a table.

    python benchmarks/derive.py benchmarks/results/sweep.csv           print the table, what it loses, what native gains
    python benchmarks/derive.py benchmarks/results/sweep.csv --write   and put it into rules.py and docs/rules.md

The kinds are those of ``kind_of`` in rules.py. What the table loses is measured on problems that were held out: the
rules of each fifth of the problems come from the others.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple
from zlib import crc32

import torch
from draw import put
from sweep import COLUMNS, WAYS

from convgrad.engine import rules
from convgrad.problem import PASSES, ConvProblem, Pass

RULES, RULE_LINES = Path(rules.__file__), ("# begin of the derived lines\n", "# end of the derived lines\n")
DOCS, DOCS_LINES = Path(__file__).parents[1] / "docs" / "rules.md", ("<!-- sweep -->\n", "<!-- end -->\n")
FOLDS = 5
#: What the table may name. Whether AVX2 is faster than AVX-512 is left to measuring: lines about it saved 1 % here, and
#: lost on layers of real models.
TAKEN = ("native", "native:amx", "native:winograd", "aten:float32", "aten:channels_last", "aten:mkldnn")
#: Where alone it pays to pack for the tiles of AMX, or to transform.
KINDS = {
    "native:amx": ("volume", "wide dense", "wide product", "wide volume"),
    "native:winograd": ("3x3",),
}
_LEAST_ROWS = 8  # of a cell of the table of gains
_CLEAR = 1.05  # what a way must gain to be taken


class Row(NamedTuple):
    """A row of a sweep: the times of one pass, relative to PyTorch's call as given, of the ways that can compute it."""

    problem: ConvProblem
    kind: str | None
    pass_: Pass
    times: dict[str, float]
    noise: float
    lacking: str

    @property
    def theirs(self) -> float:
        """PyTorch as given or through channels_last, whichever is faster."""
        return min(self.times["aten"], self.times.get("aten:channels_last", math.inf))

    @property
    def fold(self) -> int:
        return crc32(str(self.problem).encode()) % FOLDS


Table = dict[str, dict[str, float]]


def read(paths: Sequence[Path]) -> Iterator[Row]:
    """The rows of sweeps.

    Raises:
        SystemExit: a file of another kind.
    """
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise SystemExit(f"{path} is no result of benchmarks/sweep.py")
            for row in reader:
                problem = ConvProblem.parse(row["problem"])
                torch.set_num_threads(int(row["threads"]))
                times = {way: float(row[way]) for way in WAYS if row[way]}
                pass_: Pass = row["pass"]  # pyright: ignore[reportAssignmentType]
                special = (kind for kind, way in rules.special_kinds(problem) if way in times)
                kind = next(special, None) or rules.kind_of(problem, (pass_,), bool(row["lacking"]))
                yield Row(problem, kind, pass_, times, float(row["noise"]), row["lacking"])


def derived(rows: Sequence[Row]) -> Table:
    """For each kind the fastest way, and what is faster than PyTorch where that cannot; with their gains."""
    kinds = sorted({row.kind for row in rows if row.kind})
    taken = {kind: [way for way in TAKEN if kind in KINDS.get(way, kinds)] for kind in kinds}
    return {kind: dict(_ways([row for row in rows if row.kind == kind], taken[kind])) for kind in kinds}


def _ways(rows: Sequence[Row], taken: Sequence[str]) -> Iterator[tuple[str, float]]:
    gains = {way: gain for way in taken if (gain := _gain(rows, way, "aten"))}
    beaten = {way for way in gains if any((_gain(rows, other, way) or 1) > 1 for other in gains)}
    best = max(gains, key=lambda way: (way not in beaten, gains[way]), default=None)
    if best is not None and gains[best] >= _CLEAR:
        yield best, round(gains[best], 1)
        yield from _ways([row for row in rows if best not in row.times], taken)


def _gain(rows: Sequence[Row], way: str, over: str) -> float | None:
    """How many times as fast as another a way is, where both were measured."""
    some = [row.times[over] / row.times[way] for row in rows if {way, over} <= row.times.keys()]
    return geometric_mean(some) if some else None


def taken(table: Table, row: Row) -> str:
    """What the rules take."""
    worth = rules.worth_converting(row.problem, (row.pass_,), row.lacking)
    ways = (way for way in table.get(row.kind or "", ()) if way != "aten:float32" or worth)
    return next((way for way in ways if way in row.times), "aten")


def held_out(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Each row with what is taken by the rules from the problems of the other folds."""
    tables = [derived([row for row in rows if row.fold != fold]) for fold in range(FOLDS)]
    return [(row, taken(tables[row.fold], row)) for row in rows]


# ---- what is said of it ------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> Iterator[str]:
    """What the rules lose on held-out problems, and what PyTorch's own call loses there, as a table."""
    yield "| held out | rows | rules: | against PyTorch's best: | below 0.9x | PyTorch's own: | below 0.9x |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    every = held_out(rows)
    kinds: dict[str, list[tuple[Row, str]]] = {kind: [] for kind in sorted({row.kind for row in rows if row.kind})}
    for row, way in every:
        kinds.setdefault(row.kind or "PyTorch's", []).append((row, way))
    for name, some in (*kinds.items(), ("all", every)):
        ours = _losses(some)
        own = _losses([(row, "aten") for row, _ in some])
        below = f"{ours[2]} ({_losses(some, 'aten')[2]})"
        yield f"| {name} | {len(some)} | {ours[0]} | {ours[1]} | {below} | {own[0]} | {own[2]} |"


def _losses(some: Sequence[tuple[Row, str]], only: str = "") -> tuple[str, str, str]:
    """How much slower than the fastest way; at worst against PyTorch's better layout; rows below 0.9x of it."""
    slower = geometric_mean(row.times[way] / min(row.times.values()) for row, way in some)
    speeds = [(row.theirs / row.times[way], row.noise, way) for row, way in some]
    below = [s < 0.9 / math.exp(noise) for s, noise, way in speeds if only in ("", way)]  # by more than the noise
    return f"{100 * (slower - 1):.0f} %", f"{min(speeds)[0]:.2f}x", f"{100 * sum(below) / len(some):.1f} %"


def gains(rows: Sequence[Row]) -> Iterator[str]:
    """How many times as fast as PyTorch's better layout native is, of the kinds in the table, as a table."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.kind and "native" in row.times:
            layout = "channels_last" if row.problem.channels_last else "contiguous"
            found[row.kind, str(row.problem.dtype)[6:], layout][row.pass_].append(row.theirs / row.times["native"])
    yield f"| native | dtype | layout | problems | {' | '.join(PASSES)} |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for key, passes in sorted(found.items()):
        few = [passes[name] for name in PASSES]
        if min(map(len, few)) >= _LEAST_ROWS:
            cells = (f"{geometric_mean(some):.1f}x / {min(some):.2f}x" for some in few)
            yield f"| {' | '.join((*key, str(len(few[0])), *cells))} |"


def as_code(table: Table) -> str:
    lines = [f"    {json.dumps(kind)}: {json.dumps(ways)},\n" for kind, ways in table.items()]
    return f"TABLE: dict[str, dict[str, float]] = {{\n{''.join(lines)}}}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+", help="of benchmarks/sweep.py")
    parser.add_argument("--write", action="store_true", help=f"put the results into {RULES.name} and {DOCS.name}")
    options = parser.parse_args()
    rows = list(read(options.csv))
    table, said = as_code(derived(rows)), "\n".join([*report(rows), "", *gains(rows), ""])
    print(f"{said}\n{table}", end="")
    if options.write:
        put(RULES, RULE_LINES, table)
        put(DOCS, DOCS_LINES, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
