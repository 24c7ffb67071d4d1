"""The shape of a program: a fixed choice for every geometry, and a few neighbours for the tuner.

The fixed choice follows from counting registers (`_registers`) and from two rules: a row of lanes should not be wider
than the data, and rows should divide the height (7 divides 7, 14, 28, 56 and 112).
**No figure behind it was measured on a GPU**; it is what the ahead-of-time tables (registers, no spills) allow.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ...problem import ConvProblem
from .geometry import Geometry, geometry

__all__ = ["UNROLLED", "UNROLLED_CHANNELS", "WARPS", "Tile", "Use", "candidates", "fixed", "parts", "share_elements"]

#: ``result``: `kernels.correlate`; ``sum``, ``sweep``: `grad_weight.correlate_sum` without and with grad_input.
Use = Literal["result", "sum", "sweep"]

WARPS = 4224  # warps that fill a large GPU: 132 multiprocessors x 32
UNROLLED = 49  # kernel positions whose sums one program keeps: 7 x 7
UNROLLED_CHANNELS = 27  # the same for a sweep whose lanes are channels: 3 x 3 x 3. At 49 ptxas spills
_UNROLLED_RESULT = 9  # kernel positions that are unrolled where nothing is kept for them: 3 x 3
_UNROLLED_CHUNK = 64  # kernel positions of one of several chunks of a sum
_UNROLLED_ROWS = 32  # of a kernel, at most


class Tile(NamedTuple):
    """R rows of [items, lanes], a number of unrolled kernel positions per dimension, and the warps that share them."""

    rows: int
    items: int
    lanes: int
    td: int
    th: int
    tw: int
    warps: int

    def constants(self, use: Use) -> dict[str, int]:
        """The kernel's arguments."""
        chosen = {"R": self.rows, "BM": self.items, "BL": self.lanes, "TH": self.th, "TW": self.tw}
        return chosen if use == "result" else {**chosen, "TD": self.td}


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _least_waste(size: int, options: tuple[int, ...]) -> int:
    """The first option that covers ``size`` with the fewest surplus elements, within a quarter."""
    covered = {option: -(-size // option) * option for option in options}
    least = min(covered.values())
    return next(option for option in options if covered[option] <= least * 5 // 4)


def _rows(g: Geometry) -> int:
    height = g.axes[1]
    if height.per_phase <= 8:
        return height.per_phase
    if height.taps == 1:
        return 4
    return _least_waste_exactly(height.per_phase, (8, 7, 6, 5, 4))


def _least_waste_exactly(size: int, options: tuple[int, ...]) -> int:
    return min(options, key=lambda option: -(-size // option) * option)


def _taps(g: Geometry, use: Use) -> tuple[int, int, int]:
    """Kernel positions that one program unrolls."""
    depth, height, width = g.field("taps")
    if use == "result":  # the others are a loop around them
        th = min(height, _UNROLLED_ROWS)
        return 1, th, width if height * width <= _UNROLLED_RESULT else max(1, min(width, _UNROLLED_RESULT // th))
    if depth * height * width <= UNROLLED:
        return depth, height, width
    if height * width <= UNROLLED:
        return 1, height, width
    th = min(height, _UNROLLED_ROWS)
    chunks = -(-width // max(1, _UNROLLED_CHUNK // th))
    return 1, th, -(-width // chunks)


def _lanes(g: Geometry, use: Use) -> int:
    if g.channel_lanes:
        size, widest = g.channels, 128
    else:
        sequence = 2048 if use == "result" else 1024
        size, widest = g.axes[2].per_phase, sequence if g.axes[1].per_phase == 1 else 128
    if size <= 32:
        return _power_of_2(size)
    return _least_waste(size, tuple(w for w in (2048, 1024, 512, 256, 128, 64, 32) if w <= widest))


def _registers(g: Geometry, use: Use, rows: int, each: int, taps: tuple[int, int, int]) -> float:
    """An estimate, as a fraction of what a thread may use without spilling (fitted to ptxas for sm_90)."""
    height = g.axes[1]
    loaded = (rows - 1) * height.src_step + (taps[1] - 1) * abs(height.tap_step) + 1
    loaded = min(loaded, rows * taps[1])
    if use == "result":
        kept, room = loaded + taps[1] + rows // 2, 80 if height.src_step <= 2 else 72
    else:
        sums = taps[0] * taps[1] * taps[2]
        kept, room = (
            sums + rows * (2 if use == "sweep" else 1) + loaded,
            120 if sums <= 9 else 78 if use == "sum" else 66,
        )
        if g.phases > 1 and g.kept[0] >= 0:  # masks and offsets of three dimensions
            room = room * 3 // 4
    return each * kept * (2 if g.double else 1) / room


def fixed(g: Geometry, use: Use) -> Tile:
    """The tile that is used unless tuning is asked for."""
    taps = _taps(g, use)
    rows, lanes = _rows(g), _lanes(g, use)
    if g.channel_lanes:
        each = max(1, min(4, 16 // g.itemsize))
    elif rows == 1:
        each = 16 if use == "result" else 8
    else:
        each = 2 if use == "result" else 4
    while _registers(g, use, rows, each, taps) > 1:
        if rows > 4 and (each <= 2 or g.axes[1].src_step > 1):
            rows = 4
        elif each > 1:
            each //= 2
        elif rows > 1:
            rows -= 1
        else:
            break
    return _fit(g, rows, lanes, each, taps)


def _fit(g: Geometry, rows: int, lanes: int, each: int, taps: tuple[int, int, int], warps: int = 4) -> Tile:
    """Choose items and warps so that every thread has ``each`` elements, with no more items than there are."""
    if not g.channel_lanes and lanes > 32:
        items = 1  # one plane a program: its weights are scalars
        warps = max(1, min(warps, lanes // (32 * each)))
    else:
        items = max(1, min(warps * 32 * each // lanes, _power_of_2(_items(g, rows))))
        warps = max(1, min(warps, items * lanes // (32 * each)))
    return Tile(rows, items, lanes, *taps, warps)


def _items(g: Geometry, rows: int) -> int:
    depth, height, width = g.field("per_phase")
    groups = g.batch * depth * -(-height // rows)
    return groups * (width if g.channel_lanes else 1)


def parts(g: Geometry, tile: Tile) -> int:
    """Shares into which a sum over batch and space is cut, so that the programs fill a large GPU."""
    chunks = 1
    for taps, at_once in zip(g.field("taps"), (tile.td, tile.th, tile.tw), strict=True):
        chunks *= -(-taps // at_once)
    across = 1 if g.channel_lanes else -(-g.axes[2].per_phase // tile.lanes)
    blocks = -(-g.channels // tile.lanes) if g.channel_lanes else g.channels
    tiles = -(-_items(g, tile.rows) // tile.items) * across
    wanted = -(-WARPS // tile.warps) // (blocks * chunks * g.phases)
    return max(1, min(tiles, wanted, 1024))


def candidates(g: Geometry, use: Use) -> list[Tile]:
    """The fixed tile first, then neighbours with other rows, elements per thread and warps."""
    chosen = fixed(g, use)
    taps = (chosen.td, chosen.th, chosen.tw)
    found = [chosen]
    for rows in dict.fromkeys((chosen.rows, 8, 4, 2)):
        for each in (4, 2, 1) if rows > 1 else (16, 8, 4):
            for warps in (4, 8):
                if rows <= g.axes[1].per_phase and _registers(g, use, rows, each, taps) <= 1:
                    found.append(_fit(g, rows, chosen.lanes, each, taps, warps))
    return list(dict.fromkeys(found))[:6]


def share_elements(problem: ConvProblem, use: Use) -> int:
    """Values in the shares of a sum, at most: whatever the layout of the operands turns out to be."""
    most = 0
    for lanes in (False, True):
        g = geometry(problem, adjoint=use == "sweep", channel_lanes=lanes)
        count = parts(g, fixed(g, use))
        most = max(most, count * g.channels * (g.kernel_elements + 1) if count > 1 else 0)
    return most
