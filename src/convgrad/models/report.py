"""The report of `accelerate_`: a table of its decisions, and their reversal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from ..tables import html_table, text_table

_NAMED = 3  # layers of a row; of more the first


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
        found: dict[str, str] = {}
        for decision in self.decisions:
            if decision.becomes:
                found.setdefault(decision.name, decision.why)  # a layer may pad, too
        return found

    @property
    def left(self) -> dict[str, str]:
        """The layers that were not replaced by name, and the reasons."""
        return {d.name: d.why for d in self.decisions if not d.becomes}

    @property
    def norms(self) -> set[str]:
        """The names of the normalizations."""
        return {d.name for d in self.decisions if d.kind == "normalization"}

    @property
    def linears(self) -> set[str]:
        """The names of the linear layers."""
        return {d.name for d in self.decisions if d.kind == "linear layer"}

    def restore(self) -> None:
        """Restore the class, layout and hooks of every object of the model; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def rows(self) -> list[tuple[str, str, str]]:
        """(layer, computed by, what it is or why it stays) for each layer of a kind that convgrad computes."""
        ordered = sorted(self.decisions, key=lambda d: d.becomes is None)
        return [(d.name or "(the model)", "convgrad" if d.becomes else "as it was", d.why) for d in ordered]

    def _table(self) -> list[tuple[str, str, str]]:
        """Return the rows; replaced layers of one class share one, and so do layers left for one reason."""
        alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for name, who, what in self.rows():
            # Without a layer's arguments.
            kind = re.sub(r"\(.*\)$", "", what) if who == "convgrad" else what
            alike.setdefault((who, kind), []).append((name, what))
        table = [("layer", "computed by", "")]
        for (who, kind), rows in alike.items():
            names = [name for name, _ in rows]
            shown = ", ".join(names) if len(rows) <= _NAMED else f"{names[0]} and {len(rows) - 1} more"
            table.append((shown, who, kind if rows[1:] else rows[0][1]))
        return table

    def __str__(self) -> str:
        """Return the summary, and a row for each replaced class and for each reason against replacing."""
        rows = self._table()
        return f"{self.summary}\n{text_table(rows)}" if rows[1:] else self.summary

    def _repr_html_(self) -> str:
        rows = self._table()
        return f"<p>{escape(self.summary)}</p>{html_table(rows) if rows[1:] else ''}"

    @property
    def summary(self) -> str:
        """One line; before it one that says so where there are no compiled kernels."""
        return f"NO COMPILED KERNELS: {self.missing}\n{self._counted}" if self.missing else self._counted

    @property
    def _counted(self) -> str:
        if not self.decisions:
            return "no layer is of a kind that convgrad computes; convgrad.takeover() reaches functions too"
        done = "would be replaced" if self.dry_run else "replaced"
        parts = []
        for kind in ("convolution", "normalization", "linear layer"):
            of_kind = [d for d in self.decisions if d.kind == kind]
            if of_kind or not parts:
                already = sum(d.why == ALREADY for d in of_kind)
                text = f"{sum(bool(d.becomes) for d in of_kind)} of {len(of_kind)} {kind}s"
                parts.append(f"{text}{'' if parts else f' {done}'}{f' ({already} already)' if already else ''}")
        layout = f"{self.memory_format or 'as it was'}{f' ({self.layout})' if self.layout else ''}"
        return f"{', '.join(parts)}; layout: {layout}"

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """(replaced, all) of the convolutions, of the normalizations, and of the linear layers."""
        kinds = ("convolution", "normalization", "linear layer")
        each = [[bool(d.becomes) for d in self.decisions if d.kind == kind] for kind in kinds]
        return tuple((sum(one), len(one)) for one in each)
