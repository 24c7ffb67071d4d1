"""Sphinx: MyST Markdown pages, the furo theme; `make docs` treats every warning as an error."""

import re

from sphinx.application import Sphinx

import convgrad

project = "convgrad"
author = "the convgrad authors"
copyright = f"2026, {author}"
version = release = convgrad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "code"
html_theme = "furo"
html_title = f"convgrad {release}"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_custom_sections = [("Shape", "params_style"), ("Equivalent to", "examples_style")]


def escape_starred_sizes(
    _app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Shapes are written as in the code, (N, C, *size); to reStructuredText a star opens emphasis."""
    lines[:] = [
        s if s.lstrip().startswith((">>>", "...")) else re.sub(r"(?<=[ (,])\*(?=[\w,])", r"\\*", s) for s in lines
    ]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", escape_starred_sizes, priority=100)
