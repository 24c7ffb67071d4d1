"""Launches of the kernels that compute patches, for operands whose columns are neighbours in memory."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import patch_sums
from . import patches as patch_kernels
from .geometry import Geometry, view_5d
from .patch_tiles import Patch, aligned, parts, patch, patches, programs, warps_of
from .start import Launch
from .tiles import Use
from .tuning import patch_tuner

__all__ = ["result", "sums"]


def result(g: Geometry, source: Tensor, out: Tensor, with_bias: bool, tune: bool) -> Launch | None:
    """``forward`` or ``grad_input``: a launch that takes (source, weight, bias, out), or None."""
    chosen = patch(g, "result", aligned(g, source), aligned(g, out))
    if chosen is None:
        return None
    arguments = {
        **_common(g, "result", chosen, source, out),
        **_strides("src", g, source, chosen.units[0]),
        **_strides("out", g, out, chosen.units[1]),
        "HAS_BIAS": with_bias,
    }
    return _launch(patch_kernels.correlate_patches, g, "result", arguments, chosen, 0, tune)


def sums(
    g: Geometry,
    use: Use,
    source: Tensor,
    centre: Tensor,
    out: Tensor | None,
    bias_tap: tuple[int, int, int],
    tune: bool,
) -> tuple[Launch, int] | None:
    """A launch that takes (source, centre, weight, out, shares, shares of the bias), and the number of shares."""
    columns = aligned(g, centre) if out is None else gcd(aligned(g, centre), aligned(g, out))
    chosen = patch(g, use, aligned(g, source), columns)
    if chosen is None:
        return None
    count = parts(g, chosen)
    exact = chosen.sequence or g.axes[1].result % chosen.rows == 0
    arguments = {
        **_common(g, use, chosen, source, centre, *([] if out is None else [out])),
        **_strides("src", g, source, chosen.units[0]),
        **_strides("centre", g, centre, chosen.units[1]),
        **_strides("out", g, centre if out is None else out, chosen.units[1]),
        "parts": count,
        "SWEEP": use == "sweep",
        "BIAS_TAP": bias_tap,
        "EXACT": exact,
    }
    return _launch(patch_sums.sum_patches, g, use, arguments, chosen, count, tune), count


def _launch(
    kernel: Any, g: Geometry, use: Use, arguments: dict[str, Any], chosen: Patch, shares: int, tune: bool
) -> Launch:
    find = partial(patch_tuner, kernel, g, use, chosen, bool(arguments.get("EXACT"))) if tune else None
    tile = {**chosen.constants(), "num_warps": warps_of(chosen.lanes, torch.version.hip is not None)}
    return Launch(kernel, arguments, tile, partial(programs, g, chosen, shares), find)


def _common(g: Geometry, use: Use, chosen: Patch, *operands: Tensor) -> dict[str, Any]:
    depth, height, width = g.axes
    lanes = patches(g, chosen) // (1 if use == "result" else g.channels)
    return {
        "batch": g.batch,
        "channels": g.channels,
        "depth": depth.result,
        "height": height.result,
        "vectors": -(-width.result // chosen.columns),
        "src_depth": depth.source,
        "src_height": height.source,
        "src_vectors": -(-width.source // chosen.vector),
        "KERNEL": g.field("kernel"),
        "STRIDE": g.field("stride"),
        "DILATION": g.field("dilation"),
        "PAD": g.field("low"),
        "ADJOINT": g.adjoint,
        "MULTIPLIER": g.multiplier,
        "WIDE": g.wide,
        "ACC": tl.float64 if g.double else tl.float32,
        "SEQUENCE": chosen.sequence,
        "WHOLE": _whole(g, chosen),
        "UNITS": chosen.units,
        "AHEAD": 0 if torch.version.hip is not None else chosen.ahead,  # LLVM orders loads by itself, and would spill
        "DEEP": (depth.result, depth.source, depth.kernel, depth.low) != (1, 1, 1, 0),
        "FULL": chosen.whole is not None and lanes % chosen.lanes == 0,
        "DENSE": chosen.whole is not None and all(t.is_contiguous() for t in operands),
        "V": chosen.columns,
        "U": chosen.vector,
    }


def _whole(g: Geometry, chosen: Patch) -> tuple[int, int, int, int]:
    """What the kernel knows of planes whose rows are taken whole."""
    if chosen.whole is None:
        return (0, 0, 0, 0)
    _, height, width = g.axes
    return (width.result, width.source, height.source if chosen.plane else 0, -(-height.result // chosen.rows))


def _strides(prefix: str, g: Geometry, tensor: Tensor, unit: int) -> dict[str, int]:
    """Where the rows of an operand lie, in units; a dimension of length 1 may have any stride, which nothing uses.

    But one channel has the stride that several would have: planes are numbered through all images.
    """
    strides = list(view_5d(g, tensor))
    if tensor.shape[1] == 1:
        strides[1] = strides[0]
    names = (f"{prefix}_{axis}" for axis in "ncdh")
    return {name: stride // unit for name, stride in zip(names, strides, strict=False)}
