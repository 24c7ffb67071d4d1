"""Calls from the tables that `run`, `trace` and `bench` write."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..foreign import read_json
from .calls import Call, together

#: Column, or field of the JSON of a run -> what it is, where it has another name.
_NAMES = {"output": "outputs", "mean ms": "milliseconds", "of limit": "of_limit", "fraction_of_limit": "of_limit",
          "layer": "layers", "pytorch_milliseconds": "pytorch"}  # fmt: skip


def read_table(path: str | Path) -> list[Call]:
    """Return the calls in a CSV file that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote, or in the
    JSON of ``convgrad run``, most expensive first.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of these, or a line of it cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    given = _lines_of_json(text) if str(path).endswith(".json") else csv.DictReader(io.StringIO(text))
    lines = [{_NAMES.get(name, name): value for name, value in line.items()} for line in given]
    if not lines or not {"outputs", "backend", "milliseconds", "problem"} <= set(lines[0]):
        what = f"it has the columns {', '.join(sorted(filter(None, lines[0])))}" if lines else "it has no line"
        writers = "convgrad run --csv or --json, trace, or bench PROBLEM --csv"
        raise ValueError(f"{str(path)!r} was not written by {writers}: {what}")
    try:
        return together([_call(line) for line in lines if line["milliseconds"] != ""])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} has a line that cannot be read: {error}") from None


def _lines_of_json(text: str) -> list[dict[str, Any]]:
    """Return the rows of ``convgrad run --json`` as lines of its CSV; none if this is something else."""
    try:
        return [
            {**row, "outputs": "+".join(row["outputs"]), "layers": " ".join(row["layers"]),
             "milliseconds": row["total_seconds"] * 1e3 / row["calls"]}
            for row in read_json(text)["data"]["rows"]
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return []


def _call(line: Mapping[str, Any]) -> Call:
    one, calls = float(line["milliseconds"]), int(line.get("calls") or 1)
    if calls < 1 or not 0 <= one < float("inf"):
        raise ValueError(f"{calls} calls of {one} ms")
    more: dict[str, Any] = {name: float(line[name]) for name in ("of_limit", "pytorch") if line.get(name)}
    call = Call(
        line["problem"],
        re.sub(r" \([^)]*\)", "", line["outputs"]),  # what the outputs of a transposed one are to its user
        f"{line['backend']} {line.get('kernel') or ''}".rstrip(),
        device=line.get("device") or "cpu",
        reason=line.get("reason") or "",
        milliseconds=one,
        calls=calls,
        total=one * calls,
        copied=len(copies.split(";")) if (copies := line.get("copies")) else 0,
        layers=tuple((line.get("layers") or "").split()),
        **more,
    )
    return replace(call, problem=str(call.convolution), outputs="+".join(call.passes), layout=call.convolution.layout)
