"""The rules from the sweep: what the kernels' work costs, and which backends come first where there is no estimate.

    python benchmarks/derive.py benchmarks/results/sweep-*.csv           print that, what they lose, what native gains
    python benchmarks/derive.py benchmarks/results/sweep-*.csv --write   and put it into engine/ and docs/

The amounts are those of ``engine/costs.py``. Their prices are fitted so that the ratios of estimated times are those of
measured ones. What the rules lose is measured on problems that were held out: prices and table for each fifth of the
problems come from the others.
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

from convgrad.engine import costs, rules
from convgrad.problem import PASSES, ConvProblem, Pass

LINES = ("# begin of the derived lines\n", "# end of the derived lines\n")
COSTS, RULES = Path(costs.__file__), Path(rules.__file__)
DOCS, DOCS_LINES = Path(__file__).parents[1] / "docs" / "rules.md", ("<!-- sweep -->\n", "<!-- end -->\n")
FOLDS = 5
#: What the table may name. Whether AVX2 is faster than AVX-512 is left to measuring: lines about it saved 1 % here, and
#: lost on layers of real models.
TAKEN = ("native", "aten:float32")
_LEAST_ROWS = 8  # of a cell of the table of gains
_CLEAR = 1.05  # what a way must gain to be taken
_MOST_COLUMNS = 121  # of a line of code and its end
_OUTLIER = 0.5  # difference of logarithms from which an error counts linearly

#: Kind or kernels -> names -> numbers.
Table = dict[str, dict[str, float]]


class Row(NamedTuple):
    """A row of a sweep: the times of one pass, relative to PyTorch's call as given, of the ways that can compute it."""

    problem: ConvProblem
    #: By what the rules judge it.
    kind: str | None
    pass_: Pass
    times: dict[str, float]
    noise: float
    lacking: str
    #: The library that PyTorch uses, and what that and each backend does; empty where there is no estimate.
    library: str
    work: dict[str, costs.Amounts]

    @property
    def theirs(self) -> float:
        """PyTorch as given or through channels_last, whichever is faster."""
        return min(self.times["aten"], self.times.get("aten:channels_last", math.inf))

    @property
    def fold(self) -> int:
        return crc32(str(self.problem).encode()) % FOLDS

    @property
    def shown_kind(self) -> str:
        """The kind as the tables show it."""
        if self.kind != "other":
            return self.kind or "PyTorch's"
        if self.problem.unpadded_pointwise:
            return "pointwise"
        return "grouped" if self.problem.groups > 1 else "dense"


def read(paths: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of sweeps.

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
                kind, library, work = rules.kind_of(problem, row["lacking"]), "", {}
                if not (problem.depthwise or row["lacking"]):
                    library = costs.library_of(problem)
                    work = {k: costs.work(problem, pass_, k) for k in (library, *costs.BACKENDS)}
                yield Row(problem, kind, pass_, times, float(row["noise"]), row["lacking"], library, work)


def fitted(rows: Sequence[Row]) -> Table:
    """Return the prices whose estimates have, by the least error, the ratios that were measured.

    They are positive, and relative to the price of a call of oneDNN; the error is that of the logarithm of a ratio.
    """
    pairs: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        for backend in row.work.keys() & row.times.keys():
            pairs[backend, row.library].append(row)
    amounts: dict[str, list[str]] = {}
    for kernels in {name for pair in pairs for name in pair}:
        amounts[kernels] = sorted({what for row in rows for what in row.work.get(kernels, ())})

    def matrix(some: Sequence[Row], kernels: str) -> torch.Tensor:
        counted = [[row.work[kernels].get(what, 0.0) for what in amounts[kernels]] for row in some]
        return torch.tensor(counted, dtype=torch.float64)

    if not pairs:
        return {}
    data = [
        (a, b, matrix(some, a), matrix(some, b), torch.tensor([math.log(row.times[a]) for row in some]))
        for (a, b), some in sorted(pairs.items())
    ]
    scales = {
        k: torch.cat([m for a, b, x, y, _ in data for n, m in ((a, x), (b, y)) if n == k]).mean(0) for k in amounts
    }
    scales = {kernels: mean.clamp(min=1e-12) for kernels, mean in scales.items()}
    logs = {k: torch.zeros(len(names), dtype=torch.float64, requires_grad=True) for k, names in amounts.items()}
    optimizer = torch.optim.LBFGS(
        [*logs.values()], max_iter=1000, history_size=30, tolerance_change=1e-10, line_search_fn="strong_wolfe"
    )

    def error() -> torch.Tensor:
        optimizer.zero_grad()
        prices = {kernels: log.exp() / scales[kernels] for kernels, log in logs.items()}
        errors = [torch.log(x @ prices[a]) - torch.log(y @ prices[b]) - t for a, b, x, y, t in data]
        every = torch.cat(errors)
        total = torch.nn.functional.huber_loss(every, torch.zeros_like(every), delta=_OUTLIER)
        total = total + 1e-6 * sum(log.square().sum() for log in logs.values())  # of an amount that nothing has
        total.backward()
        return total.detach()

    optimizer.step(error)  # pyright: ignore[reportArgumentType]
    prices = {
        k: dict(zip(amounts[k], (log.detach().exp() / scales[k]).tolist(), strict=True)) for k, log in logs.items()
    }
    unit = prices["oneDNN"]["call"] if "oneDNN" in prices else 1.0
    return {k: {w: float(f"{n / unit:.3g}") for w, n in found.items()} for k, found in sorted(prices.items())}


def derived(rows: Sequence[Row]) -> Table:
    """Return the fastest way for each kind without an estimate, and what is faster than PyTorch where that cannot."""
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in ("depthwise", "emulated")}
    return {kind: dict(_ways(some, TAKEN)) for kind, some in kinds.items()}


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


def taken(prices: Table, table: Table, row: Row) -> str:
    """Return the way that the rules take."""
    if row.kind == "other":
        if row.library not in prices:
            return "aten"
        times = {k: sum(prices[k][what] * n for what, n in work.items()) for k, work in row.work.items() if k in prices}
        gains = {way: times[row.library] / times[way] for way in times.keys() & row.times.keys()}
        ways = costs.ranked(row.problem, 1, gains).items()
        return next((way for way, gain in ways if gain >= rules.least_gain(row.problem, way)), "aten")
    worth = rules.worth_converting(row.problem, (row.pass_,), row.lacking)
    ways = (way for way in table.get(row.kind or "", ()) if way != "aten:float32" or worth)
    return next((way for way in ways if way in row.times), "aten")


def held_out(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Each row with what is taken by the rules from the problems of the other folds."""
    parts = [[row for row in rows if row.fold != fold] for fold in range(FOLDS)]
    found = [(fitted(part), derived(part)) for part in parts]
    return [(row, taken(*found[row.fold], row)) for row in rows]


# ---- what is said of it ------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> Iterator[str]:
    """What the rules lose on held-out problems, and what PyTorch's own call loses there, as a table."""
    yield "| held out | rows | rules: | against PyTorch's best: | below 0.9x | PyTorch's own: | below 0.9x |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    every = held_out(rows)
    kinds: dict[str, list[tuple[Row, str]]] = {kind: [] for kind in sorted({row.shown_kind for row in rows})}
    for row, way in every:
        kinds[row.shown_kind].append((row, way))
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
            found[row.shown_kind, str(row.problem.dtype)[6:], layout][row.pass_].append(
                row.theirs / row.times["native"]
            )
    yield f"| native | dtype | layout | problems | {' | '.join(PASSES)} |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for key, passes in sorted(found.items()):
        few = [passes[name] for name in PASSES]
        if min(map(len, few)) >= _LEAST_ROWS:
            cells = (f"{geometric_mean(some):.1f}x / {min(some):.2f}x" for some in few)
            yield f"| {' | '.join((*key, str(len(few[0])), *cells))} |"


def as_code(name: str, kind: str, table: Table) -> str:
    """Return a table as Python has it, formatted."""
    lines = []
    for key, found in table.items():
        line = f"    {json.dumps(key)}: {json.dumps(found)},\n"
        several = "".join(f"        {json.dumps(what)}: {number},\n" for what, number in found.items())
        lines.append(line if len(line) <= _MOST_COLUMNS else f"    {json.dumps(key)}: {{\n{several}    }},\n")
    return f"{name}: {kind} = {{\n{''.join(lines)}}}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+", help="of benchmarks/sweep.py")
    parser.add_argument("--write", action="store_true", help=f"put the results into {RULES.name} and {DOCS.name}")
    options = parser.parse_args()
    rows = list(read(options.csv))
    torch.set_num_threads(1)  # the last digits of a sum depend on it
    prices = as_code("COSTS", "Costs", fitted(rows))
    table = as_code("TABLE", "dict[str, dict[str, float]]", derived(rows))
    said = "\n".join([*report(rows), "", *gains(rows), ""])
    print(f"{said}\n{prices}\n{table}", end="")
    if options.write:
        put(COSTS, LINES, prices)
        put(RULES, LINES, table)
        put(DOCS, DOCS_LINES, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
