"""Rows of text as a table, for a terminal and for a notebook, and text of any width in a narrow terminal."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from html import escape
from typing import Any, Generic, TypeVar

_ONE_LINE = 48  # characters of a cell that a notebook does not break


def wrapped(text: str, width: int, indent: str | None = None) -> str:
    """Break lines that are wider than ``width`` at spaces, and continue them two columns further in.

    No word is broken, since it may be a path to copy, and no line ends after its first word, which may be a label. A
    line is wider than ``width`` only where these words are.

    Args:
        indent: of the continued lines, where it is another.

    Equivalent to:
        >>> print(wrapped("  one two three", 11))
          one two
            three
    """
    lines = []
    for line in text.splitlines():
        own = line[: len(line) - len(line.lstrip())][: width // 2]
        further = own + "  " if indent is None else indent
        joined = re.sub(r" *\S+ +", lambda start: start[0].replace(" ", "\0"), line, count=1)  # breaks are at spaces
        lines += textwrap.wrap(
            joined, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False, tabsize=4,
        ) if len(line) > width else [line]  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def counted(number: int, what: str = "problem") -> str:
    """Return a number of things in words.

    Equivalent to:
        >>> counted(1), counted(2, "call"), counted(2, "process")
        ('1 problem', '2 calls', '2 processes')
    """
    ending = "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending * (number != 1)}"


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


Row = TypeVar("Row")
#: Title -> the value of a row, and its format (``".1%"``; empty for text).
Columns = Mapping[str, tuple[Callable[[Row], Any], str]]


class Table(Generic[Row]):
    """Rows of any kind under titles: the one table that prints, is exported, and is shown in a notebook.

    A titled column that is empty in every row is not shown; numbers are aligned on the right.

    Equivalent to:
        >>> table = Table([("aten", 0.5, "no rule prefers another"), ("native", None, "")], {
        ...     "backend": (lambda row: row[0], ""), "share": (lambda row: row[1], ".0%"),
        ...     "reason": (lambda row: row[2], ""), "remark": (lambda row: "", "")})
        >>> print(table.text())
        backend  share  reason
        aten       50%  no rule prefers another
        native
        >>> print(table.text(width=20))
        backend  share
        aten       50%
            reason: no rule
            prefers another
        native
        >>> print(table.csv().splitlines()[1])
        aten,0.5,no rule prefers another,
    """

    def __init__(self, rows: Iterable[Row], columns: Columns[Row]) -> None:
        self.columns = columns
        self.values = [[value(row) for value, _ in columns.values()] for row in rows]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the titles and then each row, as texts."""
        formats = [spec for _, spec in self.columns.values()]
        lines = [
            tuple("" if v is None else format(v, spec) for v, spec in zip(row, formats, strict=True))
            for row in self.values
        ]
        return [tuple(self.columns), *lines]

    def _shown(self) -> list[tuple[bool, tuple[str, ...]]]:
        """Return the columns that are shown, and whether each is of numbers."""
        columns = zip(self.columns.values(), zip(*self.cells(), strict=True), strict=True)
        return [(bool(spec), c) for (_, spec), c in columns if not (c[0] and len(c) > 1 and not any(c[1:]))]

    def text(self, width: int | None = None) -> str:
        """Return the table for a terminal; columns that would make a line wider than ``width`` stand below each row."""
        columns = self._shown()
        widths = [max(map(len, c)) for _, c in columns]
        fit = len(columns)
        while width is not None and fit > 1 and sum(widths[:fit]) + 2 * (fit - 1) > width:
            fit -= 1
        padded = [
            [cell.rjust(n) if numbers else cell.ljust(n) for cell in c]
            for (numbers, c), n in zip(columns[:fit], widths, strict=False)
        ]
        lines = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
        if width is None:
            return "\n".join(lines)
        for i, line in enumerate(lines):
            below = [f"{c[0]}: {c[i]}" if c[0] else c[i] for _, c in columns[fit:] if i and c[i]]
            text, indent = (f"{line}\n    {'; '.join(below)}", "    ") if below else (line, "  ")
            lines[i] = wrapped(text, width, indent)
        return "\n".join(lines)

    def csv(self) -> str:
        """Return the table as CSV, its numbers as they are."""
        return csv_text([list(self.columns), *self.values])

    def html(self, bold: Collection[int] = ()) -> str:
        """Return the table as HTML, for ``_repr_html_``; the rows with the numbers ``bold`` stand out."""
        columns = []
        for numbers, column in self._shown():
            style = "white-space:nowrap" if max(map(len, column)) <= _ONE_LINE else "min-width:24em"
            style += f";text-align:{'right' if numbers else 'left'}"
            columns.append([f"<t{'dh'[i == 0]} style='{style}'>{escape(cell)}" for i, cell in enumerate(column)])
        lines = ["".join(f"{cell}</t{cell[2]}>" for cell in line) for line in zip(*columns, strict=True)]
        marked = [f"<tr{' style=font-weight:bold' * (i - 1 in bold)}>{line}</tr>" for i, line in enumerate(lines)]
        return f"<table><thead>{marked[0]}</thead><tbody>{''.join(marked[1:])}</tbody></table>"
