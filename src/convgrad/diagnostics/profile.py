"""A report as plain values: the data that its page shows and embeds, with a version number.

Every time is in milliseconds. Optional values are None where they were not measured or are not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..backends import why_absent
from ..engine.measure import conditions
from ..foreign import read_as, read_json
from .calls import Call
from .page import page_of
from .roofline import BEYOND, TOO_LOW, Limits
from .screen import Layers, screen

#: The version of the data; it changes whenever a field changes its meaning or is removed.
SCHEMA = 1
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
#: The fields of a call in the data that are computed from others, or written in another form.
_ROW = ("layers", "problem", "outputs", "shown", "backend", "reason", "layout", "device", "calls", "milliseconds",
        "total", "flops", "bytes", "pytorch", "least", "bound", "of_limit", "copies")  # fmt: skip
#: Those that data of an earlier release lacks.
_LATER = ("speedup", "low", "high")


@dataclass(frozen=True)
class Variant:
    """The whole, run in one of several forms: its time, and how many times as fast as the first, with its interval."""

    name: str
    milliseconds: float
    speedup: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Cost:
    """Something avoidable, and what to do about it.

    Args:
        kind: ``"layout"``, ``"backend"`` or ``"tune"``: what the remedy changes.
        what: a sentence.
        remedy: one line of Python or shell.
        milliseconds: what it would save of the whole.
        rows: which of the rows it concerns, by number.
    """

    kind: str
    what: str
    remedy: str
    milliseconds: float
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Moment:
    """One call in one step: the number of its row, and milliseconds from the first call's start."""

    row: int
    start: float
    milliseconds: float


@dataclass(frozen=True)
class Part:
    """A part of the whole step, all of which add up to it: milliseconds by convgrad and by PyTorch."""

    name: str
    milliseconds: float
    pytorch: float


@dataclass(frozen=True)
class Kernel:
    """A kernel that the user registered: the layers that it computes, and reason -> layers that it refuses."""

    name: str
    layers: tuple[str, ...]
    refused: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Change:
    """One direction of one convolution in two runs: the time of all its calls."""

    problem: str
    direction: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        """Milliseconds that it takes longer now; a convolution that ran only once counts as a whole."""
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of the convolutions of a training step, of a script or of a table, and the avoidable part of it.

    Args:
        kind: ``"step"`` of a model, ``"run"`` of a script, or ``"table"`` read from a file.
        what: the name of the model, script or file.
        finding: the result in one sentence.
        milliseconds: of the whole in which `rows` were seen.
        variants: the whole computed in different ways, PyTorch's own first.
        rows: the most expensive first.
        costs: the largest first.
        looked: how much was examined to find them.
        timeline: the calls of one step in their order.
        notes: how it was measured, for the reader.
        warnings: why the times are not to be trusted; such a profile has no ratio in its finding.
        parts: of the whole step.
        kernels: those that the user registered.
        whole: the last lines of the screen: the gradients' error, memory, and the limit of the step.
        limits: what the machine can do at best, by dtype: the fields of `convgrad.diagnostics.Limits`.
        conditions: machine, threads, versions, memory setting.
        made: date and time, ISO 8601.
        before: of an earlier run, ``what``, ``made``, ``conditions``, ``milliseconds`` and ``rows``.
    """

    kind: str
    what: str
    finding: str
    milliseconds: float | None = None
    variants: tuple[Variant, ...] = ()
    rows: tuple[Call, ...]
    costs: tuple[Cost, ...] = ()
    looked: str = ""
    timeline: tuple[Moment, ...] = ()
    notes: tuple[str, ...] = ()
    limits: tuple[dict[str, Any], ...] = ()
    conditions: str
    made: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    convgrad: str = __version__
    before: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    whole: tuple[str, ...] = ()
    schema: int = SCHEMA

    @classmethod
    def of(
        cls,
        rows: Sequence[Call],
        costs: Sequence[Cost] = (),
        notes: Sequence[str] = (),
        limits: Sequence[Limits] = (),
        device: torch.device | str = "cpu",
        **rest: Any,
    ) -> Profile:
        """Return a profile made now, its costs in order, with what is known of the machine; the rest are its fields."""
        if any((row.of_limit or 0) > BEYOND for row in rows):
            notes = [*notes, TOO_LOW]
        ordered = tuple(sorted(costs, key=lambda cost: -cost.milliseconds))
        known = tuple(asdict(one) for one in limits)
        made = {"conditions": conditions(device), **rest}
        made["timeline"] = tuple(Moment(*one) for one in rest.get("timeline", ()))
        if torch.device(device).type == "cpu" and rest["kind"] != "table" and (missing := why_absent()):
            made["finding"] = f"No compiled kernels: {missing}. {rest['finding']}"
        return cls(rows=tuple(rows), costs=ordered, notes=tuple(notes), limits=known, **made)

    # ---- as data -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json."""
        return {**asdict(self), "rows": [_plain(row) for row in self.rows]}

    def to_json(self) -> str:
        """Return the data as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        """Return the profile that `to_dict` gave, also as ``convgrad report --json`` printed it.

        Raises:
            ValueError: it is something else, or of a later version.
        """
        if isinstance(data, Mapping) and data.get("schema") == "convgrad report":
            data = data.get("data")
        if not isinstance(data, Mapping) or type(data.get("schema")) is not int:
            raise ValueError("this does not hold the data of a convgrad report: it has no number under 'schema'")
        if data["schema"] > SCHEMA:
            raise ValueError(f"this report's data is of version {data['schema']}; this convgrad reads up to {SCHEMA}")
        try:
            before = data.get("before")
            rows = [_call_data(row) for row in _list(data, "rows")]
            if before is not None:
                read_as(_Before, {**before, "rows": [_call_data(row) for row in _list(before, "rows")]}, "before")
            result = read_as(cls, {**data, "rows": rows}, "the data")
            read_as(tuple[Limits, ...], data.get("limits"), "limits")
            _ = [result.rows[moment.row] for moment in result.timeline]
            _ = [row.work for row in result.rows], datetime.fromisoformat(result.made)  # they can be read
            return result
        except (ValueError, TypeError, IndexError) as error:
            raise ValueError(f"this does not hold the data of a convgrad report: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """Return the profile inside a page or a JSON file.

        Raises:
            OSError: it cannot be read.
            ValueError: there is none.
        """
        text = Path(path).read_text(encoding="utf-8")
        embedded = _DATA.search(text)
        try:
            return cls.from_dict(read_json(embedded[1] if embedded else text))
        except json.JSONDecodeError:
            raise ValueError(f"{str(path)!r}: this is neither a page nor a JSON file of a convgrad report") from None
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from None

    def against(self, before: Profile) -> Profile:
        """Return the same, compared with an earlier run."""
        data = json.loads(before.to_json())
        return replace(self, before={n: data[n] for n in ("what", "made", "conditions", "milliseconds", "rows")})

    # ---- for people ---------------------------------------------------------------------------------

    def to_html(self) -> str:
        """Return one page that needs nothing else.

        Raises:
            ImportError: what the extra ``[report]`` brings is missing.
        """
        return page_of(self.to_dict(), [asdict(change) for change in changes(self)])

    def save(self, path: str | Path) -> None:
        """Write the page, or the data where the name ends in ``.json``.

        Raises:
            ImportError: what the extra ``[report]`` brings is missing.
            OSError: it cannot be written.
        """
        text = self.to_json() if str(path).endswith(".json") else self.to_html()
        Path(path).write_text(text, encoding="utf-8")

    def text(self, width: int | None = 100, *, everything: bool = False) -> str:
        """Return the screen: the layers that cost most, or all of them, then the whole step."""
        return screen(self, width, everything=everything)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        try:
            page = self.to_html()
        except ImportError:
            return f"<p>{escape(self.finding)}</p>{Layers(self.rows).html()}"
        style = "width:100%;height:48rem;border:1px solid #8886;border-radius:6px"
        return f'<iframe title="convgrad report" style="{style}" srcdoc="{escape(page)}"></iframe>'


def _plain(row: Call) -> dict[str, Any]:
    """A call as it is in the data."""
    flops, moved = row.work
    computed = {"outputs": [*row.passes], "layers": [*row.layers], "flops": flops, "bytes": moved, "copies": row.copied}
    return {name: computed[name] if name in computed else getattr(row, name) for name in (*_ROW, *_LATER)}


@dataclass(frozen=True)
class _Before:
    """The data of an earlier run."""

    what: str
    made: str
    conditions: str
    milliseconds: float | None
    rows: tuple[Call, ...]

    def __post_init__(self) -> None:
        _ = [row.work for row in self.rows]  # their problems and outputs can be read


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(data.get(name), (list, tuple)):
        raise ValueError(f"it has no list {name!r}")
    return data[name]


def _call_data(row: Any) -> Any:
    """The fields of a call, of a row of the data."""
    if not isinstance(row, Mapping):
        return row
    absent = [name for name in _ROW if name not in row]
    if absent:
        raise ValueError(f"a row has no field {absent[0]!r}")
    outputs = row["outputs"]
    return {**row, "outputs": "+".join(map(str, outputs)) if isinstance(outputs, (list, tuple)) else outputs,
            "copied": row["copies"], "copies": ()}  # fmt: skip


def changes(now: Profile) -> list[Change]:
    """Return each direction of each convolution in the run before and in this one, the largest change first."""
    if now.before is None:
        return []
    before, after = (
        _by_direction([read_as(Call, _call_data(row), "a row") for row in now.before["rows"]]),
        _by_direction(now.rows),
    )
    result = [Change(*key, before.get(key), after.get(key)) for key in {**before, **after}]
    return sorted(result, key=lambda c: -abs(c.difference))


def _by_direction(rows: Sequence[Call]) -> dict[tuple[str, str], float]:
    """(problem, direction) -> milliseconds. Two runs may split a backward differently, and name it otherwise."""
    result: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (str(row.convolution.replace(name="", has_bias=False)), row.direction)
        result[key] = result.get(key, 0.0) + row.total
    return result
