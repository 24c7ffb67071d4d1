"""The benchmark's layers: those of the models of transformers, of a user's models, and of files of problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .._compat import channels_last_of
from ..diagnostics import Machine
from ..problem import ConvProblem
from .app import fail
from .models import MODELS, explained, takes_images
from .problem_arguments import read_problems


def models_named(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the models that are meant, the user's own and files last; all that are known where none is named."""
    known = list(known)
    own = [name for name in names if ":" in name or Path(name).is_file()]
    unknown = [name for name in names if name not in known and name not in own]
    if unknown:
        raise fail(f"there is no model {unknown[0]!r}", f"one of {', '.join(known)}, or module:factory")
    return [*(name for name in known if name in names or not names), *dict.fromkeys(own)]


def layers_of(name: str, batch: int, size: int, channels_last: bool) -> list[ConvProblem]:
    """Return each distinct convolution of a model or a file once, in order; none where the layout is no other one."""
    if Path(name).is_file():
        result = read_problems([name])[0]
        return [p.replace(memory_format=channels_last_of(p.ndim)) for p in result] if channels_last else result
    if channels_last and not takes_images(name):
        return []
    input = "" if ":" in name else MODELS[name].sample(batch, size, "meta")
    result = explained(name, Machine.here(), torch.float32, channels_last, input)
    return [layer.problem for layer in result if layer.kind != "Linear"]
