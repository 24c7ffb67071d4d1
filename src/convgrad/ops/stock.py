"""Which calls are PyTorch's own: where ATen was chosen, its operator is the same computation without a Python frame."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import channels_last_of
from ..backends.aten import reads_every_stride, statable, without_slack
from ..backends.strides import tidy
from ..engine.plan import Plan, plan_for
from ..engine.request import active
from ..problem import ConvProblem, Output, gradient_outputs

__all__ = ["Stock", "stock", "stock_backward"]

#: PyTorch's second derivatives of a convolution of groups take a number of kernel calls that grows with the groups.
#: Up to here they are as fast as ours (0.55x to 1.0x of our time at 2 to 32 groups; 1.1x at 64, 2.3x at 256).
_MOST_GROUPS = 32


class Stock(NamedTuple):
    """What of a call PyTorch's own operator may compute.

    Attributes:
        forward: the result, where nothing is recorded for autograd.
        autograd: the result and all derivatives, where input and weight both get a gradient.
        any_strides: the same holds for operands of these sizes in any layout, and under any flags.
    """

    forward: bool
    autograd: bool
    any_strides: bool


def stock(problem: ConvProblem, arguments: tuple[Any, ...], weight: Tensor) -> Stock:
    """Ask the rules; once for each kind of call.

    Args:
        arguments: stride, padding and so on, as the operator takes them.
        weight: of the call; its strides count.
    """
    p = problem
    if not _is_safe(p, arguments, weight):
        return Stock(False, False, False)
    forward = _all_aten(p, [(p.bias_pass,)], weight.device)
    autograd = forward and _autograd(p, weight.device)
    return Stock(forward, autograd, autograd and not reads_every_stride(p))


def stock_backward(plan: Plan, arguments: tuple[Any, ...], weight: Tensor) -> bool:
    """Whether PyTorch's own operator yields the gradients of a plan as they are.

    Args:
        arguments, weight: as of `stock`.
    """
    one_call = len(plan.steps) == 1 and plan.steps[0].backend.name == "aten"
    return one_call and _is_safe(plan.problem, arguments, weight)


def _is_safe(p: ConvProblem, arguments: tuple[Any, ...], weight: Tensor) -> bool:
    """Whether PyTorch can state this problem, and neither corrupts memory nor is wrong."""
    return (
        p.dtype.is_floating_point
        and not p.empty
        and len(arguments[1]) != 2 * p.ndim
        and statable(p) is p
        and without_slack(p) is p
        and not (reads_every_stride(p) and tidy(weight) is not weight)
    )


def _autograd(p: ConvProblem, device: torch.device) -> bool:
    """Whether ATen is chosen for every output, in either layout and with or without bias, and nothing is lost."""
    if active() is not None or device.type != "cpu" or p.groups > _MOST_GROUPS or p.depthwise:
        return False
    last = p.replace(memory_format=channels_last_of(p.ndim))
    if without_slack(last) is not last:
        return False
    asked: list[tuple[Output, ...]] = [
        (p.bias_pass,),
        gradient_outputs(p.transposed, (True, True, False)),
        gradient_outputs(p.transposed),
    ]
    return all(
        _all_aten(p.replace(memory_format=layout, has_bias=has_bias), asked, device)
        for layout in (torch.contiguous_format, last.memory_format)
        for has_bias in (False, True)
    )


def _all_aten(p: ConvProblem, asked: list[tuple[Output, ...]], device: torch.device) -> bool:
    return all(step.backend.name == "aten" for outputs in asked for step in plan_for(p, outputs, device).steps)
