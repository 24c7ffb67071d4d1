"""What a report says, as plain values: the data that its page shows and embeds, with a version number.

Every time is in milliseconds. Optional values are None where they were not measured or are not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from ..problem import ConvProblem
from ..tables import html_table, text_table
from .page import page_of

#: The version of the data; it changes whenever a field changes its meaning or is removed.
SCHEMA = 1
_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True)
class Variant:
    """One way to run the whole: how long it takes, and how many times as fast as the first way, with its interval."""

    name: str
    milliseconds: float
    speedup: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """All calls of one backend for the same outputs of the same convolution, within the whole.

    Args:
        layers: names of the modules that compute it, where they are known.
        problem: as one line of text.
        outputs: what one call computes; `shown` adds what they are to the user of a transposed convolution.
        backend: which backend ran, and which of its kernels.
        reason: why it ran.
        calls: how many, in the whole.
        milliseconds: of one call.
        total: of all calls.
        pytorch: of PyTorch's call for the same outputs, in the same model.
        flops, bytes: of one call, at least.
        least: the least time that the machine needs for one call.
        bound: what that time is made of, ``"memory"`` or ``"arithmetic"``.
        of_limit: least / milliseconds.
        copies: operands that each call copied into another layout.
    """

    layers: tuple[str, ...]
    problem: str
    outputs: tuple[str, ...]
    shown: str
    backend: str
    reason: str
    layout: str
    device: str
    calls: int
    milliseconds: float
    total: float
    flops: int
    bytes: int
    pytorch: float | None = None
    least: float | None = None
    bound: str | None = None
    of_limit: float | None = None
    copies: int = 0

    @property
    def direction(self) -> str:
        """Whether it is a part of the forward or of the backward."""
        forward = "grad_input" if ConvProblem.parse(self.problem).transposed else "forward"
        return "forward" if self.outputs == (forward,) else "backward"


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


_Kind = TypeVar("_Kind", Variant, Row, Cost)


@dataclass(frozen=True)
class Change:
    """One direction of one convolution in two runs: the time of all its calls."""

    problem: str
    direction: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        """How many milliseconds more it takes now; what ran only once counts as a whole."""
        return (self.after or 0.0) - (self.before or 0.0)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the convolutions of a training step, of a script or of a table cost, and what of it is avoidable.

    Args:
        kind: ``"step"`` of a model, ``"run"`` of a script, or ``"table"`` read from a file.
        what: the name of the model, script or file.
        finding: the result in one sentence.
        milliseconds: of the whole in which `rows` were seen.
        variants: the whole computed in different ways, PyTorch's own first.
        rows: the most expensive first.
        costs: the largest first.
        looked: how much was examined to find them.
        notes: how it was measured, for the reader.
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
    rows: tuple[Row, ...]
    costs: tuple[Cost, ...] = ()
    looked: str = ""
    notes: tuple[str, ...] = ()
    limits: tuple[dict[str, Any], ...] = ()
    conditions: str
    made: str
    convgrad: str
    before: dict[str, Any] | None = None
    schema: int = SCHEMA

    @property
    def convolutions(self) -> float:
        """Milliseconds in all convolutions."""
        return sum(row.total for row in self.rows)

    # ---- as data -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return asdict(self)

    def to_json(self) -> str:
        """The data as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        """The profile that `to_dict` gave, also as ``convgrad report --json`` printed it.

        Raises:
            ValueError: it is something else, or of a later version.
        """
        if isinstance(data, Mapping) and data.get("schema") == "convgrad report":
            data = data.get("data")
        if not isinstance(data, Mapping) or not isinstance(data.get("schema"), int):
            raise ValueError("this does not hold the data of a convgrad report: it has no number under 'schema'")
        if data["schema"] > SCHEMA:
            raise ValueError(f"this report's data is of version {data['schema']}; this convgrad reads up to {SCHEMA}")
        lists = {"variants": Variant, "rows": Row, "costs": Cost}
        try:
            known = {f.name: data[f.name] for f in fields(cls)}
            for name, kind in lists.items():
                known[name] = tuple(_made(kind, one) for one in data[name])
            return cls(**{name: _frozen(value) for name, value in known.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this does not hold the data of a convgrad report: {error}") from None

    @classmethod
    def read(cls, path: str | Path) -> Profile:
        """The profile inside a page or a JSON file.

        Raises:
            OSError: it cannot be read.
            ValueError: there is none.
        """
        text = Path(path).read_text(encoding="utf-8")
        embedded = _DATA.search(text)
        try:
            return cls.from_dict(json.loads(embedded[1] if embedded else text))
        except json.JSONDecodeError:
            raise ValueError(f"{str(path)!r}: this is neither a page nor a JSON file of a convgrad report") from None
        except ValueError as error:
            raise ValueError(f"{str(path)!r}: {error}") from None

    def against(self, before: Profile) -> Profile:
        """The same, compared with an earlier run."""
        data = json.loads(before.to_json())
        kept = {name: data[name] for name in ("what", "made", "conditions", "milliseconds", "rows")}
        return replace(self, before=kept)

    # ---- for people ---------------------------------------------------------------------------------

    def to_html(self) -> str:
        """One page that needs nothing else.

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

    def table(self) -> list[tuple[str, ...]]:
        """The rows as texts, their head first."""
        lines = [("layer", "output", "backend", "calls", "ms", "share", "PyTorch ms", "of limit", "problem")]
        for r in self.rows:
            lines.append((
                r.layers[0] if r.layers else "", r.shown, r.backend, str(r.calls), f"{r.total:.3f}",
                f"{r.total / self.convolutions:.0%}", "" if r.pytorch is None else f"{r.pytorch * r.calls:.3f}",
                "" if r.of_limit is None else f"{r.of_limit:.0%}", r.problem,
            ))  # fmt: skip
        return lines

    def __str__(self) -> str:
        costs = [f"{c.what}\n    {c.remedy}" for c in self.costs]
        numbers = ("calls", "ms", "share", "PyTorch ms", "of limit")
        return "\n".join([self.finding, *costs, text_table(self.table(), right=numbers)])

    def _repr_html_(self) -> str:
        try:
            page = self.to_html()
        except ImportError:
            return f"<p>{escape(self.finding)}</p>{html_table(self.table())}"
        style = "width:100%;height:48rem;border:1px solid #8886;border-radius:6px"
        return f'<iframe title="convgrad report" style="{style}" srcdoc="{escape(page)}"></iframe>'


def changes(now: Profile) -> list[Change]:
    """Each direction of each convolution in the run before and in this one, the largest change first."""
    if now.before is None:
        return []
    before, after = _by_direction([_made(Row, row) for row in now.before["rows"]]), _by_direction(now.rows)
    found = [Change(*key, before.get(key), after.get(key)) for key in {**before, **after}]
    return sorted(found, key=lambda c: -abs(c.difference))


def _by_direction(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """(problem, direction) -> milliseconds. Two runs may split a backward in different ways, and name it otherwise."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (str(ConvProblem.parse(row.problem).replace(name="", has_bias=False)), row.direction)
        found[key] = found.get(key, 0.0) + row.total
    return found


def _made(kind: type[_Kind], data: Mapping[str, Any]) -> _Kind:
    """One of a kind, from its data; a field that only a later convgrad knows is left out."""
    return kind(**{f.name: _frozen(data[f.name]) for f in fields(kind) if f.name in data})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
