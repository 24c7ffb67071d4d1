"""Tensors as the kernels take them: which elements are neighbours in memory, and a copy where none are.

Nothing here needs triton.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ...problem import ConvProblem
from .tiles import UNROLLED_CHANNELS

__all__ = ["channel_lanes", "channel_last", "filter_of", "planes", "ready", "result_like", "sum_lanes"]


def _neighbours(t: Tensor, dim: int) -> bool:
    """Whether elements along a dimension lie next to each other, or are all the same one."""
    return t.shape[dim] == 1 or t.stride(dim) in (0, 1)


def _lane_dim(problem: ConvProblem, channel_lanes: bool) -> int:
    """The dimension along which lanes run: channels, or the last one that has a length."""
    if channel_lanes:
        return 1
    sizes = zip(problem.input_size, problem.output_size, problem.kernel_size, strict=True)
    long = [i for i, lengths in enumerate(sizes) if lengths != (1, 1, 1)]
    return 2 + long[-1] if long else 1 + problem.ndim


def ready(problem: ConvProblem, t: Tensor, channel_lanes: bool) -> Tensor:
    """The tensor itself where its lanes are neighbours in memory, else a copy."""
    if _neighbours(t, _lane_dim(problem, channel_lanes)):
        return t
    if not channel_lanes:
        return t.contiguous()
    if problem.ndim == 1:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.contiguous(memory_format=torch.channels_last if problem.ndim == 2 else torch.channels_last_3d)


def planes(problem: ConvProblem, t: Tensor) -> Tensor:
    """The tensor itself where its columns follow each other in memory, else a copy."""
    dim = _lane_dim(problem, False)
    return t if t.shape[dim] == 1 or t.stride(dim) == 1 else t.contiguous()


def channel_lanes(problem: ConvProblem, *operands: Tensor) -> bool:
    """Lanes of a sum, whose result has no layout: channels where all the operands have their channels together."""
    lane = _lane_dim(problem, False)
    if all(_neighbours(t, lane) for t in operands):
        return problem.channels_last and all(_neighbours(t, 1) for t in operands)
    return problem.channels_last or all(_neighbours(t, 1) for t in operands)


def channel_last(problem: ConvProblem, *operands: Tensor) -> bool:
    """Lanes of a pass whose result is contiguous: channels where all operands are sequences of strides (L*C, 1, C).

    The result's elements of one position then lie apart. Each program writes some positions of a channel that follow
    each other; a copy of the operands would read, or write, as far apart, and pass through memory once more.
    """
    if problem.channels_last:
        return True
    return problem.ndim == 1 and all(t.shape[1] > 1 and t.stride(1) == 1 and t.stride(2) > 1 for t in operands)


def sum_lanes(problem: ConvProblem, sweep: bool, source: Tensor, centre: Tensor) -> bool:
    """Whether lanes of a sum are channels."""
    if not sweep:
        return channel_lanes(problem, source, centre)
    if prod(problem.kernel_size) > UNROLLED_CHANNELS:  # too many sums for lanes of channels; see `against_sweep`
        return problem.channels_last
    return channel_last(problem, source, centre)


def result_like(problem: ConvProblem, shape: tuple[int, ...]) -> Tensor:
    """What a result will be, without memory: its strides are those of the problem's layout."""
    return torch.empty(shape, dtype=problem.dtype, device="meta", memory_format=problem.memory_format)


_LANES_LAST = {ndim: (*range(2, 2 + ndim), 1, 0) for ndim in (1, 2, 3)}


def filter_of(weight: Tensor, channel_lanes: bool) -> Tensor:
    """The weight with its lanes together: [C, 1, *k] in order, or [*k, 1, C]."""
    if channel_lanes:
        return weight.permute(_LANES_LAST[weight.dim() - 2]).contiguous()
    return weight.contiguous()  # [C, 1, *k] has the same strides in every format
