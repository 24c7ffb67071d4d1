"""Whether a layer is worth replacing, by the engine's choice and without measuring.

It is if another backend than ATen is chosen for any of its outputs: at the sizes of the inputs that it was seen to get,
or where these are not known (None), at any of a grid of usual sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from .._compat import channels_last_of, cpu_lacks, suggests_channels_last
from ..backends import native_norm_takes, norm_gains
from ..check import problem_of_module
from ..engine import BY_RULE, Plan, beats_matmul, get_backend, linear_gains
from ..errors import ConvgradError
from ..ops import autocast_dtype
from ..problem import OUTPUTS, PASSES, ConvProblem, Output, Outputs
from ..settings import measuring_share

Shape = Sequence[int]
#: `engine.plan_for`, which may remember: a model has many layers alike.
PlanFor = Callable[[ConvProblem, Outputs, torch.device], Plan]


class Seen(NamedTuple):
    """An input that reached a layer: its shape, batch included, and whether it lay in channels_last."""

    shape: tuple[int, ...]
    channels_last: bool


#: Sizes of images, sequences and volumes that are tried where the actual ones are not known.
_BATCHES = (1, 32)
_SIZES = {1: (64, 1024, 16384), 2: (7, 14, 56, 224), 3: (7, 28, 112)}
#: Sizes of which PyTorch's kernels are wrong at some, where they are at any: about as large as a kernel.
_SMALL = (1, 2, 3, 4)
#: Of a linear layer's input, where they are not known: the most first, which the rules need, and what was measured.
_ROWS = tuple(round(2 ** (i / 2)) for i in range(32, 13, -1))


def worth_replacing(module: Any, seen: Iterable[Seen] | None, plan_for: PlanFor) -> bool:
    """Whether any output of a layer is given to another backend than ATen: a faster one, or one that is right.

    On a GPU the rules prefer others for large layers alone, and a small one that is replaced for nothing takes the
    processor longer. So there the rules count only where sizes are known. A layer in float32 gets bfloat16 there too,
    by autocast, for which the rules take more; on a CPU it gets what autocast is on for now, and nothing else.
    """
    d, device = len(module.kernel_size), module.weight.device
    dtypes = {module.weight.dtype}
    if dtypes == {torch.float32}:
        on_cpu = {autocast_dtype("cpu") or torch.float32}
        dtypes = on_cpu if device.type == "cpu" else {torch.float32, torch.bfloat16}
    contiguous, channels_last = torch.contiguous_format, channels_last_of(d)
    turned = suggests_channels_last(module.weight)  # then so is every result
    formats = dict.fromkeys((channels_last,) if turned else (contiguous, channels_last))

    def grid(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[Shape]:
        return ((batch, module.in_channels, *(size,) * d) for batch in batches for size in sizes)

    def problems(inputs: Iterable[tuple[Shape, torch.memory_format]]) -> Iterator[ConvProblem]:
        for (shape, memory_format), dtype in product(inputs, dtypes):
            with suppress(ConvgradError):  # this size is too small for the kernel
                yield problem_of_module(module, shape, dtype, memory_format)

    if seen is None:
        inputs = product(grid(_BATCHES, _SIZES[d]), formats)
    else:
        inputs = ((shape, channels_last if turned or last else contiguous) for shape, last in seen)
    ruled = seen is not None or device.type == "cpu"
    if any(not p.empty and _any_but_aten(p, device, plan_for, ruled) for p in problems(inputs)):
        return True
    aten = get_backend("aten")  # where it is known to be wrong at any size, the layer is replaced for that alone
    small = product(grid((2,), _SMALL), formats)
    return seen is None and any(aten.wrong_here(p, PASSES, device)[0] for p in problems(small))


def linear_may_gain(module: Any, seen: Iterable[Seen] | None, plan_for: PlanFor) -> bool:
    """Whether a linear layer may be faster as a pointwise convolution, on a CPU.

    Where measuring is on, it is found out when the layer runs. Under autocast it is PyTorch's, unless the processor
    lacks the arithmetic.
    """
    by_autocast = autocast_dtype("cpu")
    if by_autocast and not cpu_lacks(by_autocast):
        return False
    weight, has_bias = module.weight, module.bias is not None
    n, c = weight.shape
    rows = _ROWS if seen is None else {prod(s.shape[:-1]) for s in seen}
    problems = (
        ConvProblem.parse(f"mb1ic{c}ih1iw{m}oc{n}kh1kw1 channels_last").replace(dtype=weight.dtype, has_bias=has_bias)
        for m in rows
        if weight.is_cpu and linear_gains(m * c, n, c)
    )
    measuring = measuring_share(weight.device) > 0
    for problem in problems:
        with suppress(ConvgradError):  # a requested backend cannot
            if measuring or beats_matmul(plan_for(problem, ("forward",), weight.device)):
                return True
    return False


def norm_may_gain(seen: Iterable[Seen] | None, device: torch.device, dtype: torch.dtype, by_image: bool) -> bool:
    """Whether a normalization with parameters of this dtype may be faster in training, on a CPU."""
    if device.type != "cpu" or not native_norm_takes(dtype):
        return False
    return seen is None or any(norm_gains(s.shape, s.channels_last and not by_image, by_image) for s in seen)


def _any_but_aten(problem: ConvProblem, device: torch.device, plan_for: PlanFor, ruled: bool) -> bool:
    backward: list[Output] = [o for o in OUTPUTS if o != problem.bias_pass and (problem.has_bias or o != "grad_bias")]
    forward: Outputs = (problem.bias_pass,)
    calls = [forward, tuple(backward), *((o,) for o in backward if o != "grad_bias")]
    for outputs in calls:
        with suppress(ConvgradError):
            steps = plan_for(problem.replace(has_bias=False), outputs, device).steps
            if any(s.backend.name != "aten" and (ruled or not s.reason.startswith(BY_RULE)) for s in steps):
                return True
    return False


def dtype_against(module: nn.Module) -> str | None:
    """Why the dtype of a module's weight rules it out; None where it does not."""
    dtype = module.weight.dtype  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1:
        return None
    return f"its weight is {dtype}"
