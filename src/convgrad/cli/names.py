"""``convgrad names``: which forward and backward of ATen belong together, for old names and scratch tensors too."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from .app import Result, command, say
from .options import AsJson

_DIRECT = (
    "convgrad.direct: the functions that call one library by its name, most of which PyTorch 1.11 removed, in the "
    "argument order of PyTorch 1.10; each is differentiable; in Python, help(convgrad.direct) shows how\n"
)


@command("names")
def names(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A function of ATen, an old one, a backend, conv2d, finput, ...")
    ],
    as_json: AsJson = False,
) -> Result:
    """Show which function is the backward of another, what it allocates, and what to call today.

    Examples:
        convgrad names conv2d
        convgrad names cudnn_convolution_backward_input
        convgrad names finput
    """
    from .. import direct
    from ..diagnostics import named

    plain = name.strip().removeprefix("convgrad.")
    old = plain.split(".")[-1].split("::")[-1]
    data: dict[str, Any] = {"name": name}
    if plain == "direct":
        data["direct_functions"] = sorted(direct.__all__)
        text = _DIRECT + "its functions: " + ", ".join(data["direct_functions"])
    else:
        result = named(name)
        data["scratch_tensor" if hasattr(result, "holds") else "functions"] = asdict(result)
        text = str(result)
        if old in direct.__all__:
            data["direct_function"] = f"convgrad.direct.{old}"
            text += f"\nunder its old name: convgrad.direct.{old}"
    say(text)
    return Result(data)
