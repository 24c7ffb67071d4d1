"""Sphinx: MyST Markdown pages, the furo theme; `make docs` treats every warning as an error."""

import re

from sphinx.application import Sphinx

import convgrad

project = "convgrad"
author = "the convgrad authors"
copyright = f"2026, {author}"
version = release = convgrad.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_templates"]
# A page for each name of an autosummary, in docs/reference, made anew by every build.
templates_path = ["_templates"]
default_role = "code"
html_theme = "furo"
html_title = f"convgrad {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_custom_sections = [("Shape", "params_style"), ("Equivalent to", "examples_style")]


def as_napoleon_reads_it(
    _app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Rewrite a docstring's lines, which are written for people who read the code.

    Shapes are written as (N, C, *size); to reStructuredText a star opens emphasis. The items of `Shape:` begin with a
    dash; Sphinx gives each a bullet of its own.
    """
    in_shape = False
    for i, line in enumerate(lines):
        in_shape = line == "Shape:" or (in_shape and line[:1] in ("", " "))
        if in_shape:
            line = re.sub(r"^( +)- ", r"\1", line)  # noqa: PLW2901
        if not line.lstrip().startswith((">>>", "...")):
            line = re.sub(r"(?<=[ (,])\*(?=[\w,])", r"\\*", line)  # noqa: PLW2901
        lines[i] = line


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", as_napoleon_reads_it, priority=100)
