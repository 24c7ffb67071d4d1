"""SiLU of a depthwise convolution in one kernel on a GPU, forward and backward, as causal-conv1d fuses them.

What the convolution gives is neither written nor saved: the backward computes it again, and from it the gradient that
the convolution's own gradients are computed of.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._compat import profiler_enabled, without_autocast
from ..backends import TritonBackend, TritonBandedBackend
from ..engine import Plan, fusion_gains, is_eager, observed, observers, requested, resolve
from ..ops import autocast_is_on, cast_operands
from ._convolution import conv2d
from ._gradients import convolution_backward


def silu_of_rows(input: Tensor, weight: Tensor, bias: Tensor | None, before: int) -> Tensor | None:
    """Return SiLU of a depthwise convolution of images of one row in one kernel; None where that gains nothing.

    Shape:
        - input: (N, D, 1, L), weight: (D, 1, 1, K), bias: (D,), with so many zeros before each row
        - result: (N, D, 1, before + L - K + 1)
    """
    tensors = (input, weight) if bias is None else (input, weight, bias)
    plain = is_eager(input, weight, bias) and not any(t.is_neg() for t in tensors)
    if not plain or (input.is_cpu and requested() is None):
        return None
    if autocast_is_on(input.device.type):
        cast: Any = cast_operands(input, weight, bias)
        with without_autocast():
            return silu_of_rows(cast[0], cast[1], cast[2], before)
    arguments = ((1, 1), (0, 0, before, 0), (1, 1), False, (0, 0), weight.shape[0])
    plan = resolve("convolution", arguments, input, weight, bias)
    backend = plan.steps[0].backend if len(plan.steps) == 1 and not plan.unsettled else None
    if not isinstance(backend, TritonBackend) or isinstance(backend, TritonBandedBackend):
        return None
    fused = _fused_kernel(backend, plan.problem)
    if requested() is None:  # which is not timed
        given = [t.detach() for t in tensors] + [None] * (bias is None)
        calls = (lambda: F.silu(plan.contract(*given)), lambda: fused(*given))  # pyright: ignore[reportArgumentType]
        if not fusion_gains(plan, *calls):
            return None
    return _Silu.apply(partial(_run, plan, fused), before, input, weight, bias)  # pyright: ignore[reportReturnType]


_fused_kernel: Any = lru_cache(256)(TritonBackend.bind_silu)


def _run(plan: Plan, fused: Any, *operands: Tensor | None) -> Tensor:
    if not (observers or profiler_enabled()):
        return fused(*operands)
    step = plan.steps[0]
    reason = f"{step.reason}, with {'SiLU' if len(operands) == 3 else 'the derivative of SiLU'}"
    return observed(plan.event(step.backend.name, reason), partial(fused, *operands))


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, before: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.run, ctx.before = run, before
        ctx.save_for_backward(input, weight, bias)
        return run(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, bias = ctx.saved_tensors
        padding, groups = (0, 0, ctx.before, 0), weight.shape[0]
        with without_autocast():
            if torch.is_grad_enabled():  # a derivative of this is wanted
                result = conv2d(input, weight, bias, 1, padding, 1, groups)
                (grad,) = torch.func.vjp(F.silu, result)[1](grad_output)
            else:
                grad = ctx.run(input, weight, bias, grad_output)
            sizes, mask = None if bias is None else [groups], ctx.needs_input_grad[2:]
            found = convolution_backward(grad, input, weight, sizes, 1, padding, 1, False, 0, groups, mask)
        return None, None, *found
