"""Shapes of the tiles of `banded`: plain integers, without triton."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from ...problem import ConvProblem
from .sliding_sum import Geometry, geometry
from .tiles import Use

#: Kernels narrower than this are mostly zeros in a band.
LEAST_COLUMNS = 9
#: The diagonals of a sum: with more of them ptxas spills hundreds of bytes, and takes minutes.
MOST_IN_A_SUM = 64
_PROGRAMS = 132 * 4  # programs that fill a large GPU


class Band(NamedTuple):
    """A tile of [images * rows, width] results, ``taps`` kernel rows and ``depth`` source columns at a time."""

    rows: int
    images: int
    taps: int
    depth: int
    width: int
    warps: int

    def constants(self) -> dict[str, int]:
        """Return the kernel's arguments."""
        return dict(zip(("R", "BN", "J", "BV", "BW"), self, strict=False))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def choose(g: Geometry, use: Use) -> Band:
    """Return the tile, no larger than the problem: smaller for float32, whose operands are."""
    depths, height, width = g.axes
    wide, small = width.result > 32, g.itemsize == 4
    if use == "result":
        items, most, depth, kept = (256, 64, 32, 32) if wide and not small else (128, 64 if wide else 32, 32, 32)
        warps = 8 if wide or not small else 4
    else:
        items, most, depth, kept = (64, 64, 32, 64) if wide else (64, 32, 32, 64 if small else 128)
        warps = 4 if wide and not small else 8
    # Few rows of many images skip more padding.
    rows = min(_power_of_2(height.result), 8)
    images = min(_power_of_2(g.batch * depths.result), items // rows)
    rows = max(min(_power_of_2(height.result), items // images), 16 // images)
    columns = min(most, max(8, _power_of_2(width.result)))
    depth = min(depth, max(8, _power_of_2(width.source)))
    taps = max(1, kept // depth)
    if use == "result":  # what it is multiplied with needs no more kernel rows than there are
        taps = max(min(taps, _power_of_2(height.kernel)), 16 // depth)
    elif depth < 16:
        taps = min(taps, 8)
    return Band(rows, images, taps, depth, columns, warps if columns > 16 else min(warps, 4))


def parts(g: Geometry, band: Band) -> int:
    """Return into how many parts a sum over batch and rows is cut, so that the programs fill a large GPU."""
    tiles = -(-(g.batch * g.axes[0].result) // band.images) * -(-g.axes[1].result // band.rows)
    return max(1, min(tiles, _PROGRAMS // programs(g, "sum", band, 1)))


def programs(g: Geometry, use: Use, band: Band, count: int) -> int:
    """Return the size of the grid."""
    if use == "sum":
        return g.channels * g.axes[0].kernel * -(-g.axes[1].kernel // band.taps) * count
    depth, height, width = (axis.result for axis in g.axes)
    blocks = -(-(g.batch * depth) // band.images) * -(-height // band.rows) * -(-width // band.width)
    return blocks * g.channels


def partial_values(problem: ConvProblem) -> int:
    """Return the number of partial sums."""
    g = geometry(problem, adjoint=False)
    count = parts(g, choose(g, "sum"))
    return count * g.channels * g.kernel_elements if count > 1 else 0


def align(length: int, itemsize: int) -> int:
    """Return the number of elements, 16 bytes at most, of which a length is a multiple."""
    return gcd(length, 16 // itemsize)
