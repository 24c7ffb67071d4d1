"""What `accelerate_` did, as a table, and the way back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from ..tables import html_table, text_table

_NAMED = 3  # layers of a row; of more the first


@dataclass
class Report:
    """The layers that `accelerate_` replaced and those that it left, each with the reason; prints as a summary.

    Attributes:
        replaced: name of the layer -> what it became.
        left: name of the layer -> why it stays as it is.
        norms, linears: the names, in both, of normalizations and of linear layers; the others are convolutions.
        memory_format: the layout to which the model was converted, or None.
        layout: why it was converted, or was not.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    norms: set[str] = field(default_factory=set)
    linears: set[str] = field(default_factory=set)
    memory_format: str | None = None
    layout: str = ""
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Give every object of the model back its class, layout and hooks; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def rows(self) -> list[tuple[str, str, str]]:
        """(layer, computed by, what it is or why it stays) for each layer of a kind that convgrad computes."""
        rows = [(name or "(the model)", "convgrad", what) for name, what in self.replaced.items()]
        return rows + [(name or "(the model)", "as it was", why) for name, why in self.left.items()]

    def _table(self) -> list[tuple[str, str, str]]:
        """The rows; layers of one class that were replaced share one, as do those that stay for one reason."""
        alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for name, who, what in self.rows():
            # Without a layer's arguments, and without the sizes of its inputs.
            kind = re.sub(r"\(.*?\)(?=, with|$)", "", what) if who == "convgrad" else what.split(" for inputs of ")[0]
            alike.setdefault((who, kind), []).append((name, what))
        table = [("layer", "computed by", "")]
        for (who, kind), rows in alike.items():
            names = [name for name, _ in rows]
            shown = ", ".join(names) if len(rows) <= _NAMED else f"{names[0]} and {len(rows) - 1} more"
            table.append((shown, who, kind if rows[1:] else rows[0][1]))
        return table

    def __str__(self) -> str:
        """The summary, and a row for each class that was replaced and each reason against it."""
        rows = self._table()
        return f"{self.summary}\n{text_table(rows)}" if rows[1:] else self.summary

    def _repr_html_(self) -> str:
        rows = self._table()
        return f"<p>{escape(self.summary)}</p>{html_table(rows) if rows[1:] else ''}"

    @property
    def summary(self) -> str:
        """One line."""
        if not self.rows():
            return "no layer is of a kind that convgrad computes; convgrad.takeover() reaches functions too"
        convolutions, norms, linears = self.counts
        text = "{} of {} convolutions replaced".format(*convolutions)
        if self.norms:
            text += ", {} of {} normalizations".format(*norms)
        if self.linears:
            text += ", {} of {} linear layers".format(*linears)
        return f"{text}; layout: {self.memory_format or 'as it was'}{f' ({self.layout})' if self.layout else ''}"

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """(replaced, all) of the convolutions, of the normalizations, and of the linear layers."""
        kinds = ({*self.replaced, *self.left} - self.norms - self.linears, self.norms, self.linears)
        return tuple([(len(kind & self.replaced.keys()), len(kind)) for kind in kinds])
