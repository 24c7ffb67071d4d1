"""The rules from the sweep: for each kind of problem a shallow tree of conditions, written as a table.

    python benchmarks/derive.py benchmarks/results/sweep.csv               print the table, and what it loses
    python benchmarks/derive.py benchmarks/results/sweep.csv --write       and put it into src/convgrad/engine/rules.py

One tree serves all passes and all numbers of threads: one for each pass loses as much on problems that were left out. A
tree grows while a condition saves more than the price of a line. What is saved is time, and above all rows in which the
rules would be slower than 0.9x of the better of PyTorch as given and through channels_last, by more than the noise of
the row: where a kind of problem is not certain to gain, PyTorch's own call stays. The price is the one with which trees
from four fifths of the problems lose least on the other fifth. These held-out problems are what the report is about:
how much slower than the fastest measured way the rules are, and how often and how far behind PyTorch.
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
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from sweep import COLUMNS, WAYS

from convgrad.engine import rules
from convgrad.problem import ConvProblem

RULES = Path(rules.__file__)
BEGIN, END = "# begin of the derived lines\n", "# end of the derived lines\n"
FOLDS = 5
PRICES = (4.0, 8.0, 16.0, 32.0)
MOST_LINES = 48
#: What a leaf may take: one way, or a second one where native cannot. PyTorch's own is what is left in any case. Which
#: instruction set is faster is left to measuring: lines about it saved 1 % here, and lost on layers of real models.
CHOICES = (*((way,) for way in WAYS if way not in ("im2col", "native:avx2")), ("native", "aten:float32"))
#: What a condition may be about: more features fit the problems that are there, and lose more on others.
FEATURES = ("smaller", "taps", "channels_last", "kB")
_LEAST_ROWS = 8  # of a line: fewer fit what is said of one problem, not of a kind
_DEEPEST = 4
_RISK = 2.0  # what a loss against PyTorch's better layout counts beyond itself
_BELOW, _FEE = math.log(1 / 0.9), 4.0  # and what each row costs in which it is more than this
_LENGTHS = np.array([len(choice) for choice in CHOICES])
_CLEAR = 0.03  # a row, in the logarithm: what is gained by less is not worth another way

Bounds = dict[int, tuple[float, float]]


def penalty(pytorch: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """What being slower than PyTorch's better layout, by such a logarithm, costs beyond the time."""
    return _RISK * np.maximum(pytorch, 0) + _FEE * (pytorch - noise > _BELOW)


@dataclass
class Rows:
    """Rows of one kind: each problem's part of `FOLDS` and features, and for each choice the logarithm of its time."""

    folds: np.ndarray  # [rows]
    features: np.ndarray  # [rows, features]
    times: np.ndarray  # [rows, choices], of PyTorch as given 0
    fastest: np.ndarray  # [rows], of all ways
    noise: np.ndarray  # [rows], of a logarithm

    def __len__(self) -> int:
        return len(self.folds)

    def __getitem__(self, which: np.ndarray) -> Rows:
        return Rows(*(values[which] for values in vars(self).values()))

    @property
    def theirs(self) -> np.ndarray:
        """PyTorch as given or through channels_last, whichever is faster: [rows]."""
        return np.minimum(self.times[:, 0], self.times[:, CHOICES.index(("aten:channels_last",))])

    @property
    def costs(self) -> np.ndarray:
        """Of each choice: what it loses against the fastest, and the penalty of what it loses against PyTorch."""
        behind = penalty(self.times - self.theirs[:, None], self.noise[:, None])
        return self.times - self.fastest[:, None] + behind


def read(paths: Sequence[Path]) -> dict[str, Rows]:
    """The sweep's rows by kind of problem.

    Raises:
        SystemExit: a file of another kind.
    """
    found: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise SystemExit(f"{path} is no result of benchmarks/sweep.py")
            for row in reader:
                problem, threads = ConvProblem.parse(row["problem"]), int(row["threads"])
                features = [float(rules.FEATURES[name](problem, threads)) for name in FEATURES]
                known = {way: math.log(float(row[way])) for way in WAYS if row[way]}
                times = [next((known[way] for way in choice if way in known), 0.0) for choice in CHOICES]
                _, kind = rules.case_of(problem, (row["pass"],), row["emulated"] == "1")  # pyright: ignore[reportArgumentType]
                fold = crc32(row["problem"].encode()) % FOLDS
                found[kind].append((fold, features, times, min(known.values()), float(row["noise"])))
    return {kind: Rows(*map(np.array, zip(*some, strict=True))) for kind, some in sorted(found.items())}


# ---- a tree ------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A line to be, or two: the bounds of features, the choice, the gain over PyTorch's own."""

    bounds: Bounds
    choice: int
    gain: float

    def holds(self, features: np.ndarray) -> np.ndarray:
        held = np.ones(len(features), bool)
        for feature, (low, high) in self.bounds.items():
            held &= (features[:, feature] >= low) & (features[:, feature] < high)
        return held


def grown(rows: Rows, price: float, bounds: Bounds | None = None, depth: int = 0) -> list[Leaf]:
    """The leaves of the tree that loses least, a leaf costing ``price``, of rows within bounds."""
    bounds = bounds or {}
    costs = rows.costs + price / len(rows) * (_LENGTHS - 1)
    totals = costs.sum(axis=0)
    best = None
    if depth < _DEEPEST and len(rows) >= 2 * _LEAST_ROWS:
        best = min(_splits(rows.features, costs), default=None)
    if best is None or totals.min() - best[0] <= price:
        choice = int((totals <= totals.min() + _CLEAR * len(rows)).argmax())  # the first of those that are as good
        return [Leaf(bounds, choice, -float(rows.times[:, choice].mean()))]
    _, feature, threshold = best
    low, high = bounds.get(feature, (-math.inf, math.inf))
    above = rows.features[:, feature] >= threshold
    sides = ((above, (threshold, high)), (~above, (low, threshold)))
    leaves = [leaf for side, part in sides for leaf in grown(rows[side], price, {**bounds, feature: part}, depth + 1)]
    if len({leaf.choice for leaf in leaves}) == 1:  # a condition that changes nothing
        return [Leaf(bounds, leaves[0].choice, -float(rows.times[:, leaves[0].choice].mean()))]
    return leaves


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
        return f"{100 * (self.pytorch - self.noise > _BELOW).mean():.1f} %"


def lost(leaves: Sequence[Leaf], rows: Rows) -> Loss:
    taken = np.zeros(len(rows))
    for leaf in leaves:
        held = leaf.holds(rows.features)
        taken[held] = rows.times[held, leaf.choice]
    return Loss(taken - rows.fastest, taken - rows.theirs, rows.noise)


def held_out(rows: Rows, price: float) -> Loss:
    """What is lost on problems from which the rules were not derived."""
    parts = [Loss(*[np.empty(0)] * 3)]
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

    @property
    def lines(self) -> int:
        return sum(way != "aten" for leaf in self.leaves for way in CHOICES[leaf.choice])


def fitted(rows: Rows, prices: Sequence[float] = PRICES) -> Fitted:
    """The rules with the price that loses least on held-out problems; the higher one of those that are as good."""
    tried = {price: held_out(rows, price) for price in prices}
    least = min(loss.badness for loss in tried.values())
    price = max(price for price, loss in tried.items() if loss.badness <= least + _CLEAR / 3)
    return Fitted(grown(rows, price), tried[price])


# ---- the table ---------------------------------------------------------------------------------------


def lines(found: dict[str, Fitted]) -> list[tuple[str, ...]]:
    """The table: a line for each way but PyTorch's own call."""
    table = []
    for kind, one in found.items():
        for leaf in one.leaves:
            conditions = ", ".join(c for part in leaf.bounds.items() for c in _conditions(*part))
            for way in CHOICES[leaf.choice]:
                if way != "aten":
                    table.append((rules.ANY, kind, conditions or "always", way, f"{math.exp(leaf.gain):.1f}x"))
    return table


def _conditions(feature: int, bounds: tuple[float, float]) -> Iterator[str]:
    name = FEATURES[feature]
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
    every = [(kind, one.held_out, stock[kind], one.lines) for kind, one in found.items()]
    all_lines = sum(one.lines for one in found.values())
    total = ("all", together(one.held_out for one in found.values()), together(stock.values()), all_lines)
    for name, loss, own, count in (*every, total):
        cells = (name, len(loss.fastest), loss.slower, loss.worst, loss.often, own.slower, own.often, count)
        yield f"| {' | '.join(map(str, cells))} |"
    yield "\nA percentage is how much slower than the fastest measured way, on geometric average;"
    yield "below 0.9x of PyTorch's better layout is what is so by more than the noise of its row."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+", help="of benchmarks/sweep.py")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RULES.name}")
    options = parser.parse_args()
    kinds = read(options.csv)
    found = {kind: fitted(rows) for kind, rows in kinds.items()}
    print("\n".join(report(kinds, found)))
    table = lines(found)
    text = as_text(table)
    print(f"\n{text}")
    if options.write:
        if len(table) > MOST_LINES:
            raise SystemExit(f"{len(table)} lines are more than a screenful of {MOST_LINES}: {PRICES=} are too low")
        loss = together(f.held_out for f in found.values())
        rows = sum(map(len, kinds.values()))
        below = f"{loss.often} of rows below 0.9x of PyTorch, {loss.worst} at worst"
        head = f"# {rows} measurements. Held out: {loss.slower} slower than the fastest, {below}.\n"
        before, rest = RULES.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        RULES.write_text(f"{before}{BEGIN}{head}{text}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
