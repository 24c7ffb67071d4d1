"""The report of `accelerate_`: a table of its decisions, and their reversal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from operator import itemgetter
from typing import NamedTuple

from ..tables import Table

_NAMED = 3  # layers of a row; of more the first
_KINDS = ("convolution", "normalization", "linear layer")
ALREADY = "convgrad computes it already"


class Decision(NamedTuple):
    """The decision for one module.

    Attributes:
        name: of the module in the model.
        kind: ``"convolution"``, ``"normalization"``, ``"linear layer"`` or ``"padding"``.
        becomes: the function that makes its new class of its class, or None where it stays as it is.
        why: what it is, or why it stays.
    """

    name: str
    kind: str
    becomes: Callable[[type], type] | None
    why: str


@dataclass
class Report:
    """The decisions of `accelerate_` for each layer; prints as a summary.

    Attributes:
        decisions: one for each layer of a kind that convgrad computes, and for each module that pads with zeros.
        memory_format: the layout to which the model was converted, or None.
        layout: why it was converted, or was not.
        dry_run: whether this is a plan, and the model is as it was.
        missing: why there are no compiled kernels; empty where there are.
    """

    decisions: list[Decision] = field(default_factory=list)
    memory_format: str | None = None
    layout: str = ""
    dry_run: bool = False
    missing: str = ""
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    @property
    def replaced(self) -> dict[str, str]:
        """The replaced modules by name, and what each is."""
        made = [d for d in self.decisions if d.becomes]  # a layer that pads is there twice
        return {d.name: d.why for d in made} | {d.name: d.why for d in made if d.kind != "padding"}

    @property
    def left(self) -> dict[str, str]:
        """The layers that were not replaced by name, and the reasons."""
        return {d.name: d.why for d in self.decisions if not d.becomes}

    def restore(self) -> None:
        """Restore the class, layout and hooks of every object of the model; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _table(self) -> Table[tuple[str, str, str]]:
        """Return a table in which replaced layers of one class share one, and so do layers left for one reason."""
        alike: dict[tuple[str, str], list[Decision]] = {}
        for d in sorted(self.decisions, key=lambda d: d.becomes is None):
            who, what = ("convgrad", re.sub(r"\(.*\)$", "", d.why)) if d.becomes else ("as it was", d.why)
            alike.setdefault((who, what), []).append(d)
        lines: list[tuple[str, str, str]] = []
        for (who, what), rows in alike.items():
            names = [d.name or "(the model)" for d in rows]
            shown = ", ".join(names) if len(rows) <= _NAMED else f"{names[0]} and {len(rows) - 1} more"
            lines.append((shown, who, what if rows[1:] else rows[0].why))
        return Table(lines, {title: (itemgetter(i), "") for i, title in enumerate(("layer", "computed by", ""))})

    def __str__(self) -> str:
        """Return the summary, and a row for each replaced class and for each reason against replacing."""
        return f"{self.summary}\n{self._table().text()}" if self.decisions else self.summary

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.summary)}</p>{self._table().html() if self.decisions else ''}"

    @property
    def summary(self) -> str:
        """One line; before it one that says so where there are no compiled kernels."""
        return f"NO COMPILED KERNELS: {self.missing}\n{self._counted}" if self.missing else self._counted

    @property
    def _counted(self) -> str:
        if not self.decisions:
            return "no layer is of a kind that convgrad computes; convgrad.takeover() reaches functions too"
        done = " would be replaced" if self.dry_run else " replaced"
        parts = []
        for kind, (replaced, every) in zip(_KINDS, self.counts, strict=True):
            if every or not parts:
                already = sum(d.why == ALREADY for d in self.decisions if d.kind == kind)
                parts.append(f"{replaced} of {every} {kind}s{done}{f' ({already} already)' if already else ''}")
                done = ""
        layout = f"{self.memory_format or 'as it was'}{f' ({self.layout})' if self.layout else ''}"
        return f"{', '.join(parts)}; layout: {layout}"

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """(replaced, all) of the convolutions, of the normalizations, and of the linear layers."""
        each = [[bool(d.becomes) for d in self.decisions if d.kind == kind] for kind in _KINDS]
        return tuple((sum(one), len(one)) for one in each)
