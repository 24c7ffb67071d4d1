"""The page without a browser: complete, self-contained, well-formed, and with its data inside."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

pytest.importorskip("jinja2", reason="the extra [report] brings jinja2 and matplotlib")
pytest.importorskip("matplotlib", reason="the extra [report] brings jinja2 and matplotlib")

from convgrad.report import Profile

from .example import example, row, slower

VOID = {"meta", "wbr", "br", "hr", "img", "link", "input"}


class Tree(HTMLParser):
    """What is in a page; every element is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return example().against(slower(example()))


@pytest.fixture(scope="module")
def html(profile: Profile) -> str:
    return profile.to_html()


@pytest.fixture(scope="module")
def tree(html: str) -> Tree:
    found = Tree()
    found.feed(html)
    assert found.open == []
    return found


def test_the_data_inside_is_the_profile(html: str, profile: Profile, tmp_path) -> None:
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    assert Profile.read(path).to_dict() == profile.to_dict()
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert json.loads(text)["schema"] == 1


def test_it_asks_for_nothing(tree: Tree, html: str) -> None:
    for tag, attrs in tree.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action"} & set(attrs)
        assert (attrs.get("xlink:href") or "#").startswith("#")
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|WebSocket", html)
    assert {u for u in re.findall(r"https?://[^\"' )]+", html) if not u.startswith("http://www.w3.org/")} == set()
    policy = next(a["content"] for t, a in tree.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert (policy or "").startswith("default-src 'none'")


def test_the_sections_stand_in_their_order(tree: Tree) -> None:
    names = [a["aria-labelledby"] for t, a in tree.elements if t == "section"]
    assert names == ["whole", "avoidable", "roof", "time", "each", "before", "machine"]
    ids = [a["id"] for _, a in tree.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert set(names) <= set(ids)


def test_each_row_has_one_point(tree: Tree, profile: Profile) -> None:
    rows = [a["data-row"] for t, a in tree.elements if t == "tr" and "data-row" in a]
    points = [a["data-row"] for t, a in tree.elements if a.get("class") == "point"]
    assert rows == [str(i) for i in range(len(profile.rows))]
    assert sorted(points) == sorted(rows)
    assert [a["tabindex"] for t, a in tree.elements if t == "tr" and "tabindex" in a] == ["0"] + ["-1"] * 27
    labels = [a["aria-label"] for t, a in tree.elements if t == "svg"]
    assert ["Roofline of 28 rows" in (label or "") for label in labels] == [True]


def test_the_timeline_has_the_calls_of_a_step_and_each_names_its_row(tree: Tree, profile: Profile) -> None:
    calls = [a for t, a in tree.elements if t == "i"]
    forward = [m for m in profile.timeline if profile.rows[m.row].direction == "forward"]
    assert [a["data-row"] for a in calls] == [str(m.row) for m in forward] + ["0", "0"]
    assert calls[-1]["style"] == "left:90.226%;width:9.774%"
    assert "3 calls of convolutions in 33.2 ms" in " ".join("".join(tree.text).split())
    with pytest.raises(ValueError, match="does not hold the data"):
        Profile.from_dict({**profile.to_dict(), "timeline": [{"row": 28, "start": 0, "milliseconds": 1}]})


def test_words_of_others_are_text_not_markup(tree: Tree) -> None:
    assert "nets:make_model </script><b>" in tree.text
    assert not [t for t, _ in tree.elements if t == "slow"]
    assert sum("by rule: <slow> & wide" in text for text in tree.text) == 1 + 28  # once for all, and in each row's rest


def test_numbers_and_words(tree: Tree, profile: Profile) -> None:
    said = " ".join("".join(tree.text).split())
    for words in (
        "With convgrad the training step is 1.52x [1.48, 1.57] as fast",
        "83.1 ms instead of 126 ms.",
        "[0.97, 1.04] no difference",
        "depthwise 7x7, 32 channels, 68x68, batch 4",
        "convgrad tune x",
        "the run before, 2026-11-22 11:30",
        "only after",
        "20.0 GB/s and 100 GFLOP/s in float32 (made up)",
    ):
        assert words in said, words


@pytest.mark.parametrize("kind", ["run", "table"])
def test_a_script_and_a_table_have_fewer_sections(kind: str) -> None:
    variants = example().variants[:1] if kind == "run" else ()
    limits = example().limits if kind == "run" else ()
    tree = Tree()
    tree.feed(replace(example(), kind=kind, variants=variants, limits=limits, costs=()).to_html())
    names = [a["aria-labelledby"] for t, a in tree.elements if t == "section"]
    assert names == ([] if kind == "table" else ["whole", "avoidable"]) + ["roof", "time", "each", "machine"]
    assert ("Nothing avoidable was found." in tree.text) is (kind == "run")


def test_rows_without_a_time_have_no_share() -> None:
    rows = (row("ic1ih3oc1kh1", "forward", "aten", float("inf")),)
    page = replace(example(), kind="table", rows=rows, timeline=(), variants=(), costs=()).to_html()
    assert "1\N{NO-BREAK SPACE}channel," in page


def test_in_a_notebook_it_is_the_page_in_a_frame(monkeypatch) -> None:
    tree = Tree()
    tree.feed(example()._repr_html_())
    ((tag, attrs),) = tree.elements
    assert tag == "iframe"
    assert (attrs["srcdoc"] or "").startswith("<!doctype html>")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'convgrad\[report\]'"):
        example().to_html()
    assert "<table>" in example()._repr_html_()
