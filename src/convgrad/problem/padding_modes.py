"""Padding modes as a copy: what is read outside an input, written out around it; and the adjoint, a fold.

The gradient of a pad is a fold, which adds what was padded to where it was read, and the gradient of a fold is a pad.
PyTorch pads circularly by copies into slices, each of whose gradients copies the whole image, and what it returns is
contiguous: here the interior is copied once each way, in its layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from .._compat import channels_last_of, functorch_active, has_storage, jit_tracing, suggests_channels_last
from .sizes import readable

#: (low, high) of each of the last dimensions.
Sides = tuple[tuple[int, int], ...]


def pad(input: Tensor, sides: Sides, mode: str) -> Tensor:
    """Return the input padded from itself by ``mode``, (.., *n) -> (.., *(low + n + high))."""
    if mode == "circular" and is_plain(input) and input.dim() - len(sides) in (1, 2) and fits(input, sides, mode):
        return _PadOrFold.apply(input, False, sides, mode)  # pyright: ignore[reportReturnType]
    return by_pytorch(input, sides, mode)


def fold(gradient: Tensor, sides: Sides, mode: str) -> Tensor:
    """Return the adjoint of `pad`, (.., *(low + n + high)) -> (.., *n), where no side crops."""
    if is_plain(gradient):
        return _PadOrFold.apply(gradient, True, sides, mode)  # pyright: ignore[reportReturnType]
    return _fold(gradient, sides, mode)


def fits(input: Tensor, sides: Sides, mode: str) -> bool:
    """Whether there is as much to read as ``mode`` asks, and nothing is cropped."""
    return all(min(pair) >= 0 for pair in sides) and readable(input.shape[-len(sides) :], sides, mode)


def by_pytorch(input: Tensor, sides: Sides, mode: str = "constant") -> Tensor:
    """``torch.nn.functional.pad``, told the sides in the order of the dimensions; a negative one crops."""
    return F.pad(input, [side for pair in reversed(sides) for side in pair], mode=mode)


def is_plain(input: Tensor) -> bool:
    """Whether it is a tensor in CPU memory, and not being transformed, compiled or traced."""
    return (
        not torch.compiler.is_compiling()
        and type(input) in (Tensor, Parameter)
        and input.is_cpu
        and not functorch_active()
        and has_storage(input)
        and jit_tracing() is None
    )


class _PadOrFold(torch.autograd.Function):
    """`_pad` or `_fold`: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, folds: bool, sides: Sides, mode: str) -> Tensor:
        ctx.folds, ctx.of = folds, (sides, mode)
        return (_fold if folds else _pad)(t, sides, mode)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return (pad if ctx.folds else fold)(grad_outputs[0], *ctx.of), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return (_fold if ctx.folds else _pad)(tangents[0], *ctx.of)


def _pad(input: Tensor, sides: Sides, mode: str) -> Tensor:
    """Return the padded input, in the input's layout."""
    if input.dim() != len(sides) + 2 or not suggests_channels_last(input):
        return by_pytorch(input, sides, mode)  # a volume without N may look like one in channels_last
    sizes = [low + n + high for n, (low, high) in zip(input.shape[2:], sides, strict=True)]
    layout = channels_last_of(len(sides))
    result = torch.empty([*input.shape[:2], *sizes], dtype=input.dtype, device=input.device, memory_format=layout)
    inner, regions = result, []
    for d, (low, _) in enumerate(sides, start=2):
        regions.append(inner)  # without padding in the dimensions before d
        inner = inner.narrow(d, low, input.shape[d])
    inner.copy_(input)
    for d, region, (low, high) in reversed([*zip(range(2, input.dim()), regions, sides, strict=True)]):
        n = input.shape[d]
        region.narrow(d, 0, low).copy_(region.narrow(d, n, low))
        region.narrow(d, low + n, high).copy_(region.narrow(d, low, high))
    return result


def _fold(gradient: Tensor, sides: Sides, mode: str) -> Tensor:
    if not sides:
        return gradient.clone()
    (low, high), *rest = sides
    d = gradient.dim() - len(sides)
    n = gradient.shape[d] - low - high
    result = _fold(gradient.narrow(d, low, n), tuple(rest), mode)
    # where the low and the high side are read
    reads = {"circular": (n - low, 0), "reflect": (1, n - 1 - high), "replicate": (0, n - 1)}[mode]
    for start, length, read in ((0, low, reads[0]), (low + n, high, reads[1])):
        if not length:
            continue
        side = _fold(gradient.narrow(d, start, length), tuple(rest), mode)
        if mode == "reflect":
            side = side.flip(d)
        elif mode == "replicate":
            side = side.sum(d, keepdim=True)
        result.narrow(d, read, side.shape[d]).add_(side)
    return result
