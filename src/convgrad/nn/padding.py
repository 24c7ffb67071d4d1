"""A convolution with padding that torch writes as a copy, without it where the kernels of ``csrc`` compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._compat import without_autocast
from ..backends import PaddedCopy
from ..engine import Plan, find, make
from ..ops import apply, autocast_is_on, cast
from ..padding_modes import Sides, fits, is_plain
from ..problem import PADDING_MODES, PaddingMode
from ..settings import may_choose_again
from .joined import Padded


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    sides: Sides,
    dilation: tuple[int, ...],
    groups: int,
    mode: PaddingMode,
) -> Tensor | None:
    """The convolution that reads its padding from the input; None where that takes a padded copy.

    Shape:
        (N, C_in, *in), (C_out, C_in / groups, *kernel) -> (N, C_out, *out), or input and output without N
    """
    if not is_plain(input) or mode not in PADDING_MODES or may_choose_again(input.device):
        return None
    if autocast_is_on("cpu"):
        input, weight, bias = (cast(t, "cpu") for t in (input, weight, bias))
        with without_autocast():
            return convolve(input, weight, bias, stride, sides, dilation, groups, mode)
    if input.dim() == len(sides) + 1:
        output = convolve(input.unsqueeze(0), weight, bias, stride, sides, dilation, groups, mode)
        return output if output is None else output.squeeze(0)
    if input.dim() != len(sides) + 2 or not fits(input, sides, mode):
        return None
    zeros = (0,) * len(sides)
    arguments = (stride, tuple([side for pair in sides for side in pair]), dilation, False, zeros, groups)
    plan = find("padded", (*arguments, mode), input, weight, bias)
    if plan is None:
        return None
    if plan.__class__ is not Plan:
        plan = make(plan, "convolution", arguments, input, weight, bias, padding_mode=mode)
    copied = not plan.problem.symmetric
    if any(isinstance(step.backend, PaddedCopy) or (copied and step.backend.from_pytorch) for step in plan.steps):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (input, weight, bias)):
        return apply(plan, input, weight, bias)
    return plan.contract(input, weight, bias)


def convolve_padded(
    padded: Padded,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    sides: Sides,
    dilation: tuple[int, ...],
    groups: int,
    compute: Callable[..., Tensor | None] = convolve,
) -> Tensor | None:
    """The convolution, with padding of its own, of what was padded with zeros; None where that takes a padded copy."""
    input, zeros, _ = padded._convgrad_parts
    more = as_pairs((*zeros, *(0,) * (2 * len(sides) - len(zeros))))
    if not any(zeros) or len(more) != len(sides):  # not only the spatial dimensions are to have them
        return None
    sides = tuple((low + a, high + b) for (low, high), (a, b) in zip(sides, more, strict=True))
    return compute(input, weight, bias, stride, sides, dilation, groups, "zeros")


def as_pairs(sides: Sequence[int]) -> Sides:
    """Pairs (low, high) of what ``torch.nn.functional.pad`` takes, which begins with the last dimension."""
    return tuple(zip(sides[-2::-2], sides[::-2], strict=True))
