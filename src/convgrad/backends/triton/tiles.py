"""The patch of a thread and the tile of a program: one model for all passes and both memory formats, without triton.

Of the patches up to a size, the one with the fewest instructions per result, by an estimate, is taken. The sizes were
measured on an H100: patches of about 16 results leave enough registers for other programs beside, so that more
loads are in flight, and are compiled in seconds; Triton's passes take a time that grows with the square of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd, prod
from typing import Literal, NamedTuple

from ...problem import INT32_MAX, ConvProblem, Outputs
from .sliding_sum import Geometry, geometry, read

#: ``result``: forward or grad_input, ``sum``: grad_weight, ``sweep``: both gradients.
Use = Literal["result", "sum", "sweep"]

_VECTOR = 16  # bytes
_LANES = 128  # of a program
_LINE = 32  # vectors of channels that a program owns: neighboring threads have neighboring ones
_MOST_KEPT = 49  # kernel positions whose weights or sums a thread keeps: 7 x 7
_MOST_ROWS = 4
_MOST_COLUMNS = 8
_MOST_IN_A_SEQUENCE = 16  # columns, where there is one row
_MOST_RESULTS = 32
_MOST_PRODUCTS = 800  # that one program unrolls; half as many in channels_last, where there are more loads between
_ROOM = 106  # registers for sums, weights, results and a row of the source
_LARGE_ROOM = 146  # of a sweep that has no tile otherwise; a thread then takes up to 203 registers
_LEAST_IN_LARGE = 16  # results of a patch of a sweep in the large room
_PER_LOAD = 6  # instructions: its address, its mask, the zeros it may leave
_PER_PATCH = 100  # for where a patch lies
_ENOUGH = 6 * 132 * 32  # threads: with fewer of them a large GPU would wait for its memory
_TILES = 4  # that a program of results computes, where there are enough: its weights are loaded once
#: Programs of a sum, at most: each leaves partial sums to be added. Fewer run where a GPU has no room for as many.
MOST_PROGRAMS = 1024


def use_of(outputs: Outputs) -> Use:
    """Return what computes these outputs."""
    return "sweep" if len(outputs) > 1 else "sum" if outputs == ("grad_weight",) else "result"


class Tile(NamedTuple):
    """R rows of W columns of V channels a thread, in vectors of U loaded and S stored columns; lanes of a program."""

    rows: int
    columns: int
    vector: int
    loaded: int
    stored: int
    line: int
    lanes: int

    def constants(self) -> dict[str, int]:
        """The kernel's arguments."""
        return dict(zip(("R", "W", "V", "U", "S", "LINE", "B"), self, strict=True))


@lru_cache(maxsize=4096)
def choose(g: Geometry, use: Use) -> Tile | None:
    """Return the tile, of vectors as wide as rows allow, or None where a thread has too few registers."""
    depth, height, width = g.axes
    if height.kernel * width.kernel * (depth.kernel if use != "result" else 1) > _MOST_KEPT:
        return None
    tiles = list(_shapes(g, use, _ROOM, _MOST_PRODUCTS))
    if not tiles and use == "sweep" and not g.channels_last:
        # 7x7: a sixth fewer instructions than two passes, which read two operands more (docs/gpu.md). Smaller patches
        # have no fewer, and those with masks for columns or products spill.
        large = _shapes(g, use, _LARGE_ROOM, 2 * _MOST_PRODUCTS)
        tiles = [t for t in large if t.rows * t.columns >= _LEAST_IN_LARGE and t.loaded > 1 and exact(g, t)]
    return min(tiles, key=lambda tile: _cost(g, use, tile), default=None)


def exact(g: Geometry, tile: Tile) -> bool:
    """Return whether every row and column of every patch exists."""
    _, height, width = g.axes
    return height.result % tile.rows == 0 and width.result % tile.columns == 0


def _shapes(g: Geometry, use: Use, room: int, most_products: int) -> Iterator[Tile]:
    _, height, width = g.axes
    widest = _VECTOR // g.itemsize
    # Two channels; in a sweep of float32, which keeps twice as much, one.
    two = g.channels_last and g.channels % 2 == 0 and (use != "sweep" or g.itemsize == 2)
    vectors = (2, 1) if two else (1,)
    loaded, stored = (1, 1) if g.channels_last else (gcd(widest, width.source), gcd(widest, width.result))
    # One vector of a row, where rows have whole ones.
    most = widest if loaded == stored == widest else _MOST_COLUMNS
    most = _MOST_IN_A_SEQUENCE if height.result == 1 and not g.channels_last else most
    unrolled = most_products // 2 if g.channels_last else most_products
    for rows in range(1, min(height.result, _MOST_ROWS) + 1):
        for columns in range(1, min(width.result, most) + 1):
            if not height.begins(rows) or not width.begins(columns):
                continue
            u = loaded
            if columns < width.result:  # patches begin at multiples of what they take of the source
                u = gcd(loaded, columns // width.stride if g.adjoint else columns * width.stride)
            for v in vectors:
                tile = _fit(g, Tile(rows, columns, v, u, gcd(stored, columns), 1, _LANES))
                results = rows * columns * v
                brief = results <= _MOST_RESULTS and rows * columns * _products(g, use) <= unrolled
                fits = brief and _registers(g, use, tile) <= room
                least = results == 1 and use != "sweep"
                if (fits or least) and _items(g, tile) * tile.line <= INT32_MAX - _LANES:
                    yield tile


def _fit(g: Geometry, tile: Tile) -> Tile:
    """A line of channels with few idle lanes, and no more lanes than there are patches."""
    line, lanes, channels = 1, tile.lanes, g.channels // tile.vector
    if g.channels_last:
        line = next(n for n in (_LINE, 16, 8, 4, 2, 1) if -(-channels // n) * n <= channels * 6 // 5)
    while lanes > max(line, 32) and lanes // 2 >= _items(g, tile) * line:
        lanes //= 2
    return tile._replace(line=min(line, lanes), lanes=lanes)


def _loads(g: Geometry, tile: Tile) -> int:
    """Vectors of the source in one row of a patch."""
    width = g.axes[2]
    columns = read(width, tile.columns)
    return columns if tile.loaded == 1 else min(columns, -(-columns // tile.loaded) + 1)


def _products(g: Geometry, use: Use) -> float:
    """Products of one result, on average."""
    stride = prod(axis.stride for axis in g.axes[1:]) if g.adjoint else 1
    return g.kernel_elements * (2 if use == "sweep" else 1) / stride


def _registers(g: Geometry, use: Use, tile: Tile) -> float:
    depth, height, width = g.axes
    values, plane = tile.rows * tile.columns, height.kernel * width.kernel
    sums = plane * depth.kernel
    kept = {"result": plane + values, "sum": sums + values, "sweep": 2 * (sums + values)}[use]
    return tile.vector * (kept + _loads(g, tile) * tile.loaded)


def _cost(g: Geometry, use: Use, tile: Tile) -> float:
    """Instructions for one result, longer where there are too few threads to fill a large GPU."""
    depth, height, width = g.axes
    values, conversion = tile.rows * tile.columns, 1 if g.itemsize == 2 else 0
    each = tile.vector * max(tile.loaded, tile.stored)
    loads = depth.kernel * read(height, tile.rows) * _loads(g, tile)
    loads += values // tile.stored * {"result": 1, "sum": 1, "sweep": 2}[use]
    products = values * tile.vector * _products(g, use)
    if use != "result" and not exact(g, tile):
        products *= 2  # each may have to be left out
    weights = g.kernel_elements * tile.vector / _TILES if use == "result" else 0
    work = products + (loads + weights) * (_PER_LOAD + conversion * each) + _PER_PATCH
    patches = -(-height.result // tile.rows) * -(-width.result // tile.columns)
    threads = g.channels // tile.vector * g.batch * depth.result * patches
    return work * patches / (height.result * width.result * tile.vector) * max(1.0, _ENOUGH / threads)


def _items(g: Geometry, tile: Tile) -> int:
    """Patches of a channel, or of a vector of channels."""
    depth, height, width = g.axes
    return g.batch * depth.result * -(-height.result // tile.rows) * -(-width.result // tile.columns)


def lines(g: Geometry, tile: Tile) -> int:
    """Lines of channels, each of which some programs share."""
    return -(-(g.channels // tile.vector) // tile.line)


def parts(g: Geometry, use: Use, tile: Tile, programs: int) -> int:
    """Programs for a line of channels, with as many tiles each, on a GPU that runs so many ``programs`` at once."""
    tiles = -(-_items(g, tile) // (tile.lanes // tile.line))
    if use == "result":
        each = min(_TILES, max(1, tiles * lines(g, tile) // programs))
    else:
        each = -(-tiles // max(1, min(programs, MOST_PROGRAMS) // lines(g, tile)))
    return -(-tiles // each)


def partial_values(problem: ConvProblem, use: Use, with_bias: bool) -> int:
    """Values of the partial sums, at most."""
    g = geometry(problem, adjoint=use == "sweep")
    tile = choose(g, use)
    count = parts(g, use, tile, MOST_PROGRAMS) if tile else 1
    return count * g.channels * (g.kernel_elements + with_bias) if count > 1 else 0
