"""Shapes of the tiles of `banded`, and where a band is worth it; plain integers, without triton.

**No figure here was measured on a GPU.** The rates compare instructions counted in compiled loops (see docs/gpu.md)
with those of the kernels that multiply one by one, less two fifths for barriers and waiting, which nobody has timed.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from ...problem import ConvProblem
from .geometry import Geometry, geometry
from .patch_tiles import KEPT

__all__ = ["LEAST_COLUMNS", "Band", "Precision", "advantage", "align", "candidates", "fixed", "parts", "share_elements"]

#: ``result``: `banded.correlate`, ``sum``: `banded.correlate_sum`.
Use = Literal["result", "sum"]
#: How float32 operands are multiplied: Triton's words. 16-bit operands are multiplied exactly, whatever it says.
Precision = Literal["ieee", "tf32", "tf32x3"]

#: Kernels narrower than this are mostly zeros in a band.
LEAST_COLUMNS = 9

_PROGRAMS = 132 * 4  # programs that fill a large GPU
#: Products of a band in the time of one product of the kernels without tensor cores, on Hopper.
_RATE = {"16 bits": 12.0, "tf32": 8.0, "tf32x3": 2.5, "ieee": 1.0}
#: What is left of it where the other way is by patches, which take less than half of the instructions.
_OVER_PATCHES = 0.45
#: What is left of it where rows begin at multiples of so many bytes: narrower loads are more of them.
_LOADED = {16: 1.0, 8: 0.85, 4: 0.7, 2: 0.5}


class Band(NamedTuple):
    """A tile of [images * rows, width] results, ``taps`` kernel rows and ``depth`` source columns at a time."""

    rows: int
    images: int
    taps: int
    depth: int
    width: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """The kernel's arguments, as a launch takes them."""
        names = ("R", "BN", "J", "BV", "BW", "num_warps", "num_stages")
        return dict(zip(names, self, strict=True))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _rows(g: Geometry, items: int, least: int) -> tuple[int, int]:
    """Rows of one image and images of a tile of about ``items`` rows: few rows of many images skip more padding."""
    height = _power_of_2(g.axes[1].per_phase)
    images = _power_of_2(g.batch * g.axes[0].per_phase)
    rows = min(height, 8)
    images = min(images, items // rows)
    rows = min(height, items // images)
    return max(rows, least // images), images


class _Shape(NamedTuple):
    """What is wanted of a tile: rows of all images, result columns, source columns, those of all taps, warps."""

    items: int
    width: int
    depth: int
    kept: int
    warps: int


def _band(g: Geometry, use: Use, shape: _Shape) -> Band:
    """The tile of this shape, no larger than the problem."""
    rows, images = _rows(g, shape.items, 16)
    width = min(shape.width, max(8, _power_of_2(g.axes[2].result)))
    depth = min(shape.depth, max(8, _power_of_2(g.axes[2].source)))
    taps = max(1, shape.kept // depth)
    if use == "result":  # what it is multiplied with needs no more kernel rows than there are
        taps = max(min(taps, _power_of_2(g.axes[1].taps)), 16 // depth)
    elif depth < 16:
        taps = min(taps, 8)
    warps = shape.warps if width > 16 else min(shape.warps, 4)
    return Band(rows, images, taps, depth, width, warps, 2)


def fixed(g: Geometry, use: Use, precision: Precision) -> Band:
    """The tile that is used unless tuning is asked for."""
    return candidates(g, use, precision)[0]


def candidates(g: Geometry, use: Use, precision: Precision) -> list[Band]:
    """The fixed tile first, then neighbours. Those of float32 are smaller: three products of it keep six operands."""
    wide = g.axes[2].result > 32
    small, split = g.itemsize == 4, precision == "tf32x3"
    if use == "result":
        if split:
            shapes = [_Shape(64, 32, 32, 32, 4), _Shape(128, 32, 16, 16, 4), _Shape(64, 32, 16, 16, 4)]
        elif small:
            shapes = [_Shape(128, 32, 32, 32, 4), _Shape(128, 64, 32, 32, 8), _Shape(128, 32, 16, 16, 4)]
        else:
            shapes = [_Shape(256, 64, 32, 32, 8), _Shape(128, 32, 32, 32, 8), _Shape(256, 32, 32, 32, 4)]
            shapes = shapes if wide else shapes[1:]
    elif split:
        shapes = [_Shape(32, 32, 32, 64, 4), _Shape(16, 32, 32, 64, 4), _Shape(16, 32, 32, 128, 8)]
    elif small:
        shapes = [_Shape(64, 64, 32, 64, 8), _Shape(64, 32, 32, 64, 8), _Shape(64, 32, 32, 64, 4)]
        shapes = shapes if wide else shapes[1:]
    else:
        shapes = [_Shape(64, 64, 32, 64, 4), _Shape(64, 32, 32, 128, 8), _Shape(64, 32, 32, 128, 4)]
        shapes = shapes if wide else shapes[1:]
    return list(dict.fromkeys(_band(g, use, shape) for shape in shapes))


def parts(g: Geometry, band: Band) -> int:
    """Shares into which a sum over batch and rows is cut, so that the programs fill a large GPU."""
    depth, height, _ = g.field("kernel")
    programs = g.channels * depth * -(-height // band.taps)
    images, rows = g.batch * g.axes[0].result, g.axes[1].result
    tiles = -(-images // band.images) * -(-rows // band.rows)
    return max(1, min(tiles, _PROGRAMS // programs, 1024))


def share_elements(problem: ConvProblem) -> int:
    """Values in the shares of a sum, however operands are multiplied."""
    g = geometry(problem, adjoint=False, channel_lanes=False)
    ways: tuple[Precision, ...] = ("ieee", "tf32", "tf32x3")
    count = max(parts(g, fixed(g, "sum", way)) for way in ways)
    return count * g.channels * g.kernel_elements if count > 1 else 0


def align(lengths: tuple[int, ...], itemsize: int) -> int:
    """Elements, 16 bytes at most, of which all these lengths are multiples."""
    elements = 16 // itemsize
    while any(n % elements for n in lengths):
        elements //= 2
    return elements


def advantage(problem: ConvProblem, precision: Precision) -> float:
    """How many times faster than the kernels without tensor cores a band is expected to be; a model."""
    g = geometry(problem, adjoint=False, channel_lanes=False)
    band, width = fixed(g, "result", precision), g.axes[2]
    blocks = -(-width.result // band.width)
    span = (band.width - 1) * width.stride + (width.kernel - 1) * width.dilation + 1
    columns = blocks * band.width * min(span + band.depth // 2, -(-width.source // band.depth) * band.depth)
    images, rows = g.batch * g.axes[0].result, g.axes[1].result
    tiles = -(-images // band.images) * -(-rows // band.rows)
    used = images * rows / (tiles * band.images * band.rows)
    chunks = -(-g.axes[1].kernel // band.taps) * band.taps / g.axes[1].kernel
    half = problem.dtype in (torch.float16, torch.bfloat16)
    rate = _RATE["16 bits" if half else precision]
    rate *= _LOADED[align((width.source, width.result), problem.dtype.itemsize) * problem.dtype.itemsize]
    if g.axes[1].kernel * width.kernel <= KEPT:
        rate *= _OVER_PATCHES
    return rate * width.result * width.kernel / (columns * chunks) * used


def programs(g: Geometry, use: Use, shares: int, tile: dict[str, int]) -> int:
    """Size of the grid."""
    if use == "sum":
        depth, height, _ = g.field("kernel")
        return g.channels * depth * -(-height // tile["J"]) * shares
    depth, height, _ = g.field("per_phase")
    blocks = -(-(g.batch * depth) // tile["BN"]) * -(-height // tile["R"]) * -(-g.axes[2].result // tile["BW"])
    return blocks * g.channels * math.prod(axis.phases for axis in g.axes[:2])
