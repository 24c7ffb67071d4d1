"""Tables of text and of HTML."""

from convgrad.tables import html_table, text_table, wrapped


def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    rows = [("name", "ms", "note", ""), ("a", "1.5", "", ""), ("long", "12", "", "x")]
    assert text_table(rows, right=["ms"]) == "name   ms\na     1.5\nlong   12  x"


def test_a_head_alone_keeps_its_titles() -> None:
    assert text_table([("name", "ms")]) == "name  ms"


def test_html_is_escaped() -> None:
    assert html_table([("a<b",), ("&",)]) == (
        "<table><tr><th>a&lt;b</th></tr><tr><td style='text-align:left'>&amp;</td></tr></table>"
    )


def test_words_stay_whole_and_the_first_is_never_alone() -> None:
    assert wrapped("label: a/long/path is no file", 12) == "label: a/long/path\n  is no file"
    assert wrapped("  name   value of it", 10, "    ") == "  name   value\n    of it"
    assert wrapped("alone", 2) == "alone"
