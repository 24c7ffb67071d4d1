"""Which kernel ran, how often and for how long: everything that happened, summed by convolution and output."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from .._compat import lock_over_forks
from ..diagnostics import BEYOND, TOO_LOW, Limits, Machine, kernel_of_event, limits_of, measure_limits
from ..engine import Event, observers
from ..problem import ConvProblem, Outputs, shown_outputs
from ..tables import csv_text, text_table, wrapped

_HEAD = ("calls", "output", "backend", "layout", "total ms", "mean ms", "share", "of limit", "problem")
_NUMBERS = ("calls", "total ms", "mean ms", "share", "of limit")


_adding = lock_over_forks()


@dataclass
class UsageRow:
    """All calls of one backend for the same outputs of the same convolution."""

    problem: ConvProblem
    outputs: Outputs
    backend: str
    device: str
    reason: str = ""
    #: How many operands a call copied into a layout that the backend takes.
    copies: int = 0
    calls: int = 0
    seconds: float = 0.0
    #: Seconds of the last calls.
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=101), repr=False)

    @property
    def median_seconds(self) -> float:
        """Of one call: the median of the last hundred, in which the first ones, which do more, hardly count."""
        return statistics.median(self.latest)

    @property
    def output(self) -> str:
        """What the calls gave; of a transposed convolution with what that is to its user."""
        return shown_outputs(self.outputs, self.problem.transposed)

    @property
    def layout(self) -> str:
        """The layout of the results."""
        return self.problem.layout


class Usage:
    """A context manager that adds up all calls of backends inside it."""

    def __init__(self) -> None:
        self._rows: dict[tuple[object, ...], UsageRow] = {}

    def __enter__(self) -> Usage:
        observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        observers.remove(self)

    def __call__(self, event: Event) -> None:
        """Take note of one call; the engine calls this."""
        key = (event.problem, event.outputs, event.backend, event.device)
        with _adding:
            row = self._rows.get(key)
            if row is None:
                name = f"{event.backend} {kernel_of_event(event)}".rstrip()
                row = UsageRow(event.problem, event.outputs, name, event.device, event.reason, len(event.copies))
                self._rows[key] = row
            row.calls += 1
            row.seconds += event.seconds
            row.latest.append(event.seconds)

    @property
    def rows(self) -> list[UsageRow]:
        """The most expensive first."""
        return sorted(self._rows.values(), key=lambda r: -r.seconds)

    @property
    def seconds(self) -> float:
        """Time in all convolutions."""
        return sum(r.seconds for r in self.rows)

    # ---- as text ---------------------------------------------------------------------------------

    def cells(self) -> list[tuple[Any, ...]]:
        """The table below its head: times in milliseconds, the share and what is reached of the limit as fractions."""
        total = self.seconds
        return [
            (r.calls, r.output, r.backend, r.layout, r.seconds * 1e3, r.seconds / r.calls * 1e3, r.seconds / total,
             of_limit, str(r.problem))
            for r, of_limit in zip(self.rows, self.fractions_of_limit(), strict=True)
        ]  # fmt: skip

    def fractions_of_limit(self) -> list[float | None]:
        """For each of the `rows`, the part of the machine's limit that it reaches; None where that is not known."""
        return [
            limits and limits.seconds(row.problem, row.outputs) * row.calls / row.seconds
            for row, limits in zip(self.rows, known_limits(self.rows, measure=False), strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        rows = [
            {"problem": str(r.problem), "outputs": list(r.outputs), "backend": r.backend, "device": r.device,
             "layout": r.layout, "calls": r.calls, "total_seconds": r.seconds, "fraction_of_limit": of_limit}
            for r, of_limit in zip(self.rows, self.fractions_of_limit(), strict=True)
        ]  # fmt: skip
        return {"total_seconds": self.seconds, "rows": rows}

    def table(self, *, width: int | None = None) -> str:
        """One line for each convolution and output, the most expensive first; no wider than ``width``."""
        cells = self.cells()
        lines = [
            (str(calls), *names, f"{total:.2f}", f"{mean:.4f}", f"{share:.1%}", "" if of is None else f"{of:.0%}", text)
            for calls, *names, total, mean, share, of, text in cells
        ]
        if not lines:
            return "no convolution ran"
        table = text_table([_HEAD, *lines], right=_NUMBERS, width=width)
        if not any((of or 0) > BEYOND for *_, of, _ in cells):
            return table
        return f"{table}\n{TOO_LOW if width is None else wrapped(TOO_LOW, width)}"

    def to_csv(self) -> str:
        """The table as CSV, its numbers as they are: milliseconds and fractions."""
        return csv_text([_HEAD, *self.cells()])


def known_limits(rows: Sequence[UsageRow], measure: bool = True) -> list[Limits | None]:
    """For each row, what its device can do at best in its dtype; None where that is not known.

    Args:
        measure: what is not known; and a CPU's again where a row is faster than it allows: it was busy then.
    """

    @cache
    def known(device: str, dtype: torch.dtype) -> Limits | None:
        try:
            return limits_of(Machine.here(torch.device(device)), dtype, measured=measure)
        except (ValueError, RuntimeError):
            return None

    found = [known(row.device, row.problem.dtype) for row in rows]
    beyond = {
        row.problem.dtype: None
        for row, limits in zip(rows, found, strict=True)
        if measure and limits and row.device == "cpu"
        and limits.seconds(row.problem, row.outputs) > BEYOND * row.median_seconds
    }  # fmt: skip
    for dtype in beyond:
        measure_limits(dtype)
    return known_limits(rows, measure=False) if beyond else found
