"""Tables of text and of HTML."""

from operator import itemgetter

from convgrad.tables import Table, wrapped


def table(*rows: tuple[str | float, ...]) -> Table[tuple[str | float, ...]]:
    """A table whose first row is the titles; the column ms is of numbers."""
    return Table(rows[1:], {str(t): (itemgetter(i), "g" if t == "ms" else "") for i, t in enumerate(rows[0])})


def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    found = table(("name", "ms", "note", ""), ("a", 1.5, "", ""), ("long", 12, "", "x"))
    assert found.text() == "name   ms\na     1.5\nlong   12  x"


def test_a_head_alone_keeps_its_titles() -> None:
    assert table(("name", "ms")).text() == "name  ms"


def test_html_is_escaped() -> None:
    style = "style='white-space:nowrap;text-align:left'"
    assert table(("a<b",), ("&",)).html() == (
        f"<table><thead><tr><th {style}>a&lt;b</th></tr></thead><tbody><tr><td {style}>&amp;</td></tr></tbody></table>"
    )


def test_in_html_empty_columns_are_left_out_numbers_are_on_the_right_and_a_row_stands_out() -> None:
    text = table(("name", "ms", "note"), ("a", 1.5, ""), ("b " * 30, 12, "")).html(bold=[1])
    assert "note" not in text
    assert text.count("text-align:right") == 3
    assert text.count("min-width:24em") == 3  # a long cell makes its column wide, and is broken there
    (before, after) = text.split("<tr style=font-weight:bold>")
    assert "1.5" in before
    assert "12" in after


def test_words_stay_whole_and_the_first_is_never_alone() -> None:
    assert wrapped("label: a/long/path is no file", 12) == "label: a/long/path\n  is no file"
    assert wrapped("  name   value of it", 10, "    ") == "  name   value\n    of it"
    assert wrapped("alone", 2) == "alone"
