"""The shape of a patch: rows, columns and vectors that a thread of `patches` and `patch_sums` takes, or none.

Vectors are as wide as the alignment of rows in memory allows, 16 bytes at most. Where that is one value or two and rows
are short, a patch is as wide as a row: a program's threads load neighbouring values together, and exchange them so that
each has whole rows; nothing beside a row is read then, and no product with padding beside it is computed. Rows follow
from counting registers and unrolled products. **No figure behind it was measured on a GPU.** Nothing here needs triton.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any, NamedTuple

from torch import Tensor

from ...problem import INT32_MAX, ConvProblem
from .geometry import Axis, Geometry, geometry, view_5d
from .tiles import WARPS, Use

__all__ = [
    "KEPT",
    "Patch",
    "aligned",
    "candidates",
    "parts",
    "patch",
    "patches",
    "programs",
    "share_elements",
    "warps_of",
]

_VECTOR = 16  # bytes
_LANES = 128  # patches of a program
_PIECES = 4  # of a long row, that a program takes at most
KEPT = 49  # kernel positions whose sums or weights a thread keeps: 7 x 7
_UNROLLED = 2048  # products that one program may hold: more would not fit into the instruction cache
_MANY = 40  # sums and weights, of which ptxas takes more registers than they need
_MOST_DEPTHS = 3  # of a kernel's window: LLVM for AMD begins the loads of all of them at once, and would spill
_MOST_ROWS = 16
_PER_ROW = 12  # instructions for a row beside its values: masks, addresses, loads


_NARROW = 2  # values of the widest vectors: below that, rows are taken whole
_WIDEST = 16  # columns of such a row, at most: a thread has them all
_SMALL = 25  # kernel positions
_WHOLE_ROOM = 1.5  # of the registers and products of other patches: a few warps with whole planes are enough
_PLANE_ROOM = 2.2  # the same where a thread has all rows
_PREFETCHED = 32  # values of rows that a thread begins to load before it uses them


class Patch(NamedTuple):
    """R rows of V columns, read in vectors of U values; B patches a program; ``sequence``: R pieces of one row.

    Args:
        whole: for patches as wide as a row, the vectors into which rows of source and result fall; V and U are then the
            powers of 2 above the rows' lengths.
        plane: such a patch has all rows.
        ahead: rows that are loaded before the first is used.
    """

    rows: int
    columns: int
    vector: int
    lanes: int
    warps: int
    sequence: bool
    whole: tuple[int, int] | None = None
    plane: bool = False
    ahead: int = 0

    @property
    def units(self) -> tuple[int, int]:
        """Values of which the strides of source and result are multiples."""
        return self.whole or (self.vector, self.columns)

    def constants(self) -> dict[str, Any]:
        """The kernel's arguments that the tuner may vary."""
        return {"R": self.rows, "B": self.lanes}


def warps_of(lanes: int, amd: bool) -> int:
    """Warps that have a thread for each patch of a program; AMD's have 64 threads."""
    return max(1, lanes // (64 if amd else 32))


def aligned(g: Geometry, tensor: Tensor) -> int:
    """Values in the widest vectors into which every row of a tensor falls; none where columns are no neighbours."""
    strides = view_5d(g, tensor)
    sizes = [tensor.shape[0], tensor.shape[1], *(tensor.shape[2 + i] if i >= 0 else 1 for i in g.kept)]
    if sizes[4] > 1 and strides[4] != 1:
        return 0
    return gcd(_VECTOR // g.itemsize, sizes[4], *(s for s, size in zip(strides[:4], sizes, strict=False) if size > 1))


def patch(g: Geometry, use: Use, vector: int, columns: int) -> Patch | None:
    """A patch, or None where rows of lanes (`tiles`) are the way.

    Args:
        vector: values that an aligned load of the source may have.
        columns: the same for the result and, for sums, the centre.
    """
    depth, height, width = g.axes
    if g.channel_lanes or not columns or not vector or width.result > INT32_MAX // 2:
        return None
    if use == "result" and depth.kernel > _MOST_DEPTHS and height.kernel * width.kernel > 1:
        return None
    positions = height.kernel * width.kernel * (1 if use == "result" else depth.kernel)
    if positions > KEPT or (use == "sweep" and g.multiplier > 1) or (g.adjoint and depth.stride > 1):
        return None
    if g.batch * g.channels * prod(g.field("result")) // columns > INT32_MAX - _LANES:
        return None
    whole = _whole(g, use, vector, columns)
    if whole is not None:
        return whole
    if g.adjoint:
        if columns % width.stride:
            return None
        vector = gcd(vector, columns // width.stride)
    else:
        vector = gcd(vector, columns * width.stride)
    pieces = _pieces(g, columns)
    if pieces:
        return Patch(pieces, columns, vector, _LANES, warps_of(_LANES, False), True)
    while columns:
        rows = _rows(g, use, columns, _reach(width, columns), columns * width.kernel)
        if rows:
            return _fit(g, use, Patch(rows, columns, vector, _LANES, warps_of(_LANES, False), False))
        columns //= 2  # half as many columns, which are as well aligned, take half the registers
        if g.adjoint and columns % width.stride:
            return None
        vector = gcd(vector, columns // width.stride if g.adjoint else columns * width.stride)
    return None


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _whole(g: Geometry, use: Use, vector: int, columns: int) -> Patch | None:
    """A patch as wide as a row, or None where rows are long, very short, or fall into wide vectors."""
    _, height, width = g.axes
    if min(vector, columns) > _NARROW or not _NARROW < width.result <= _WIDEST or width.source > _WIDEST:
        return None
    if max(width.result, width.source) > _WIDEST // 2 and not _pays(g, use):
        return None
    wide, read = _power_of_2(width.result), _power_of_2(width.source)
    ahead = max(1, _PREFETCHED // read)
    rows = _rows(g, use, width.result, (ahead + 1) * read, _pairs(width, width.result), whole=True)
    if not rows:
        return None
    lanes = min(_LANES, 32)  # one warp: what its threads exchange needs no barrier
    chosen = Patch(rows, wide, read, lanes, warps_of(lanes, False), False, (vector, columns))
    chosen = _fit(g, use, chosen)
    plane = chosen.rows == height.result
    met = height.source if plane else _reach(height, chosen.rows)
    return chosen._replace(plane=plane, ahead=min(ahead, met - 1))


def _pays(g: Geometry, use: Use) -> bool:
    """Whether rows of more than 8 columns are worth their registers: 1.2 times fewer instructions, where counted."""
    _, height, width = g.axes
    return use == "sum" or (use == "result" and g.itemsize == 2 and height.kernel * width.kernel <= _SMALL)


def _pairs(axis: Axis, results: int) -> int:
    """Results, as many as there are or fewer, times the kernel positions through which each reads the source."""
    count = 0
    for v in range(results):
        for k in range(axis.kernel):
            at = v + axis.low - k * axis.dilation if axis.adjoint else v * axis.stride + k * axis.dilation - axis.low
            step = axis.stride if axis.adjoint else 1
            count += at % step == 0 and 0 <= at // step < axis.source
    return count


def _pieces(g: Geometry, columns: int) -> int:
    """Pieces of a row that a program takes one after the other; none unless there is nothing but long rows."""
    depth, height, width = g.axes
    if any((axis.result, axis.source, axis.kernel) != (1, 1, 1) for axis in (depth, height)):
        return 0
    vectors = width.result // columns
    for pieces in range(_PIECES, 0, -1):
        if -(-vectors // (_LANES * pieces)) * _LANES * pieces <= vectors * 5 // 4:
            return pieces
    return 0


def _reach(axis: Axis, results: int) -> int:
    """Positions of the source that some neighbouring results read."""
    if axis.adjoint:
        return (results - 1 + (axis.kernel - 1) * axis.dilation) // axis.stride + 1
    return (results - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1


def _rows(g: Geometry, use: Use, columns: int, span: int, pairs: int, whole: bool = False) -> int:
    """Rows of a patch: those with the fewest instructions for an image that a thread has registers for, or none.

    Args:
        span: values of a row that a thread has at a time.
        pairs: columns times the columns of the kernel that they read.
    """
    depth, height, width = g.axes
    kept = height.kernel * width.kernel * (1 if use == "result" else depth.kernel)
    products = pairs * kept / width.kernel * (2 if use == "sweep" else 1)
    products /= height.stride * width.stride if g.adjoint else 1
    found: dict[int, float] = {}
    for rows in range(1, min(height.result, _MOST_ROWS) + 1):
        if g.adjoint and rows % height.stride and rows < height.result:
            continue
        unrolled = rows * products
        if whole and rows == height.result:
            unrolled *= _pairs(height, rows) / (rows * height.kernel)
        room = (_PLANE_ROOM if rows == height.result else _WHOLE_ROOM) if whole else 1
        if _held(g, use, rows * columns, kept, span) <= room and (unrolled <= _UNROLLED * min(room, 1.5) or rows == 1):
            if use != "result" and height.result % rows:
                unrolled *= 2  # a product that may not be there is selected
            found[rows] = -(-height.result // rows) * (unrolled + _reach(height, rows) * (2 * span + _PER_ROW))
    return min(found, key=lambda rows: found[rows], default=0)


def _held(g: Geometry, use: Use, values: int, kept: int, span: int) -> float:
    """An estimate of a thread's registers, as a fraction of what it may have (fitted to ptxas for sm_90)."""
    width = 2 if g.double else 1
    if use == "sweep":  # some of the weights, which a program's threads have in common
        kept += kept // 2
    results = values * width if use != "sum" else 0
    centre = values * max(1, g.itemsize // 4) / (2 if g.itemsize == 2 else 1) if use != "result" else 0
    deep = g.axes[0].kernel > 1  # the loop over depths is unrolled, and loads of all of them are begun at once
    room = (60 if deep else 100) if use == "result" else 90 if deep else 110 if kept <= _MANY else 100
    return (results + centre + (kept + span) * width) / room


def _fit(g: Geometry, use: Use, chosen: Patch) -> Patch:
    """Fewer rows where the GPU would have too few threads, fewer lanes where there are not as many patches."""
    rows, stride = chosen.rows, g.axes[1].stride if g.adjoint else 1
    enough = WARPS * (4 if chosen.whole else 16)
    while rows > 2 * stride and patches(g, chosen._replace(rows=rows)) < enough:
        rows = rows // 2 // stride * stride
    chosen = chosen._replace(rows=rows)
    lanes = chosen.lanes
    here = patches(g, chosen) // (g.channels if use != "result" else 1)
    while lanes > 32 and lanes >= 2 * here:
        lanes //= 2
    return chosen._replace(lanes=lanes, warps=warps_of(lanes, False))


def patches(g: Geometry, chosen: Patch) -> int:
    """Patches of a problem."""
    depth, height, width = g.field("result")
    return g.batch * g.channels * depth * -(-height // chosen.rows) * -(-width // chosen.columns)


def programs(g: Geometry, chosen: Patch, shares: int, tile: Any) -> int:
    """Size of the grid; ``tile`` is anything with R and B."""
    if shares:
        return g.channels * shares
    if chosen.sequence:
        return g.batch * g.channels * -(-g.axes[2].result // (chosen.columns * tile["R"] * tile["B"]))
    return -(-patches(g, chosen._replace(rows=tile["R"])) // tile["B"])


def parts(g: Geometry, chosen: Patch) -> int:
    """Shares into which a sum over batch and space is cut, so that the programs fill a large GPU."""
    if chosen.sequence:
        tiles = g.batch * -(-g.axes[2].result // (chosen.columns * chosen.rows * chosen.lanes))
    else:
        tiles = -(-(patches(g, chosen) // g.channels) // chosen.lanes)
    wanted = -(-WARPS // (chosen.warps * g.channels))
    return max(1, min(tiles, wanted, 1024))


def candidates(g: Geometry, use: Use, chosen: Patch) -> list[Patch]:
    """The chosen patch first, then neighbours with other rows and lanes; none of one as wide as a row.

    What its kernel leaves out follows from the chosen rows and lanes.
    """
    found = [chosen]
    if chosen.whole:
        return found
    for lanes in (64, 256):
        found.append(chosen._replace(lanes=lanes, warps=warps_of(lanes, False)))
    height = g.axes[1]
    for rows in (chosen.rows // 2, 1, 2, 4):
        if 0 < rows < chosen.rows and (not g.adjoint or rows % height.stride == 0):
            found.append(chosen._replace(rows=rows))
    return list(dict.fromkeys(found))[:6]


def share_elements(problem: ConvProblem, use: Use) -> int:
    """Values in the shares of a sum, at most: whatever the alignment of the operands turns out to be."""
    g = geometry(problem, adjoint=use == "sweep", channel_lanes=False)
    most = 0
    for columns in (1, 2, 4, 8):
        chosen = patch(g, use, columns, columns)
        if chosen is not None and (count := parts(g, chosen)) > 1:
            most = max(most, count * g.channels * (g.kernel_elements + 1))
    return most
