"""Rows of a profile: from what was observed, and from the tables that `run`, `trace` and `bench` write."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..diagnostics import Limits, least_work
from ..models import UsageRow
from ..problem import ConvProblem, Outputs, in_order
from .assembled import rounded
from .profile import Row

Line = Mapping[str, str]


def row_of(
    seen: UsageRow,
    limits: Limits | None = None,
    *,
    layers: Iterable[str] = (),
    pytorch: float | None = None,
    calls: float | None = None,
    of_limit: float | None = None,
) -> Row:
    """A row of what was observed.

    Args:
        pytorch: seconds of PyTorch's call for the same.
        calls: how many belong to the whole, where more were observed.
        of_limit: where it is known without limits.
    """
    seconds = seen.median_seconds
    least = limits and limits.seconds(seen.problem, seen.outputs)
    part = least / seconds if least else of_limit
    count = max(1, round(calls or seen.calls))  # of what ran in one step of several, one
    return Row(
        tuple(layers), str(seen.problem), seen.outputs, seen.output, seen.backend, seen.reason, seen.layout,
        seen.device, count, rounded(seconds * 1e3), rounded((seconds * calls if calls else seen.seconds) * 1e3),
        *least_work(seen.problem, seen.outputs), pytorch and rounded(pytorch * 1e3), least and rounded(least * 1e3),
        limits and limits.bound(seen.problem, seen.outputs), part and rounded(part), seen.copies,
    )  # fmt: skip


def read_table(path: str | Path) -> list[Row]:
    """The rows of a CSV file that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote, or of the JSON of
    ``convgrad run``, most expensive first.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of these, or a line of it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = _lines_of_json(text) if str(path).endswith(".json") else list[Line](csv.DictReader(io.StringIO(text)))
    columns = set(lines[0]) if lines else set()
    read = next((read for needed, read in _FORMS.items() if set(needed) <= columns), None)
    if read is None:
        what = f"it has the columns {', '.join(sorted(columns))}" if lines else "it has no line"
        writers = "convgrad run --csv or --json, trace, or bench PROBLEM --csv"
        raise ValueError(f"{str(path)!r} was not written by {writers}: {what}")
    try:
        return sorted(read(lines), key=lambda row: -row.total)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{str(path)!r} has a line that cannot be read: {error}") from None


def _lines_of_json(text: str) -> list[Line]:
    """What ``convgrad run --json`` wrote, as it would stand in its CSV; no line where this is something else."""
    try:
        return [
            {"calls": str(row["calls"]), "output": "+".join(row["outputs"]), "backend": row["backend"],
             "device": row["device"], "mean ms": str(row["total_seconds"] * 1e3 / row["calls"]),
             "of limit": str(row["fraction_of_limit"] or ""), "problem": row["problem"]}
            for row in json.loads(text)["data"]["rows"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return []


def _usage(line: Line, outputs: str, backend: str, calls: int, seconds: float) -> UsageRow:
    words = re.sub(r" \([^)]*\)", "", outputs).split("+")  # what the outputs of a transposed one are to its user
    named: Outputs = in_order(words)
    if len(named) != len(words):
        raise ValueError(f"unknown output {outputs!r}")
    found = UsageRow(ConvProblem.parse(line["problem"]), named, backend, line.get("device") or "cpu")
    found.reason, found.calls, found.seconds = line.get("reason") or "", calls, seconds
    found.latest.append(seconds / calls)
    return found


def _of_run(lines: list[Line]) -> list[Row]:
    rows = []
    for line in lines:
        calls = int(line["calls"])
        seen = _usage(line, line["output"], line["backend"], calls, calls * float(line["mean ms"]) * 1e-3)
        part = line.get("of limit")
        rows.append(row_of(seen, of_limit=float(part) if part else None))
    return rows


def _of_trace(lines: list[Line]) -> list[Row]:
    found: dict[tuple[str, ...], UsageRow] = {}
    for line in lines:
        one = _usage(line, line["outputs"], f"{line['backend']} {line['kernel']}".rstrip(), 1,
                     float(line["milliseconds"]) * 1e-3)  # fmt: skip
        one.copies = len(line["copies"].split(";")) if line["copies"] else 0
        kept = found.setdefault((str(one.problem), *one.outputs, one.backend, one.device), one)
        if kept is not one:
            kept.calls, kept.seconds = kept.calls + 1, kept.seconds + one.seconds
            kept.latest.extend(one.latest)
    return [row_of(one) for one in found.values()]


def _of_bench(lines: list[Line]) -> list[Row]:
    return [
        row_of(_usage(line, line["output"], line["backend"], 1, float(line["milliseconds"]) * 1e-3),
               pytorch=float(line["pytorch_milliseconds"]) * 1e-3,
               of_limit=float(line["of_limit"]) if line["of_limit"] else None)
        for line in lines if line["milliseconds"]
    ]  # fmt: skip


#: Columns by which a table is recognised -> what reads it.
_FORMS: dict[tuple[str, ...], Callable[[list[Line]], list[Row]]] = {
    ("calls", "output", "backend", "mean ms", "problem"): _of_run,
    ("call", "outputs", "backend", "kernel", "copies", "milliseconds", "problem"): _of_trace,
    ("output", "backend", "milliseconds", "pytorch_milliseconds", "of_limit", "problem"): _of_bench,
}
