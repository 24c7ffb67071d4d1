"""The rules from the sweep: for each kind of problem two shallow trees of conditions, written as a table.

    python benchmarks/derive.py benchmarks/results/sweep.csv           print the table, what it loses, what native gains
    python benchmarks/derive.py benchmarks/results/sweep.csv --write   and put it into rules.py and docs/performance.md

The first tree says which of the problems that native can compute it takes; the second, in which form PyTorch's call
takes what is left. Both serve all passes and numbers of threads: a tree for each pass loses as much on problems that
were left out. A tree grows while a condition saves more than the price of a line. What is saved is time, and above all
rows in which the rules would be slower than 0.9x of the better of PyTorch as given and through channels_last, by more
than the noise of the row: where a kind of problem is not certain to gain, PyTorch's own call stays. The price is the
one with which trees from four fifths of the problems lose least on the other fifth. These held-out problems are what
the report is about: how much slower than the fastest measured way the rules are, and how often and how far behind
PyTorch.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from sweep import COLUMNS, WAYS

from convgrad.engine import rules
from convgrad.problem import PASSES, ConvProblem

RULES, RULE_LINES = Path(rules.__file__), ("# begin of the derived lines\n", "# end of the derived lines\n")
DOCS, DOCS_LINES = Path(__file__).parents[1] / "docs" / "performance.md", ("<!-- sweep -->\n", "<!-- end -->\n")
FOLDS = 5
#: Lower ones give conditions that fit the problems that are there, and lose twice as much on others.
PRICES = (32.0, 64.0, 128.0)
MOST_LINES = 16
#: What the leaves of each tree may take. Which instruction set is faster is left to measuring: lines about it saved 1 %
#: here, and lost on layers of real models.
TREES = ("aten", "native"), ("aten", "aten:float32", "aten:channels_last")
_LEAST_ROWS = 8  # of a line: fewer fit what is said of one problem, not of a kind
_DEEPEST = 4
_RISK = 2.0  # what a loss against PyTorch's better layout counts beyond itself
_BELOW, _FEE = math.log(1 / 0.9), 8.0  # and what each row costs in which it is more than this: more than any gains
_CLEAR = 0.03  # a row, in the logarithm: what is gained by less is not worth another way

Bounds = dict[int, tuple[float, float]]


def penalty(pytorch: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """What being slower than PyTorch's better layout, by such a logarithm, costs beyond the time."""
    return _RISK * np.maximum(pytorch, 0) + _FEE * (pytorch - noise > _BELOW)


@dataclass
class Rows:
    """Rows of one kind: each problem's part of `FOLDS` and features, and for each way the logarithm of its time."""

    folds: np.ndarray  # [rows]
    features: np.ndarray  # [rows, features]
    times: np.ndarray  # [rows, ways], of PyTorch as given 0, of a way that cannot NaN
    fastest: np.ndarray  # [rows], of all ways
    noise: np.ndarray  # [rows], of a logarithm

    def __len__(self) -> int:
        return len(self.folds)

    def __getitem__(self, which: np.ndarray) -> Rows:
        return Rows(*(values[which] for values in vars(self).values()))

    @property
    def theirs(self) -> np.ndarray:
        """PyTorch as given or through channels_last, whichever is faster: [rows]."""
        return np.fmin(0, self.times[:, WAYS.index("aten:channels_last")])

    def of(self, ways: Sequence[str]) -> np.ndarray:
        """The logarithms of the times of some ways, PyTorch's own where one cannot: [rows, ways]."""
        return np.nan_to_num(self.times[:, [WAYS.index(way) for way in ways]])

    def costs(self, ways: Sequence[str]) -> np.ndarray:
        """Of each way: what it loses against the fastest, and the penalty of what it loses against PyTorch."""
        times = self.of(ways)
        return times - self.fastest[:, None] + penalty(times - self.theirs[:, None], self.noise[:, None])


class Measured(NamedTuple):
    """A row of a sweep."""

    problem: ConvProblem
    kind: str
    row: dict[str, str]

    @property
    def times(self) -> list[float]:
        """The logarithms of the times of all ways; NaN of one that cannot."""
        return [math.log(float(self.row[way] or "nan")) for way in WAYS]


def measured(paths: Sequence[Path]) -> Iterator[Measured]:
    """The rows of sweeps but those that are PyTorch's whatever the table says.

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
                kind = rules.kind_of(problem, row["emulated"] == "1")
                if kind is not None:
                    yield Measured(problem, kind, row)


def read(paths: Sequence[Path]) -> dict[str, Rows]:
    """The sweep's rows by kind of problem."""
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for one in measured(paths):
        features = [float(feature(one.problem)) for feature in rules.FEATURES.values()]
        fold, noise = crc32(one.row["problem"].encode()) % FOLDS, float(one.row["noise"])
        found[one.kind].append((fold, features, one.times, np.nanmin(one.times), noise))
    return {kind: Rows(*map(np.array, zip(*some, strict=True))) for kind, some in sorted(found.items())}


# ---- the trees ---------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A line to be: the bounds of features, the way, the gain over PyTorch's own."""

    bounds: Bounds
    way: str
    gain: float

    def holds(self, features: np.ndarray) -> np.ndarray:
        held = np.ones(len(features), bool)
        for feature, (low, high) in self.bounds.items():
            held &= (features[:, feature] >= low) & (features[:, feature] < high)
        return held


def grown(rows: Rows, price: float) -> list[Leaf]:
    """The lines of both trees, a line costing ``price``."""
    leaves: list[Leaf] = []
    for ways in TREES:
        others = rows.times[:, [WAYS.index(way) for way in ways[1:]]]
        left = rows[np.isnan(taken(leaves, rows)) & ~np.isnan(others).all(axis=1)]
        leaves += [leaf for leaf in _grown(left, ways, price) if leaf.way != "aten"] if len(left) else []
    return leaves


def taken(leaves: Sequence[Leaf], rows: Rows) -> np.ndarray:
    """The times of the first leaves that hold and whose way can; NaN where there is none."""
    times = np.full(len(rows), np.nan)
    for leaf in leaves:
        held = leaf.holds(rows.features) & np.isnan(times)
        times[held] = rows.times[held, WAYS.index(leaf.way)]
    return times


def _grown(rows: Rows, ways: Sequence[str], price: float, bounds: Bounds | None = None, depth: int = 0) -> list[Leaf]:
    """The leaves of the tree that loses least, of rows within bounds."""
    bounds = bounds or {}
    costs = rows.costs(ways)
    totals = costs.sum(axis=0)
    best = None
    if depth < _DEEPEST and len(rows) >= 2 * _LEAST_ROWS:
        best = min(_splits(rows.features, costs), default=None)
    if best is None or totals.min() - best[0] <= price:
        way = ways[int((totals <= totals.min() + _CLEAR * len(rows)).argmax())]  # the first of those that are as good
        return [_leaf(rows, way, bounds)]
    _, feature, threshold = best
    low, high = bounds.get(feature, (-math.inf, math.inf))
    above = rows.features[:, feature] >= threshold
    sides = ((above, (threshold, high)), (~above, (low, threshold)))
    parts = [_grown(rows[side], ways, price, {**bounds, feature: part}, depth + 1) for side, part in sides]
    leaves = [leaf for some in parts for leaf in some]
    if len({leaf.way for leaf in leaves}) == 1:  # a condition that changes nothing
        return [_leaf(rows, leaves[0].way, bounds)]
    return leaves


def _leaf(rows: Rows, way: str, bounds: Bounds) -> Leaf:
    return Leaf(bounds, way, -float(rows.of([way]).mean()))


def _splits(features: np.ndarray, costs: np.ndarray) -> Iterator[tuple[float, int, float]]:
    """What is lost with each condition, the feature, the threshold."""
    for feature in range(features.shape[1]):
        order = np.argsort(features[:, feature], kind="stable")
        values = features[order, feature]
        below = np.cumsum(costs[order], axis=0)
        for i in range(_LEAST_ROWS, len(values) - _LEAST_ROWS + 1):
            if values[i] > values[i - 1]:
                lost = below[i - 1].min() + (below[-1] - below[i - 1]).min()
                yield float(lost), feature, _round(values[i - 1], values[i])


def _round(low: float, high: float) -> float:
    """A threshold between two values, of as few digits as there is room for."""
    middle, whole = math.sqrt(low * high) if low > 0 else (low + high) / 2, low % 1 == high % 1 == 0
    for digits in (1, 2, 3, 4):
        rounded = float(f"{middle:.{digits}g}")
        rounded = math.ceil(rounded) if whole else rounded
        if low < rounded <= high:
            return rounded
    return high


# ---- what it loses -----------------------------------------------------------------------------------


class Loss(NamedTuple):
    """Of rows: the logarithms of the rules' time over that of the fastest way, and over PyTorch's best; their noise."""

    fastest: np.ndarray
    pytorch: np.ndarray
    noise: np.ndarray
    own: np.ndarray  # whether the rules leave it to PyTorch's own call

    @property
    def badness(self) -> float:
        """What a price is chosen by."""
        return float((self.fastest + penalty(self.pytorch, self.noise)).mean()) if len(self.fastest) else 0.0

    @property
    def slower(self) -> str:
        return f"{100 * (math.exp(self.fastest.mean()) - 1):.0f} %"

    @property
    def worst(self) -> str:
        return f"{math.exp(-self.pytorch.max()):.2f}x"

    @property
    def often(self) -> str:
        return self._often(True)

    @property
    def often_own(self) -> str:
        return self._often(self.own)

    def _often(self, among: np.ndarray | bool) -> str:
        return f"{100 * (among & (self.pytorch - self.noise > _BELOW)).mean():.1f} %"


def lost(leaves: Sequence[Leaf], rows: Rows) -> Loss:
    times = taken(leaves, rows)
    own, times = np.isnan(times), np.nan_to_num(times)
    return Loss(times - rows.fastest, times - rows.theirs, rows.noise, own)


def held_out(rows: Rows, price: float) -> Loss:
    """What is lost on problems from which the rules were not derived."""
    none = np.empty(0)
    parts = [Loss(none, none, none, none.astype(bool))]
    for fold in range(FOLDS):
        out = rows.folds == fold
        if out.any() and not out.all():
            parts.append(lost(grown(rows[~out], price), rows[out]))
    return together(parts)


def together(losses: Iterable[Loss]) -> Loss:
    return Loss(*(np.concatenate(some) for some in zip(*losses, strict=True)))


class Fitted(NamedTuple):
    """The rules of one kind of problem."""

    leaves: list[Leaf]
    held_out: Loss


def fitted(rows: Rows, prices: Sequence[float] = PRICES) -> Fitted:
    """The rules with the price that loses least on held-out problems; the higher one of those that are as good."""
    tried = {price: held_out(rows, price) for price in prices}
    least = min(loss.badness for loss in tried.values())
    price = max(price for price, loss in tried.items() if loss.badness <= least + _CLEAR / 3)
    return Fitted(grown(rows, price), tried[price])


# ---- the table ---------------------------------------------------------------------------------------


def lines(found: dict[str, Fitted]) -> list[tuple[str, ...]]:
    """The table."""
    table = []
    for kind, one in found.items():
        for leaf in one.leaves:
            conditions = ", ".join(c for part in leaf.bounds.items() for c in _conditions(*part))
            table.append((kind, conditions or "always", leaf.way, f"{math.exp(leaf.gain):.1f}x"))
    return table


def _conditions(feature: int, bounds: tuple[float, float]) -> Iterator[str]:
    name = tuple(rules.FEATURES)[feature]
    low, high = bounds
    if name in _BOOLEAN:
        yield name if low > 0 else f"not {name}"
        return
    if low > -math.inf:
        yield f"{name} >= {low:.10g}"
    if high < math.inf:
        yield f"{name} < {high:.10g}"


_BOOLEAN = ("channels_last",)


def as_text(table: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    return "".join(f"{row}\n" for row in rows)


def report(kinds: dict[str, Rows], found: dict[str, Fitted]) -> Iterator[str]:
    """What the rules lose on held-out problems, and what PyTorch's own call loses there, as a table."""
    yield "| held out | rows | rules: | against PyTorch's best: | below 0.9x | PyTorch's own: | below 0.9x | lines |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    stock = {kind: lost([], rows) for kind, rows in kinds.items()}
    every = [(kind, one.held_out, stock[kind], len(one.leaves)) for kind, one in found.items()]
    all_lines = sum(len(one.leaves) for one in found.values())
    total = ("all", together(one.held_out for one in found.values()), together(stock.values()), all_lines)
    for name, loss, own, count in (*every, total):
        below = f"{loss.often} ({loss.often_own})"
        cells = (name, len(loss.fastest), loss.slower, loss.worst, below, own.slower, own.often, count)
        yield f"| {' | '.join(map(str, cells))} |"


def gains(paths: Sequence[Path]) -> Iterator[str]:
    """How many times as fast as PyTorch's better layout native is, whether the rules take it or not, as a table."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in measured(paths):
        if one.row["native"]:
            p = one.problem
            layout = "channels_last" if p.channels_last else "contiguous"
            theirs = min(float(one.row[way]) for way in ("aten", "aten:channels_last") if one.row[way])
            found[one.kind, str(p.dtype)[6:], layout][one.row["pass"]].append(theirs / float(one.row["native"]))
    yield f"| native | dtype | layout | problems | {' | '.join(PASSES)} |"
    yield "|---|---|---|---:|---:|---:|---:|"
    for key, passes in sorted(found.items()):
        few = [passes[name] for name in PASSES]
        if min(map(len, few)) >= _LEAST_ROWS:
            cells = (f"{geometric_mean(some):.1f}x / {min(some):.2f}x" for some in few)
            yield f"| {' | '.join((*key, str(len(few[0])), *cells))} |"


def put(path: Path, between: tuple[str, str], text: str) -> None:
    """Replace what is between two lines of a file."""
    begin, end = between
    before, rest = path.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end, 1)
    path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+", help="of benchmarks/sweep.py")
    parser.add_argument("--write", action="store_true", help=f"put the results into {RULES.name} and {DOCS.name}")
    options = parser.parse_args()
    kinds = read(options.csv)
    found = {kind: fitted(rows) for kind, rows in kinds.items()}
    table = lines(found)
    text, said = as_text(table), "\n".join([*report(kinds, found), "", *gains(options.csv), ""])
    print(f"{said}\n{text}")
    if options.write:
        if len(table) > MOST_LINES:
            raise SystemExit(f"{len(table)} lines are more than a screenful of {MOST_LINES}: {PRICES=} are too low")
        loss = together(f.held_out for f in found.values())
        head = (
            f"# {len(loss.own)} measurements. Held out: {loss.slower} slower than the fastest way, "
            f"{loss.often} of the rows below 0.9x\n"
            f"# of PyTorch's better layout ({loss.often_own} by PyTorch's call as given), {loss.worst} at worst.\n"
        )
        put(RULES, RULE_LINES, head + text)
        put(DOCS, DOCS_LINES, said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
