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
from .records import Call, Moment, computed
from .roofline import TOO_LOW, Limits
from .screen import Layers, page_of, screen

#: The version of the data; it changes whenever a field changes its meaning or is removed.
SCHEMA = 1
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


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
    """Something avoidable, and what to do about it."""

    kind: str  # "layout", "backend" or "tune": what the remedy changes
    what: str  # a sentence
    remedy: str  # one line of Python or shell
    milliseconds: float  # what it would save of the whole
    rows: tuple[int, ...] = ()  # which of the rows it concerns, by number


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


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The cost of the convolutions of a training step, of a script or of a table, and the avoidable part of it."""

    what: str  #: the name of the model, script or file
    made: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))  #: ISO 8601
    conditions: str  #: machine, threads, versions, memory setting
    milliseconds: float | None = None  #: of the whole in which the rows were seen
    rows: tuple[Call, ...]  #: the most expensive first
    kind: str  #: ``"step"`` of a model, ``"run"`` of a script, or ``"table"`` read from a file
    finding: str  #: the result in one sentence
    variants: tuple[Variant, ...] = ()  #: the whole computed in different ways, PyTorch's own first
    costs: tuple[Cost, ...] = ()  #: the largest first
    looked: str = ""  #: how much was examined to find them
    timeline: tuple[Moment, ...] = ()  #: the calls of one step in their order
    notes: tuple[str, ...] = ()  #: how it was measured, for the reader
    limits: tuple[Limits, ...] = ()  #: what the machine can do at best, by dtype
    convgrad: str = __version__
    before: Profile | None = None  #: an earlier run
    warnings: tuple[str, ...] = ()  #: why the times are not to be trusted; then there is no ratio in the finding
    parts: tuple[Part, ...] = ()  #: of the whole step
    kernels: tuple[Kernel, ...] = ()  #: those that the user registered
    whole: tuple[str, ...] = ()  #: the last lines of the screen: the gradients' error, memory, the limit of the step
    schema: int = SCHEMA

    @classmethod
    def of(
        cls, rows: Sequence[Call], costs: Sequence[Cost] = (), notes: Sequence[str] = (), limits: Sequence[Limits] = (),
        device: torch.device | str = "cpu", **rest: Any,
    ) -> Profile:  # fmt: skip
        """Return a profile made now, its costs in order, with what is known of the machine; the rest are its fields."""
        if any(row.beyond for row in rows):
            notes = [*notes, TOO_LOW]
        ordered = tuple(sorted(costs, key=lambda cost: -cost.milliseconds))
        made = {"conditions": conditions(device), **rest}
        if torch.device(device).type == "cpu" and rest["kind"] != "table" and (missing := why_absent()):
            made["finding"] = f"No compiled kernels: {missing}. {rest['finding']}"
        return cls(rows=tuple(rows), costs=ordered, notes=tuple(notes), limits=tuple(limits), **made)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for json."""
        rows = [row.to_dict() for row in self.rows]
        return {**asdict(self), "rows": rows, "before": self.before and self.before.to_dict()}

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
            result = read_as(cls, _with_calls(data), "the data")
            _ = [result.rows[moment.row] for moment in result.timeline], datetime.fromisoformat(result.made)
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
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
            embedded = _DATA.search(text)
            return cls.from_dict(read_json(embedded[1] if embedded else text))
        except json.JSONDecodeError:
            raise ValueError(f"{str(path)!r}: this is neither a page nor a JSON file of a convgrad report") from None
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from None

    def against(self, before: Profile) -> Profile:
        """Return the same, compared with an earlier run."""
        return replace(self, before=replace(before, before=None, timeline=()))

    def to_html(self) -> str:
        """Return one page that needs nothing else.

        Raises:
            ImportError: what the extra ``[report]`` brings is missing.
        """
        return page_of(self, changes(self))

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


def _with_calls(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data in which the rows, and those of the run before, are calls."""
    rows, before = data.get("rows"), data.get("before")
    if not isinstance(rows, (list, tuple)):
        raise ValueError("it has no list 'rows'")
    before = _with_calls(before) if isinstance(before, Mapping) else before
    return {**data, "rows": [*map(Call.from_dict, rows)], "before": before}


def changes(now: Profile) -> list[Change]:
    """Return each direction of each convolution in the run before and in this one, the largest change first."""
    if now.before is None:
        return []
    times: dict[tuple[str, str], list[float | None]] = {}
    for i, rows in enumerate((now.before.rows, now.rows)):
        for row in rows:  # two runs may split a backward differently, and name it otherwise
            both = times.setdefault((str(computed(row.convolution)), row.direction), [None, None])
            both[i] = (both[i] or 0.0) + row.total
    result = [Change(*key, *both) for key, both in times.items()]  # what ran only once counts as a whole
    return sorted(result, key=lambda change: -abs((change.after or 0.0) - (change.before or 0.0)))
