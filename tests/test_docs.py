"""Everything that the documentation shows is run, and what it says about the rooms is compared with the code.

In the Markdown pages a ```python block is executed; the blocks of one page share their names, from top to bottom.
A ```pycon block is compared with what it prints. Other languages (sh, text) are not code of ours.
"""

import ast
import doctest
import importlib
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from runpy import run_path
from threading import Thread

import pytest

import convgrad

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "convgrad"
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONAL = {"rich", "transformers", "triton", "typer"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def snippets(page: Path) -> list[tuple[int, str, str]]:
    """(line, language, code) of each block of a page."""
    text = page.read_text(encoding="utf-8")
    found = [(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in FENCE.finditer(text)]
    return [f for f in found if f[1] in ("python", "pycon")]


@pytest.mark.usefixtures("brief_search", "brief_trial", "instant_limits")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("convgrad.check.problem_set._MOST", 10)  # a short check: the kernels shown are right
    names: dict = {"__name__": "__snippet__"}
    for line, language, code in snippets(page):
        place = f"{page.name}, line {line}"
        if language == "python":
            exec(compile("\n" * line + code, str(page), "exec"), names)
        else:
            test = doctest.DocTestParser().get_doctest(code, names, place, str(page), line)
            run_doctest(test, clear=False)
            names = test.globs


def modules() -> list[str]:
    """Every module of the package, from its files: nothing is imported for it."""
    files = (p.relative_to(SOURCE.parent).with_suffix("") for p in sorted(SOURCE.rglob("*.py")))
    names = (".".join(f.parts).removesuffix(".__init__") for f in files)
    return [n for n in names if not n.endswith("__main__")]


@pytest.mark.usefixtures("brief_search", "brief_trial", "instant_limits")
@pytest.mark.parametrize("module", modules())
def test_the_examples_in_docstrings_run(module):
    try:
        loaded = importlib.import_module(module)
    except ImportError as missing:
        if missing.name in OPTIONAL:
            pytest.skip(f"{missing.name} is not installed")
        raise
    for test in doctest.DocTestFinder(exclude_empty=True).find(loaded, module):
        if test.examples:
            run_doctest(test)


def run_doctest(test: doctest.DocTest, clear: bool = True) -> None:
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append, clear_globs=clear)
    assert not report, "".join(report)


# ---- links and names ---------------------------------------------------------------------------------

LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        file, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / file if file else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
            outside = target.suffix == ".md" and target.resolve().parent != page.parent
            assert page.parent != ROOT / "docs" or not outside, f"{link} is no page of `make docs`"


def test_the_speeds_on_the_pages_are_those_of_the_files_that_their_rows_name(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import figures

    for path, text in figures.pages():
        assert path.read_text(encoding="utf-8") == text, "run python benchmarks/figures.py"
    layers = [row for path in figures.RESULTS.glob("layers-*.csv") for row in figures.results(path.name)]
    assert not [row for row in layers if row["measured_speed"] and float(row["measured_high"]) < 0.97]  # as they say


def test_the_reference_has_every_public_name_and_each_is_described():
    """On a page of its own, or for `convgrad.direct` in a table."""
    page = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("api*.md")))
    named = re.findall(r"^   (convgrad\.[\w.]+)$", page, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {f"convgrad.nn.{name}" for name in convgrad.nn.__all__} <= {*named}
    shown = {qualified.rsplit(".", 1)[1] for qualified in named}
    modules = {"direct", "functional", "nn"}
    assert {name for name in convgrad.__all__ if name not in shown} <= modules
    assert all(f"convgrad.{module}" in page for module in modules)
    for name in named:
        module, attribute = name.rsplit(".", 1)
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_the_drawings_show_what_the_files_hold():
    drawn = run_path(str(ROOT / "docs" / "drawings.py"))["drawings"]()
    for name, content in drawn.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == content, f"{name}: run python docs/drawings.py"


# ---- the rooms --------------------------------------------------------------------------------------


def floors() -> dict[str, int]:
    """Room -> floor, from the table of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = {}
    for floor, rooms in re.findall(r"^\| (\d) \| ([^|]+) \|", text, re.MULTILINE):
        for room in re.findall(r"`([\w/.]+)`", rooms):
            found[room.removesuffix(".py").rstrip("/")] = int(floor)
    return found


def rooms() -> set[str]:
    """What lies in the package's folder: modules and packages with at least one module."""
    files = {p.stem for p in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    return files | {p.name for p in SOURCE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}


@cache
def imports() -> list[tuple[str, str, str, str, str]]:
    """(file, room that imports, room imported, module imported from, name imported) over the whole package."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        here = path.relative_to(SOURCE)
        room = here.parts[0].removesuffix(".py")
        package = ["convgrad", *here.parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[tuple[list[str], str]] = []
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                module = base + (node.module.split(".") if node.module else [])
                targets = [(module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                targets = [(alias.name.split("."), "") for alias in node.names]
            for module, name in targets:
                if module[0] == "convgrad":
                    target = module[1] if len(module) > 1 else name
                    found.append((str(here), room, target, ".".join(module[1:]), name))
    return found


def test_the_page_names_every_room_and_no_other():
    assert set(floors()) == rooms()


def test_a_room_imports_only_from_its_floor_or_below():
    floor = floors()
    upwards = [
        f"{file} (floor {floor[room]}) imports {target} (floor {floor[target]})"
        for file, room, target, *_ in imports()
        if room in floor and target in floor and floor[target] > floor[room]
    ]
    assert upwards == []


def test_no_room_imports_a_private_name_of_another():
    private = [
        f"{file} imports {target}.{name}"
        for file, room, target, _, name in imports()
        if target != room and name.startswith("_") and not name.startswith("__") and name not in rooms()
    ]
    assert private == []


#: Modules of a room that others import by name: a tool that nothing on the way of a call needs, and rooms inside rooms.
OPEN = ("engine.measure", "diagnostics.aten_rules", "backends.aten_libraries")


def test_a_room_is_imported_through_its_face():
    """`from ..engine import Plan`, not `from ..engine.plan import Plan`."""
    behind = {
        f"{file} imports {module}"
        for file, room, target, module, _ in imports()
        if "." in module and target != room and not module.startswith(OPEN)
    }
    assert behind == set()


def test_the_walk_over_the_imports_finds_them():
    # Guards the three above against a walk that finds nothing.
    found = imports()
    assert ("backends/padded_copy.py", "backends", "problem", "problem", "ConvProblem") in found
    assert any(file.startswith("engine/") and target == "backends" for file, _, target, *_ in found)


# ---- the built folder ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_built_folder_is_searched_in_a_browser_without_network(tmp_path):
    pytest.importorskip("furo")
    browser = shutil.which("chromium") or pytest.skip("no chromium")
    folders = ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")]
    subprocess.run([sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", *folders], check=True)
    show = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "html"))
    with ThreadingHTTPServer(("127.0.0.1", 0), show) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = f"http://127.0.0.1:{server.server_port}/search.html?q=trilinear"
        rules = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        command = [browser, "--headless", "--no-sandbox", rules, "--virtual-time-budget=20000", "--dump-dom", page]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        server.shutdown()
    assert 'href="architecture.html"' in shown.partition('id="search-results"')[2]
