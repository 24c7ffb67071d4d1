"""``convgrad names``: which forward and backward of ATen belong together, for old names too."""

from __future__ import annotations

from typing import Annotated

import typer

from ..diagnostics import kernel_of
from .app import app, out

__all__ = ["names"]


@app.command()
def names(
    name: Annotated[str, typer.Argument(help="A function of ATen, an old one, a backend, or conv2d.")],
) -> None:
    """Which function is the backward of another, what it allocates, and what to call today.

    Examples:

        convgrad names conv2d

        convgrad names cudnn_convolution_backward_input
    """
    out().print(str(kernel_of(name)))
