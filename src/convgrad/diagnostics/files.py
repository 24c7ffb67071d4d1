"""Calls from the tables that `run`, `trace` and `bench` write."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..foreign import read_json
from .calls import Call, together

Line = Mapping[str, str]


def read_table(path: str | Path) -> list[Call]:
    """Return the calls in a CSV file that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote, or in the
    JSON of ``convgrad run``, most expensive first.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of these, or a line of it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    lines = _lines_of_json(text) if str(path).endswith(".json") else list[Line](csv.DictReader(io.StringIO(text)))
    columns = set(lines[0]) - {None} if lines else set()
    read = next((read for needed, read in _FORMS.items() if set(needed) <= columns), None)
    if read is None:
        what = f"it has the columns {', '.join(sorted(columns))}" if lines else "it has no line"
        writers = "convgrad run --csv or --json, trace, or bench PROBLEM --csv"
        raise ValueError(f"{str(path)!r} was not written by {writers}: {what}")
    try:
        return sorted(read(lines), key=lambda call: -call.total)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{str(path)!r} has a line that cannot be read: {error}") from None


def _lines_of_json(text: str) -> list[Line]:
    """Return the rows of ``convgrad run --json`` as lines of its CSV; none if this is something else."""
    try:
        return [
            {"calls": str(row["calls"]), "output": "+".join(row["outputs"]), "backend": row["backend"],
             "device": row["device"], "mean ms": str(row["total_seconds"] * 1e3 / row["calls"]),
             "of limit": str(row["fraction_of_limit"] or ""), "problem": row["problem"]}
            for row in read_json(text)["data"]["rows"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return []


def _call(line: Line, outputs: str, kernel: str = "", calls: str = "1", ms: str = "", **more: Any) -> Call:
    named = re.sub(r" \([^)]*\)", "", outputs)  # what the outputs of a transposed one are to its user
    one, count = float(ms), int(calls)
    if count < 1 or not 0 <= one < float("inf"):
        raise ValueError(f"{count} calls of {one} ms")
    backend, device = line["backend"], line.get("device") or "cpu"
    result = Call(
        line["problem"], named, backend, kernel, "", device, line.get("reason") or "", one, count, one * count
    )
    return result.normal(**more)


def _of_limit(text: str | None) -> float | None:
    return float(text) if text else None


def _of_run(lines: Iterable[Line]) -> list[Call]:
    return [
        _call(line, line["output"], calls=line["calls"], ms=line["mean ms"], of_limit=_of_limit(line.get("of limit")))
        for line in lines
    ]


def _of_trace(lines: Iterable[Line]) -> list[Call]:
    each = [
        _call(line, line["outputs"], line["kernel"], ms=line["milliseconds"],
              copied=len(line["copies"].split(";")) if line["copies"] else 0)
        for line in lines
    ]  # fmt: skip
    return together(each)


def _of_bench(lines: Iterable[Line]) -> list[Call]:
    return [
        _call(line, line["output"], ms=line["milliseconds"], pytorch=float(line["pytorch_milliseconds"]),
              of_limit=_of_limit(line["of_limit"]))
        for line in lines if line["milliseconds"]
    ]  # fmt: skip


#: Columns by which a table is recognised -> what reads it.
_FORMS: dict[tuple[str, ...], Callable[[list[Line]], list[Call]]] = {
    ("calls", "output", "backend", "mean ms", "problem"): _of_run,
    ("call", "outputs", "backend", "kernel", "copies", "milliseconds", "problem"): _of_trace,
    ("output", "backend", "milliseconds", "pytorch_milliseconds", "of_limit", "problem"): _of_bench,
}
