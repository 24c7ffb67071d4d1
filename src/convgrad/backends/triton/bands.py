"""Shapes of the tiles of `banded`: plain integers, without triton."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from ...problem import ConvProblem
from .geometry import Geometry, geometry
from .tiles import Use

#: Kernels narrower than this are mostly zeros in a band.
LEAST_COLUMNS = 9
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
        """The kernel's arguments."""
        return dict(zip(("R", "BN", "J", "BV", "BW"), self, strict=False))


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _rows(g: Geometry, items: int) -> tuple[int, int]:
    """Rows of one image and images of a tile of about ``items`` rows: few rows of many images skip more padding."""
    height = _power_of_2(g.axes[1].result)
    images = _power_of_2(g.batch * g.axes[0].result)
    rows = min(height, 8)
    images = min(images, items // rows)
    rows = min(height, items // images)
    return max(rows, 16 // images), images


def choose(g: Geometry, use: Use) -> Band:
    """The tile, no larger than the problem: smaller for float32, whose operands are."""
    wide, small = g.axes[2].result > 32, g.itemsize == 4
    if use == "result":
        items, most, depth, kept = (256, 64, 32, 32) if wide and not small else (128, 64 if wide else 32, 32, 32)
        warps = 8 if wide or not small else 4
    else:
        items, most, depth, kept = (64, 64, 32, 64) if wide else (64, 32, 32, 64 if small else 128)
        warps = 4 if wide and not small else 8
    rows, images = _rows(g, items)
    width = min(most, max(8, _power_of_2(g.axes[2].result)))
    depth = min(depth, max(8, _power_of_2(g.axes[2].source)))
    taps = max(1, kept // depth)
    if use == "result":  # what it is multiplied with needs no more kernel rows than there are
        taps = max(min(taps, _power_of_2(g.axes[1].kernel)), 16 // depth)
    elif depth < 16:
        taps = min(taps, 8)
    return Band(rows, images, taps, depth, width, warps if width > 16 else min(warps, 4))


def parts(g: Geometry, band: Band) -> int:
    """Parts into which a sum over batch and rows is cut, so that the programs fill a large GPU."""
    images, rows = g.batch * g.axes[0].result, g.axes[1].result
    tiles = -(-images // band.images) * -(-rows // band.rows)
    return max(1, min(tiles, _PROGRAMS // programs(g, "sum", band, 1)))


def programs(g: Geometry, use: Use, band: Band, count: int) -> int:
    """Size of the grid."""
    if use == "sum":
        return g.channels * g.axes[0].kernel * -(-g.axes[1].kernel // band.taps) * count
    depth, height, width = (axis.result for axis in g.axes)
    blocks = -(-(g.batch * depth) // band.images) * -(-height // band.rows) * -(-width // band.width)
    return blocks * g.channels


def partial_values(problem: ConvProblem) -> int:
    """Values of the partial sums."""
    g = geometry(problem, adjoint=False)
    count = parts(g, choose(g, "sum"))
    return count * g.channels * g.kernel_elements if count > 1 else 0


def align(length: int, itemsize: int) -> int:
    """Elements, 16 bytes at most, of which a length is a multiple."""
    return gcd(length, 16 // itemsize)
