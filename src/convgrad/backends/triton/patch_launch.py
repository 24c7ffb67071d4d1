"""Launches of the kernels that compute patches, for operands whose columns are neighbours in memory."""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import patch_sums, patches
from .geometry import Geometry, view_5d
from .patch_tiles import Patch, aligned, parts, patch, programs, warps_of
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
        **_common(g, chosen),
        **_strides("src", g, source, chosen.vector),
        **_strides("out", g, out, chosen.columns),
        "HAS_BIAS": with_bias,
    }
    return _launch(patches.correlate_patches, g, "result", arguments, chosen, 0, tune)


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
        **_common(g, chosen),
        **_strides("src", g, source, chosen.vector),
        **_strides("centre", g, centre, chosen.columns),
        **_strides("out", g, centre if out is None else out, chosen.columns),
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


def _common(g: Geometry, chosen: Patch) -> dict[str, Any]:
    depth, height, width = g.axes
    return {
        "batch": g.batch,
        "channels": g.channels,
        "depth": depth.result,
        "height": height.result,
        "vectors": width.result // chosen.columns,
        "src_depth": depth.source,
        "src_height": height.source,
        "src_vectors": width.source // chosen.vector,
        "KERNEL": g.field("kernel"),
        "STRIDE": g.field("stride"),
        "DILATION": g.field("dilation"),
        "PAD": g.field("low"),
        "ADJOINT": g.adjoint,
        "MULTIPLIER": g.multiplier,
        "WIDE": g.wide,
        "ACC": tl.float64 if g.double else tl.float32,
        "SEQUENCE": chosen.sequence,
        "V": chosen.columns,
        "U": chosen.vector,
    }


def _strides(prefix: str, g: Geometry, tensor: Tensor, unit: int) -> dict[str, int]:
    """Where the rows of an operand lie, in vectors; a dimension of length 1 may have any stride, which nothing uses."""
    names = (f"{prefix}_{axis}" for axis in "ncdh")
    return {name: stride // unit for name, stride in zip(names, view_5d(g, tensor), strict=False)}
