"""Whether a layer is worth replacing: by the engine's choice, without measuring.

Where the sizes that a layer sees are known, it is if the choice gives any of its outputs to another backend than ATen.
Where they are not, a grid of usual sizes is tried; a layer for which ATen is chosen at all of them stays stock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from torch import nn

from .._compat import channels_last_of
from ..custom import problem_of_module
from ..engine import get_backend, plan_for
from ..errors import ConvgradError
from ..problem import OUTPUTS, PASSES, ConvProblem, Output

Shape = Sequence[int]

#: Sizes of images, sequences and volumes that are tried where the actual ones are not known.
_BATCHES = (1, 32)
_SIZES = {1: (64, 1024, 16384), 2: (7, 14, 56, 224), 3: (7, 28, 112)}
#: Sizes of which PyTorch's kernels are wrong at some, where they are at any: about as large as a kernel.
_SMALL = (1, 2, 3, 4)


def worth_replacing(module: Any, seen: Iterable[Shape] | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether any output of a layer is given to another backend than ATen: a faster one, or one that is right.

    Args:
        seen: the shapes of its inputs, batch included; None where they are not known.
    """
    d = len(module.kernel_size)

    def grid(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[Shape]:
        return ((batch, module.in_channels, *(size,) * d) for batch in batches for size in sizes)

    def problems(shapes: Iterable[Shape]) -> Iterator[ConvProblem]:
        formats = dict.fromkeys((torch.contiguous_format, channels_last_of(d)))
        for shape, memory_format in product(shapes, formats):
            with suppress(ConvgradError):  # this size is too small for the kernel
                yield problem_of_module(module, shape, dtype, memory_format)

    usual = grid(_BATCHES, _SIZES[d]) if seen is None else seen
    if any(not p.empty and _any_but_aten(p, device) for p in problems(usual)):
        return True
    aten = get_backend("aten")  # where it is known to be wrong at any size, the layer is replaced for that alone
    return seen is None and any(aten.wrong_here(p, PASSES, device)[0] for p in problems(grid((2,), _SMALL)))


def _any_but_aten(problem: ConvProblem, device: torch.device) -> bool:
    backward: list[Output] = [o for o in OUTPUTS if o != problem.bias_pass and (problem.has_bias or o != "grad_bias")]
    forward: tuple[Output, ...] = (problem.bias_pass,)
    calls = [forward, tuple(backward), *((o,) for o in backward if o != "grad_bias")]
    for outputs in calls:
        with suppress(ConvgradError):
            if any(s.backend.name != "aten" for s in plan_for(problem.replace(has_bias=False), outputs, device).steps):
                return True
    return False


def dtype_against(module: nn.Module) -> str | None:
    """Why the dtype of a module's weight rules it out; None where it does not."""
    dtype = module.weight.dtype  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        return None
    return f"its weight is {dtype}"
