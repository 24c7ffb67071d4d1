"""Rows of text as a table, for a terminal and for a notebook, and text of any width in a narrow terminal."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[str] = (), width: int | None = None) -> str:
    """Columns under the titles in the first row; a titled column that is empty in every other row is left out.

    Args:
        right: titles of the columns that are aligned on the right.
        width: the most that a line may have; the columns that would exceed it stand below each row instead, with
            their titles.

    Equivalent to:
        >>> rows = [("ms", "kernel", "backend"), ("1.5", "", "aten"), ("12", "", "native")]
        >>> print(text_table(rows, right=["ms"]))
         ms  backend
        1.5  aten
         12  native
        >>> print(text_table([("backend", "reason"), ("aten", "no rule prefers another")], width=20))
        backend
        aten
            reason: no rule
            prefers another
    """
    columns: list[tuple[str, ...]] = list(zip(*rows, strict=True))
    columns = [c for c in columns if not (c[0] and len(c) > 1 and not any(c[1:]))]
    widths = [max(map(len, c)) for c in columns]
    fit = len(columns)
    while width is not None and fit > 1 and sum(widths[:fit]) + 2 * (fit - 1) > width:
        fit -= 1
    padded = [
        [cell.rjust(n) if c[0] in right else cell.ljust(n) for cell in c]
        for c, n in zip(columns[:fit], widths, strict=False)
    ]
    lines = ["  ".join(line).rstrip() for line in zip(*padded, strict=True)]
    if width is None:
        return "\n".join(lines)
    below = ["", *("; ".join(f"{c[0]}: {c[i]}" if c[0] else c[i] for c in columns[fit:] if c[i])
                   for i in range(1, len(lines)))]  # fmt: skip
    texts = [
        (line, "  ") if not rest else (f"{line}\n    {rest}", "    ") for line, rest in zip(lines, below, strict=True)
    ]
    return "\n".join(wrapped(text, width, indent) for text, indent in texts)


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
    """So many of something.

    Equivalent to:
        >>> counted(1), counted(2, "call")
        ('1 problem', '2 calls')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The same as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The same as HTML, for ``_repr_html_``."""
    head, *body = [[escape(cell) for cell in row] for row in rows]
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td style='text-align:left'>{cell}</td>" for cell in row) for row in body]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
