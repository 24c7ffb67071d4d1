"""A kernel's arguments, as they follow from a problem's geometry: constants, sizes, strides, the size of the grid."""

# pyright: reportIndexIssue=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .geometry import Geometry, view_5d

__all__ = ["constants", "programs", "sizes", "strides", "weight_strides"]


def constants(g: Geometry) -> dict[str, Any]:
    """The compile-time arguments that follow from the geometry."""
    return {
        "KERNEL": g.field("kernel"),
        "STRIDE": g.field("stride"),
        "DILATION": g.field("dilation"),
        "PHASES": g.field("phases"),
        "TAPS": g.field("taps"),
        "TAP_STRIDE": g.field("tap_stride"),
        "SRC_STEP": g.field("src_step"),
        "TAP_STEP": g.field("tap_step"),
        "ADJOINT": g.adjoint,
        "MULTIPLIER": g.multiplier,
        "CHANNEL_LANES": g.channel_lanes,
        "WIDE": g.wide,
        "ACC": tl.float64 if g.double else tl.float32,
    }


def sizes(g: Geometry) -> dict[str, int]:
    """Lengths and paddings."""
    found: dict[str, int] = {"batch": g.batch, "channels": g.channels, "zero": 0}
    for name, axis in zip(("depth", "height", "width"), g.axes, strict=True):
        found[name] = axis.result
        found[f"src_{name}"] = axis.source
        found[f"pad_{name[0]}"] = axis.low
    return found


def strides(prefix: str, g: Geometry, tensor: Tensor) -> dict[str, int]:
    """Where the elements of an operand lie."""
    names = (f"{prefix}_{axis}" for axis in "ncdhw")
    return dict(zip(names, view_5d(g, tensor), strict=True))


def weight_strides(g: Geometry) -> dict[str, int]:
    """Of what `filter_of` gives."""
    across = (1, g.weight_channels) if g.channel_lanes else (g.kernel_elements, 1)
    return {"weight_c": across[0], "weight_k": across[1]}


def programs(g: Geometry, shares: int, tile: Any) -> int:
    """Size of the grid; ``tile`` is anything with R, BM, BL (and TD, TH, TW)."""
    depth, height, width = g.field("per_phase")
    groups = depth * triton.cdiv(height, tile["R"])
    if not shares:  # results
        if g.channel_lanes:
            blocks = triton.cdiv(g.batch * groups * width, tile["BM"]) * triton.cdiv(g.channels, tile["BL"])
        else:
            blocks = triton.cdiv(g.batch * g.channels * groups, tile["BM"]) * triton.cdiv(width, tile["BL"])
        return blocks * g.phases
    chunks = 1
    for taps, name in zip(g.field("taps"), ("TD", "TH", "TW"), strict=True):
        chunks *= triton.cdiv(taps, tile[name])
    blocks = triton.cdiv(g.channels, tile["BL"]) if g.channel_lanes else g.channels
    return chunks * g.phases * blocks * shares
