"""Whether a layer may gain, by the engine's choice and without measuring or running it.

It may if another backend than ATen is chosen for any of its outputs at any of a grid of usual sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .._compat import channels_last_of, cpu_lacks, suggests_channels_last
from ..check import problem_of_module
from ..engine import Plan, beats_matmul, get_backend, linear_gains
from ..errors import ConvgradError
from ..ops import autocast_dtype
from ..problem import OUTPUTS, PASSES, ConvProblem, Output, Outputs
from ..settings import measuring_share

#: `engine.plan_for`, which may remember: a model has many layers alike.
PlanFor = Callable[[ConvProblem, Outputs, torch.device], Plan]


#: Sizes of images, sequences and volumes that are tried where the actual ones are not known.
_BATCHES = (1, 32)
_SIZES = {1: (64, 1024, 16384), 2: (7, 14, 56, 224), 3: (7, 28, 112)}
#: Sizes of which PyTorch's kernels are wrong at some, where they are at any: about as large as a kernel.
_SMALL = (1, 2, 3, 4)
#: Of a linear layer's input, where they are not known: the most first, which the rules need, and what was measured.
_ROWS = tuple(round(2 ** (i / 2)) for i in range(32, 13, -1))


def may_gain(module: Any, weight: Tensor, plan_for: PlanFor) -> bool:
    """Whether the engine chooses another backend than ATen for any output of a layer: a faster or a correct one.

    A layer in float32 on a GPU may get bfloat16, too, by autocast, for which the rules take more; on a CPU it gets what
    autocast is on for now, and nothing else.
    """
    described = _described(module)
    d, device = len(module.kernel_size), weight.device
    dtypes = {weight.dtype}
    if dtypes == {torch.float32}:
        on_cpu = {autocast_dtype("cpu") or torch.float32}
        dtypes = on_cpu if device.type == "cpu" else {torch.float32, torch.bfloat16}
    contiguous, channels_last = torch.contiguous_format, channels_last_of(d)
    formats = [channels_last] if suggests_channels_last(weight) else dict.fromkeys((contiguous, channels_last))

    def problems(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[ConvProblem]:
        for batch, size, memory_format, dtype in product(batches, sizes, formats, dtypes):
            with suppress(ConvgradError):  # the size may be too small for the kernel
                yield problem_of_module(described, (batch, module.in_channels, *(size,) * d), dtype, memory_format)

    if any(not p.empty and _any_but_aten(p, device, plan_for) for p in problems(_BATCHES, _SIZES[d])):
        return True
    aten = get_backend("aten")  # where it is known to be wrong at any size, the layer is replaced for that alone
    return any(aten.wrong_here(p, PASSES, device)[0] for p in problems((2,), _SMALL))


def _described(module: Any) -> Any:
    """Return the arguments of a convolution, without its weight and bias, which a parametrization may compute."""
    names = ("kernel_size", "in_channels", "out_channels", "groups", "stride", "padding", "dilation", "padding_mode")
    names += ("transposed", "output_padding")
    return SimpleNamespace(**{name: getattr(module, name) for name in names}, bias=_bias(module))


def _bias(module: Any) -> Any:
    parametrized = "bias" in (module._modules.get("parametrizations") or ())
    return True if parametrized else module._parameters.get("bias", vars(module).get("bias"))


def linear_may_gain(module: Any, weight: Tensor, plan_for: PlanFor) -> bool:
    """Return whether a linear layer may be faster as a pointwise convolution, on a CPU.

    Where measuring is on, it is found out when the layer runs. Under autocast it is PyTorch's, unless the processor
    lacks the arithmetic.
    """
    by_autocast = autocast_dtype("cpu")
    if by_autocast and not cpu_lacks(by_autocast):
        return False
    n, c, has_bias = module.out_features, module.in_features, _bias(module) is not None
    problems = (
        ConvProblem.parse(f"mb1ic{c}ih1iw{m}oc{n}kh1kw1 channels_last").replace(dtype=weight.dtype, has_bias=has_bias)
        for m in _ROWS
        if weight.is_cpu and linear_gains(m * c, n, c)
    )
    measuring = measuring_share(weight.device) > 0
    for problem in problems:
        with suppress(ConvgradError):  # a requested backend may not be able to
            if measuring or beats_matmul(plan_for(problem, ("forward",), weight.device)):
                return True
    return False


def _any_but_aten(problem: ConvProblem, device: torch.device, plan_for: PlanFor) -> bool:
    backward: list[Output] = [o for o in OUTPUTS if o != problem.bias_pass and (problem.has_bias or o != "grad_bias")]
    forward: Outputs = (problem.bias_pass,)
    calls = [forward, tuple(backward), *((o,) for o in backward if o != "grad_bias")]
    for outputs in calls:
        with suppress(ConvgradError):
            steps = plan_for(problem.replace(has_bias=False), outputs, device).steps
            if any(s.backend.name != "aten" for s in steps):
                return True
    return False
