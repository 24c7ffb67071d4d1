"""Padding modes in front of a zero-padded problem: PyTorch's own, but circular, whose backward is slow there.

PyTorch pads circularly by copies into slices, each of whose gradients copies the whole image, and what it returns is
contiguous. Here the interior is copied once each way, in its layout: the gradient of a pad is a fold, which adds what
was padded to where it was read, and the gradient of a fold is a pad.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from .._compat import channels_last_of, functorch_active, jit_tracing, suggests_channels_last

__all__ = ["padded"]

Sides = tuple[tuple[int, int], ...]


def padded(input: Tensor, sides: Sides, mode: str) -> Tensor:
    """The input with its padding, (low, high) of each of the last dimensions, read from itself as ``mode`` says.

    Raises:
        RuntimeError, NotImplementedError: as ``torch.nn.functional.pad``.
    """
    if mode == "circular" and _is_plain(input) and _fits(input, sides):
        return _Pad.apply(input, sides)  # pyright: ignore[reportReturnType]
    return _by_pytorch(input, sides, mode)


def _by_pytorch(input: Tensor, sides: Sides, mode: str) -> Tensor:
    return F.pad(input, [side for pair in reversed(sides) for side in pair], mode=mode)


def _is_plain(input: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and type(input) in (Tensor, Parameter)
        and input.is_cpu
        and not functorch_active()
        and jit_tracing() is None
    )


def _fits(input: Tensor, sides: Sides) -> bool:
    """Whether PyTorch pads so too, and crops nothing."""
    sizes = input.shape[-len(sides) :]
    batched = input.dim() - len(sides) in (1, 2)
    return batched and all(0 <= low <= n and 0 <= high <= n for n, (low, high) in zip(sizes, sides, strict=True))


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, sides: Sides) -> Tensor:
        ctx.sides = sides
        return _pad(input, sides)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return _Fold.apply(grad_outputs[0], ctx.sides), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _pad(tangents[0], ctx.sides)


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, sides: Sides) -> Tensor:
        ctx.sides = sides
        return _fold(gradient, sides)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return _Pad.apply(grad_outputs[0], ctx.sides), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return _fold(tangents[0], ctx.sides)


def _pad(input: Tensor, sides: Sides) -> Tensor:
    """[.., *n] -> [.., *(low + n + high)], in the input's layout."""
    if input.dim() != len(sides) + 2 or not suggests_channels_last(input):  # a volume without N may look like one
        return _by_pytorch(input, sides, "circular")
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


def _fold(gradient: Tensor, sides: Sides) -> Tensor:
    """[.., *(low + n + high)] -> [.., *n]: the adjoint of `_pad`."""
    if not sides:
        return gradient.clone()
    (low, high), *rest = sides
    d = gradient.dim() - len(sides)
    n = gradient.shape[d] - low - high
    result = _fold(gradient.narrow(d, low, n), tuple(rest))
    for start, length, read in ((0, low, n - low), (low + n, high, 0)):
        if length:
            result.narrow(d, read, length).add_(_fold(gradient.narrow(d, start, length), tuple(rest)))
    return result
