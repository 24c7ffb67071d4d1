"""Problems on a command line: as they are, files of them, benchdnn's included, and the layers of models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..diagnostics import Machine
from ..problem import PASSES, ConvProblem, Pass, read_problem_file
from .app import fail
from .models import explained
from .options import OfModel, kind_of

#: benchdnn's names of directions, and what a plain problem and a transposed one compute in each.
_DIRECTIONS: dict[str, tuple[tuple[Pass, ...], tuple[Pass, ...]]] = {
    "FWD": (("forward",), ("grad_input",)),
    "BWD_DW": (("grad_input", "grad_weight"), ("forward", "grad_weight")),
    "BWD_D": (("grad_input",), ("forward",)),
    "BWD_W": (("grad_weight",), ("grad_weight",)),
}


def read_problems(
    whats: Sequence[str], transposed: bool = False, models: tuple[torch.device, OfModel] | None = None,
    linear: bool = False,
) -> tuple[list[ConvProblem], dict[ConvProblem, set[Pass]]]:  # fmt: skip
    """Return the problems of some arguments, and what a file's --dir asks for.

    Models may be among them where their device and options are given, with their linear layers on request.

    Raises:
        ValueError: an argument that is no problem and no file, or a line of a file that is no problem.
    """
    problems: list[ConvProblem] = []
    passes: dict[ConvProblem, set[Pass]] = {}
    read = partial(ConvProblem.parse, transposed=transposed)
    for what in whats:
        kind = kind_of(what)
        if models is not None:
            models[1].only_for(kind == "model", what)
        if models is not None and kind == "model":
            layers = explained(what, Machine.here(models[0]), models[1])
            problems += [layer.problem for layer in layers if linear or not layer.linear]
        elif kind == "script":
            raise fail(
                f"{what!r} is a script, not a file of problems", f"--kernels {what} before the command loads kernels"
            )
        elif kind == "file":
            options: dict[str, str] = {}
            for _, result in read_problem_file(what, read, options):
                if isinstance(result, ValueError):
                    raise result
                problems.append(result)
                for direction in filter(None, options.get("dir", "").split(",")):
                    some = (both for name, both in _DIRECTIONS.items() if direction.upper().startswith(name))
                    asked = next(some, (PASSES, PASSES))[result.transposed]  # of FWD_B, BWD_WB, ...
                    passes.setdefault(result, set()).update(asked)
        else:
            problems.append(read(what))
    return problems, passes
