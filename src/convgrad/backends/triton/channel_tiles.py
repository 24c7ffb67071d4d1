"""The shape of a patch of channels: what a thread of `channel_patches` and `channel_sums` takes, or none.

Every shape that a thread has registers for is given a number of instructions per result, and the least one is taken.
**No figure behind it was measured on a GPU**: both estimates are fitted to what ptxas makes for sm_90. Nothing here
needs triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import gcd, prod
from typing import Any, NamedTuple

from torch import Tensor

from ...problem import INT32_MAX, ConvProblem
from .geometry import Axis, Geometry, geometry, view_5d
from .patch_tiles import warps_of
from .tiles import Use

__all__ = [
    "ChannelPatch",
    "aligned",
    "aligned_positions",
    "candidates",
    "channel_patch",
    "constants",
    "parts",
    "patch_of",
    "period",
    "programs",
    "share_elements",
    "shares",
]

_VECTOR = 16  # bytes
_LANES = 128  # of a program
_LINE = 32  # vectors of channels that a program takes one after the other: a warp has one of each, nothing to add
_WARPS = 12 * 132  # what 168 registers a thread allow on a large GPU; a sum has no more
_ENOUGH = 6 * 132 * 32  # threads: with fewer of them a large GPU would wait for its memory
_KEPT = 49  # kernel positions whose sums or weights a thread keeps: 7 x 7
_UNROLLED = 2048  # products that one program may hold: more would not fit into the instruction cache
_MOST_ROWS = 16
_MOST_COLUMNS = 8
_ROOM = 175  # registers for sums, weights, results and a row of the source
_ROOM_STRIDED = 125
_ROOM_DEEP = {"result": 175, "sum": 90, "sweep": 120}  # with a depth, whose loads all begin at once in a sum
_MOST_SUMS = 80  # more of them, and ptxas spills because it begins too many loads at once
_AT_ONCE = 440  # registers for loads, sums and results of a thread on AMD
_AT_ONCE_DEEP = 230  # the same for sums with a depth, on any chip
_PER_LOAD = 5  # instructions of a load beside the conversion: its address, its mask, the zeros it may leave
_PER_PATCH = 100  # for where a patch lies


class ChannelPatch(NamedTuple):
    """R rows of W columns of V channels a thread; a program's lanes, in lines of neighbouring vectors of channels.

    ``together`` positions of a channel are stored by one instruction where the result is contiguous; else it is 0.
    """

    rows: int
    columns: int
    vector: int
    together: int
    line: int
    lanes: int
    warps: int


def aligned(g: Geometry, tensor: Tensor) -> int:
    """Channels in the widest vectors into which those of every position fall; none where they are no neighbours."""
    n, c, *space = view_5d(g, tensor)
    sizes = [tensor.shape[2 + i] if i >= 0 else 1 for i in g.kept]
    if tensor.shape[1] > 1 and c != 1:
        return 0
    steps = [s for s, size in zip((n, *space), (tensor.shape[0], *sizes), strict=True) if size > 1]
    return gcd(_VECTOR // g.itemsize, tensor.shape[1], *steps)


def aligned_positions(g: Geometry, tensor: Tensor) -> int:
    """The same for the positions of a contiguous sequence's channels."""
    return gcd(_VECTOR // g.itemsize, tensor.shape[-1])


def patch_of(g: Geometry, use: Use, out: Tensor | None, *operands: Tensor) -> ChannelPatch | None:
    """A patch for these operands and this result, of which a contiguous one is for sequences only."""
    together = 0
    if out is not None and out.shape[1] > 1 and out.stride(1) > 1:
        together = aligned_positions(g, out)
    elif out is not None:
        operands = (*operands, out)
    vectors = [aligned(g, t) for t in operands]
    return channel_patch(g, use, gcd(*vectors) if all(vectors) else 0, together)


@lru_cache(maxsize=4096)
def channel_patch(g: Geometry, use: Use, vector: int, together: int) -> ChannelPatch | None:
    """A patch, or None where rows of lanes (`tiles`) are the way.

    Args:
        vector: channels that an aligned load or store of the operands and the result may have.
        together: positions that an aligned store may have where the result is contiguous, else 0.
    """
    depth, height, width = g.axes
    if not g.channel_lanes or not vector or g.multiplier > 1 or (g.adjoint and depth.stride > 1):
        return None
    if height.kernel * width.kernel * (1 if use == "result" else depth.kernel) > _KEPT:
        return None
    if g.batch * prod(g.field("result")) > INT32_MAX // 2:
        return None
    found = {shape: _instructions(g, use, *shape) for shape in _shapes(g, use, vector, together)}
    if not found:
        return None
    v = min(found, key=lambda shape: found[shape])[2]
    filled = {shape[:2]: n * _alone(g, *shape) for shape, n in found.items() if shape[2] == v}
    rows, columns = min(filled, key=lambda shape: filled[shape])
    return _fit(g, rows, columns, v, gcd(together, rows) if together else 0)


def _shapes(g: Geometry, use: Use, vector: int, together: int) -> Iterator[tuple[int, int, int]]:
    """Rows, columns and channels of the patches that a thread has registers for."""
    _, height, width = g.axes
    v = vector
    while v:
        for rows in range(1, min(height.result, _MOST_ROWS) + 1):
            for columns in range(1, min(width.result, _MOST_COLUMNS) + 1):
                if (
                    _falls(height, rows)
                    and _falls(width, columns)
                    and (not together or rows % gcd(together, height.result) == 0)
                    and _held(g, use, rows, columns, v) <= 1
                    and rows * columns * v * _products(g, use) <= _UNROLLED
                ):
                    yield rows, columns, v
        v //= 2


def _falls(axis: Axis, results: int) -> bool:
    """Whether patches of so many results begin where the source has a position."""
    return not axis.adjoint or results % axis.stride == 0 or results >= axis.result


def _reach(axis: Axis, results: int) -> int:
    """Positions of the source that some neighbouring results read."""
    if axis.adjoint:
        return (results - 1 + (axis.kernel - 1) * axis.dilation) // axis.stride + 1
    return (results - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1


@lru_cache(maxsize=4096)
def _read(axis: Axis, results: int) -> int:
    """How many of them are read: a dilated kernel leaves some out."""
    pairs = [(q, k * axis.dilation) for q in range(results) for k in range(axis.kernel)]
    if axis.adjoint:
        return len({q + axis.low - k for q, k in pairs if (q + axis.low - k) % axis.stride == 0})
    return len({q * axis.stride + k for q, k in pairs})


def _products(g: Geometry, use: Use) -> float:
    """Products of one result, on average."""
    stride = g.axes[1].stride * g.axes[2].stride if g.adjoint else 1
    return g.kernel_elements * (2 if use == "sweep" else 1) / stride


def _instructions(g: Geometry, use: Use, rows: int, columns: int, v: int) -> float:
    """An estimate for one result."""
    depth, height, width = g.axes
    conversion = 1 if g.itemsize == 2 else 0
    values = rows * columns
    loads = depth.kernel * _read(height, rows) * _read(width, columns)
    touched = loads + values * (2 if use == "sweep" else 1) + (g.kernel_elements if use == "result" else 0)
    work = values * v * _products(g, use) + touched * (conversion * v + _PER_LOAD) + _PER_PATCH
    patches = -(-height.result // rows) * -(-width.result // columns)
    if use != "result" and (height.result % rows or width.result % columns):  # a selection for every product
        work += values * v * _products(g, "sum")
    return work * patches / (height.result * width.result * v)


def _alone(g: Geometry, rows: int, columns: int, v: int) -> float:
    """How many times as long a patch takes because there are too few of them to fill a large GPU."""
    depth, height, width = g.field("result")
    threads = g.channels // v * g.batch * depth * -(-height // rows) * -(-width // columns)
    return max(1.0, _ENOUGH / threads)


def _held(g: Geometry, use: Use, rows: int, columns: int, v: int) -> float:
    """An estimate of a thread's registers, as a fraction of what it may have (fitted to ptxas for sm_90)."""
    depth, height, width = g.axes
    each = v * (2 if g.double else 1)
    deep = depth.kernel if use != "result" else 1
    sums = height.kernel * width.kernel * deep
    values = rows * columns
    row = _read(width, columns)
    room = _ROOM_DEEP[use] if depth.kernel > 1 else _ROOM
    if height.src_step * width.src_step > 1:  # more loads for each result, which begin as early
        room = min(room, _ROOM_STRIDED)
    held = each * ((values + sums) * (2 if use == "sweep" else 1) + row) / room
    # LLVM for AMD begins all loads of a patch at once; so does ptxas for those of several depths.
    begun = v * max(g.itemsize // 2, 1) / 2 * (_read(height, rows) * row * depth.kernel + values)
    most = max(held, (begun + each * (sums + values)) / (_AT_ONCE_DEEP if deep > 1 else _AT_ONCE))
    return most if use == "result" else max(most, each * sums / _MOST_SUMS)


def _fit(g: Geometry, rows: int, columns: int, v: int, together: int) -> ChannelPatch:
    """Lanes of a program, no more of them than there are patches."""
    # As many positions as channels in a warp where both directions should have lines of memory.
    line = min(8, _LINE) if together else _LINE
    chosen = ChannelPatch(rows, columns, v, together, line, _LANES, warps_of(_LANES, False))
    lanes = _LANES
    while lanes > line and lanes // 2 >= g.channels // v * _items(g, chosen):
        lanes //= 2
    return chosen._replace(lanes=lanes, warps=warps_of(lanes, False))


def _items(g: Geometry, chosen: ChannelPatch) -> int:
    """Patches of a vector of channels."""
    depth, height, width = g.field("result")
    return g.batch * depth * -(-height // chosen.rows) * -(-width // chosen.columns)


def period(g: Geometry, chosen: ChannelPatch) -> int:
    """The fewest patches whose vectors of channels fill lines."""
    return chosen.line // gcd(chosen.line, g.channels // chosen.vector)


def _blocks(g: Geometry, chosen: ChannelPatch) -> int:
    return g.channels // chosen.vector * period(g, chosen) // chosen.line


def _tiles(g: Geometry, chosen: ChannelPatch) -> int:
    return -(-_items(g, chosen) // (chosen.lanes // chosen.line * period(g, chosen)))


def programs(g: Geometry, chosen: ChannelPatch, parts: int, tile: Any) -> int:
    """Size of the grid; ``tile`` is anything with R and B."""
    chosen = chosen._replace(rows=tile["R"], lanes=tile["B"])
    return _blocks(g, chosen) * (parts or _tiles(g, chosen))


def parts(g: Geometry, chosen: ChannelPatch) -> int:
    """Parts into which a sum over batch and space is cut: as many tiles in each, and programs that fill a large GPU."""
    wanted = max(1, _WARPS // (chosen.warps * _blocks(g, chosen)))
    each = -(-_tiles(g, chosen) // wanted)
    return -(-_tiles(g, chosen) // each)


def shares(g: Geometry, chosen: ChannelPatch) -> int:
    """Shares of a sum: each part has one for every patch of a period."""
    return parts(g, chosen) * period(g, chosen)


def constants(g: Geometry, use: Use, chosen: ChannelPatch) -> dict[str, int]:
    """The kernel's arguments that follow from the patch, and that the tuner may vary."""
    depth, height, width = g.axes
    found = {
        "INSIDE_D": int(depth.kernel == 1 and depth.low == 0 and _inside(depth, 1) == 1),
        "INSIDE_H": _inside(height, chosen.rows),
        "INSIDE_W": _inside(width, chosen.columns),
        "EXACT": int(height.result % chosen.rows == 0 and (use == "result" or width.result % chosen.columns == 0)),
        "W": chosen.columns,
        "V": chosen.vector,
        "TOGETHER": max(1, chosen.together),
        "LINE": chosen.line,
        "R": chosen.rows,
        "B": chosen.lanes,
    }
    if use == "result":
        return {**found, "EXACT_W": int(width.result % chosen.columns == 0)}
    whole = _items(g, chosen) % (chosen.lanes // chosen.line * period(g, chosen)) == 0
    return {**found, "FULL": int(whole)}


def _inside(axis: Axis, results: int) -> int:
    """Positions of the source, from the one where a patch begins, that exist for every patch."""
    step = results // axis.stride if axis.adjoint else results * axis.stride
    last = (-(-axis.result // results) - 1) * step
    return max(0, min(axis.source - last, _reach(axis, results)))


def candidates(g: Geometry, use: Use, chosen: ChannelPatch) -> list[ChannelPatch]:
    """The chosen patch first, then neighbours with other rows and lanes."""
    found = [chosen]
    for lanes in (64, 256):
        found.append(chosen._replace(lanes=lanes, warps=warps_of(lanes, False)))
    for rows in (chosen.rows // 2, 1, 2, 4):
        if 0 < rows < chosen.rows and _falls(g.axes[1], rows) and not chosen.together:
            found.append(chosen._replace(rows=rows))
    return list(dict.fromkeys(found))[:6]


def share_elements(problem: ConvProblem, use: Use) -> int:
    """Values in the shares of a sum, at most: whatever the alignment of the operands turns out to be."""
    g = geometry(problem, adjoint=use == "sweep", channel_lanes=True)
    most = 0
    for vector in (1, 2, 4, 8):
        if g.channels % vector:
            break
        for together in (0, 1, 2, 4, 8) if problem.ndim == 1 and use == "sweep" else (0,):
            chosen = channel_patch(g, use, vector, together)
            if chosen is not None and (count := shares(g, chosen)) > 1:
                most = max(most, count * g.channels * (g.kernel_elements + 1))
    return most
