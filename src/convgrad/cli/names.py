"""``convgrad names``: which forward and backward of ATen belong together, for old names and scratch tensors too."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import direct
from ..diagnostics import named
from .app import app, say

__all__ = ["names"]

_DIRECT = (
    "convgrad.direct: the functions that call one library by its name, most of which PyTorch 1.11 removed, in the "
    "argument order of PyTorch 1.10; each is differentiable; docs/direct.md\n"
)


@app.command()
def names(
    name: Annotated[str, typer.Argument(help="A function of ATen, an old one, a backend, conv2d, finput, ...")],
) -> None:
    """Which function is the backward of another, what it allocates, and what to call today.

    Examples:

        convgrad names conv2d

        convgrad names cudnn_convolution_backward_input

        convgrad names finput
    """
    plain = name.strip().removeprefix("convgrad.")
    if plain == "direct":
        say(_DIRECT + "its functions: " + ", ".join(sorted(direct.__all__)))
        return
    say(named(name))
    old = plain.split(".")[-1].split("::")[-1]
    if old in direct.__all__:
        say(f"under its old name: convgrad.direct.{old}")
