"""Launches of the kernels that compute patches of channels, for operands whose channels are neighbours in memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import channel_patches, channel_sums
from .channel_tiles import (
    ChannelPatch,
    constants,
    parts,
    patch_of,
    period,
    programs,
    shares,
)
from .geometry import Geometry, view_5d
from .patch_tiles import warps_of
from .start import Launch
from .tiles import Use
from .tuning import channel_tuner

__all__ = ["result", "sums"]


def result(g: Geometry, source: Tensor, out: Tensor, with_bias: bool, tune: bool) -> Launch | None:
    """``forward`` or ``grad_input``: a launch that takes (source, weight, bias, out), or None."""
    chosen = patch_of(g, "result", out, source)
    if chosen is None:
        return None
    arguments = {
        **_common(g, chosen),
        **_strides("src", g, source, chosen.vector),
        **_out_strides(g, out, chosen),
        "HAS_BIAS": with_bias,
    }
    return _launch(channel_patches.correlate_channels, g, "result", arguments, chosen, 0, tune)


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
    chosen = patch_of(g, use, out, source, centre)
    if chosen is None:
        return None
    count = shares(g, chosen)
    elements = g.kernel_elements
    # One share is the result itself: [C, 1, *k]. Else channels are neighbours, as they are in the kernel.
    share_c, share_k = (1, g.channels) if count > 1 else (elements, 1)
    arguments = {
        **_common(g, chosen),
        **_strides("src", g, source, chosen.vector),
        **_strides("centre", g, centre, chosen.vector),
        **_out_strides(g, centre if out is None else out, chosen),
        "share_c": share_c,
        "share_k": share_k,
        "parts": parts(g, chosen),
        "SWEEP": use == "sweep",
        "BIAS_TAP": bias_tap,
    }
    return _launch(channel_sums.sum_channels, g, use, arguments, chosen, parts(g, chosen), tune), count


def _launch(
    kernel: Any, g: Geometry, use: Use, arguments: dict[str, Any], chosen: ChannelPatch, count: int, tune: bool
) -> Launch:
    find = partial(channel_tuner, kernel, g, use, chosen) if tune else None
    tile = {**constants(g, use, chosen), "num_warps": warps_of(chosen.lanes, torch.version.hip is not None)}
    return Launch(kernel, arguments, tile, partial(programs, g, chosen, count), find)


def _common(g: Geometry, chosen: ChannelPatch) -> dict[str, Any]:
    depth, height, width = g.axes
    return {
        "batch": g.batch,
        "vectors": g.channels // chosen.vector,
        "depth": depth.result,
        "height": height.result,
        "width": width.result,
        "period": period(g, chosen),
        "src_depth": depth.source,
        "src_height": height.source,
        "src_width": width.source,
        "KERNEL": g.field("kernel"),
        "STRIDE": g.field("stride"),
        "DILATION": g.field("dilation"),
        "PAD": g.field("low"),
        "ADJOINT": g.adjoint,
        "WIDE": g.wide,
        "ACC": tl.float64 if g.double else tl.float32,
        "TRANSPOSED": chosen.together > 0,
    }


def _strides(prefix: str, g: Geometry, tensor: Tensor, unit: int) -> dict[str, int]:
    """Where the positions of an operand lie, in vectors; a dimension of length 1 may have any stride."""
    n, _, depth, height, width = view_5d(g, tensor)
    return {f"{prefix}_{axis}": s // unit for axis, s in zip("ndhw", (n, depth, height, width), strict=True)}


def _out_strides(g: Geometry, out: Tensor, chosen: ChannelPatch) -> dict[str, int]:
    unit = chosen.together or chosen.vector
    return {**_strides("out", g, out, unit), "out_c": view_5d(g, out)[1] // unit}
