"""Rows of text as a table, for a terminal and for a notebook."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

__all__ = ["html_table", "text_table"]


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Columns under the titles in the first row; a titled column that is empty in every other row is left out.

    Args:
        right: titles of the columns that are aligned on the right.

    Equivalent to:
        >>> print(text_table([("ms", "kernel", "backend"), ("1.5", "", "aten"), ("12", "", "native")], right=["ms"]))
         ms  backend
        1.5  aten
         12  native
    """
    columns = []
    for column in zip(*rows, strict=True):
        title, *cells = column
        if title and cells and not any(cells):
            continue
        width, align = max(map(len, column)), str.rjust if title in right else str.ljust
        columns.append([align(cell, width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The same as HTML, for ``_repr_html_``."""
    head, *body = [[escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td style='text-align:left'>{cell}</td>" for cell in row) for row in body]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
