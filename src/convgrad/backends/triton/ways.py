"""Which compiled kernel a call runs, in a few words, and the smallest problem that runs the same one.

A kernel is trusted on a device after it was right there, and it is another kernel when its lanes are other neighbours,
its vectors are as wide as another alignment allows, or its offsets have 64 bits. Nothing here needs triton.
"""

from __future__ import annotations

from math import gcd
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...problem import ConvProblem
from .channel_tiles import patch_of
from .geometry import geometry, needs_wide
from .operands import channel_last, ready, result_like, sum_lanes
from .patch_tiles import aligned, patch
from .tiles import Use

__all__ = ["Way", "like", "padded", "tiny", "way_of"]


class Way(NamedTuple):
    """What tells kernels for one pass and dtype apart.

    Args:
        lanes: the neighbours that a program computes together: in patches, or in rows of lanes.
        columns: of a patch: values that are stored together; of a sequence's patch of channels: positions.
        vector: values of the source that are loaded together.
        pieces: a program takes pieces of one long row.
        whole: for patches as wide as a row, the narrower of the vectors into which rows of source and result fall.
        sequence: the channels of a 1-D problem are neighbours, and those of its result are not.
    """

    lanes: Literal["patches", "columns", "patches of channels", "channels"]
    columns: int = 1
    vector: int = 1
    pieces: bool = False
    whole: int = 0
    sequence: bool = False
    strided: bool = False
    multiplied: bool = False
    deep: bool = False
    wide: bool = False


def way_of(problem: ConvProblem, what: str, a: Tensor, b: Tensor) -> Way:
    """The way of a pass of (a, b), or of ``"sweep"`` of (grad_output, input)."""
    sums = what in ("grad_weight", "sweep")
    use: Use = "sweep" if what == "sweep" else "sum" if sums else "result"
    source, centre = (b, a) if what == "grad_weight" else (a, b)
    given = [like(t) for t in ([source, centre] if sums else [source])]
    lanes = sum_lanes(problem, what == "sweep", *given) if sums else channel_last(problem, *given)
    given = [ready(problem, t, lanes) for t in given]
    adjoint = what in ("grad_input", "sweep")
    g = geometry(problem, adjoint=adjoint, channel_lanes=lanes, wide=needs_wide(*given))
    known = {
        "strided": any(s > 1 for s in problem.stride),
        "multiplied": problem.out_channels > problem.in_channels,
        "deep": g.axes[0].kernel > 1,
        "wide": g.wide,
    }
    if lanes:
        known["sequence"] = problem.ndim == 1
        shape = problem.input_shape if adjoint else problem.output_shape
        out = None if use == "sum" else result_like(problem, shape)
        found = patch_of(g, use, out, *given)
        if found is None:
            return Way("channels", **known)
        return Way("patches of channels", max(1, found.together), found.vector, **known)
    columns = [aligned(g, t) for t in given[1:]]
    if use != "sum":
        shape = problem.input_shape if adjoint else problem.output_shape
        columns.append(aligned(g, torch.empty(shape, dtype=problem.dtype, device="meta")))
    chosen = patch(g, use, aligned(g, given[0]), gcd(*columns))
    if chosen is None:
        return Way("columns", **known)
    whole = min(chosen.whole) if chosen.whole else 0
    return Way("patches", chosen.columns, chosen.vector, chosen.sequence, whole, **known)


def like(t: Tensor) -> Tensor:
    """A tensor of the same strides without memory."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


# ---- the smallest problem --------------------------------------------------------------------------

_PIECES = 105  # patches of a row that is taken in pieces
_LONG = 17  # of a row of narrow vectors that is too long to be taken whole


def tiny(what: str, dtype: torch.dtype, way: Way, kernel: tuple[int, int] = (3, 3)) -> ConvProblem:
    """Odd sizes, more rows and channels than one tile has, uneven padding; for "patches" rows of that alignment.

    Args:
        kernel: rows and columns, where the way does not need others.
    """
    layout = torch.contiguous_format
    stride = 2 if way.strided else 1
    adjoint = what in ("grad_input", "sweep")
    if way.lanes in ("columns", "channels"):  # what patches do not take
        kernel = (9, 7) if way.lanes == "columns" or what != "sweep" else kernel
        stride = 3 if way.lanes == "columns" and what == "sweep" else stride
    if way.lanes == "patches of channels":  # few positions leave registers for the widest vectors
        kernel = (1, 1) if way.deep else (2, 2)
    if way.lanes == "channels" and way.sequence and not way.multiplied:
        kernel = (1, 51)
    if way.whole:
        columns = _short(kernel[1], stride, adjoint, way)
    elif way.lanes == "patches":
        times = _PIECES if way.pieces else _LONG if way.columns < 4 else 5
        columns = padded(kernel[1], stride, adjoint, way.columns, way.vector, times)
    elif way.sequence:
        columns = padded(kernel[1], stride, adjoint, way.columns, 1, 8 * kernel[1] + 1)
    else:
        columns = _sized(37, kernel[1], stride, (2, 0))
    found = [_sized(19, kernel[0], stride, (1, 1)), columns]
    kernels = list(kernel)
    if way.pieces or way.sequence:
        found, kernels = [columns], [kernel[1]]
    elif "channels" in way.lanes:
        layout = torch.channels_last
    strides = [stride] * len(found)
    if way.deep:
        found.insert(0, _sized(3, 2, stride if way.lanes == "channels" else 1, (1, 0)))
        kernels.insert(0, 2)
        strides.insert(0, stride if way.lanes == "channels" else 1)
        layout = torch.channels_last_3d if layout == torch.channels_last else layout
    sizes, pads, outs = zip(*found, strict=True)
    channels, dilation = 5 * way.vector if way.lanes == "patches of channels" else 5, (1,) * len(found)
    return ConvProblem(
        *(2, channels, channels * (2 if way.multiplied else 1), channels),
        *(sizes, tuple(kernels), tuple(strides), pads, dilation, outs, dtype, layout),
    )


#: Length of the input, padding, length of the output.
Length = tuple[int, tuple[int, int], int]


def _sized(size: int, kernel: int, stride: int, padding: tuple[int, int]) -> Length:
    return size, padding, (size + sum(padding) - kernel) // stride + 1


def _short(kernel: int, stride: int, adjoint: bool, way: Way) -> Length:
    """A row that is taken whole: the longest that falls into vectors so narrow, and into no wider ones."""
    results, sources = (n - (way.whole if n > 2 * way.whole else 0) for n in (way.columns, way.vector))
    size, out = (results, sources) if adjoint else (sources, results)
    padding = (out - 1) * stride + kernel - size
    low = min(kernel - 1, max(1, padding))
    return size, (low, padding - low), out


def padded(kernel: int, stride: int, adjoint: bool, columns: int, vector: int, times: int) -> Length:
    """A row whose results fall into vectors of ``columns`` and no wider ones, and the source's into ``vector``."""
    results = columns * times
    wanted = -(-results // stride) if adjoint else results * stride
    sources = vector * (wanted // vector | 1)
    size, out = (results, sources) if adjoint else (sources, results)
    padding = (out - 1) * stride + kernel - size
    low = min(kernel - 1, max(1, padding))
    return size, (low, padding - low), out
