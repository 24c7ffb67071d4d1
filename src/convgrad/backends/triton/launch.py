"""From tensors to launches: lanes, strides, tiles, shares of a sum. The only file that both triton and tensors meet in.

Order of a call: choose the lanes from the operands' strides, copy an operand only if its lanes are not neighbours in
memory, describe the sum (`geometry`), choose the tile, launch.

Tiles are the fixed ones unless ``torch.backends.cudnn.benchmark`` is on, PyTorch's own word for "measure on first use
of a size". Nothing is tuned while a CUDA graph is captured, in deterministic mode (another tile adds in another order)
or under the interpreter.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false
from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import settings
from ...problem import ConvProblem
from . import grad_weight as grad_weight_kernels
from . import kernels
from .geometry import Geometry, geometry, needs_wide, view_5d
from .tiles import Tile, Use, candidates, fixed, parts

__all__ = ["constants", "grad_input", "grad_weight", "output", "recording", "sweep"]

INTERPRETED = not isinstance(kernels.correlate, triton.runtime.JITFunction)


# ---- layout ----------------------------------------------------------------------------------------


def _neighbours(t: Tensor, dim: int) -> bool:
    """Whether elements along a dimension lie next to each other, or are all the same one."""
    return t.shape[dim] == 1 or t.stride(dim) in (0, 1)


def _lane_dim(problem: ConvProblem, channel_lanes: bool) -> int:
    """The dimension along which lanes run: channels, or the last one that has a length."""
    if channel_lanes:
        return 1
    sizes = zip(problem.input_size, problem.output_size, problem.kernel_size, strict=True)
    long = [i for i, lengths in enumerate(sizes) if lengths != (1, 1, 1)]
    return 2 + long[-1] if long else 1 + problem.ndim


def _ready(problem: ConvProblem, t: Tensor, channel_lanes: bool) -> Tensor:
    if _neighbours(t, _lane_dim(problem, channel_lanes)):
        return t
    if not channel_lanes:
        return t.contiguous()
    if problem.ndim == 1:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.contiguous(memory_format=torch.channels_last if problem.ndim == 2 else torch.channels_last_3d)


def _channel_lanes(problem: ConvProblem, *operands: Tensor) -> bool:
    """Lanes of a sum, whose result has no layout: channels where all the operands have their channels together."""
    lane = _lane_dim(problem, False)
    if all(_neighbours(t, lane) for t in operands):
        return problem.channels_last and all(_neighbours(t, 1) for t in operands)
    return problem.channels_last or all(_neighbours(t, 1) for t in operands)


def _empty(problem: ConvProblem, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=problem.dtype, device=like.device, memory_format=problem.memory_format)


def _filter(weight: Tensor, channel_lanes: bool) -> tuple[Tensor, int, int]:
    """The weight with its lanes together, and its strides along channels and kernel positions."""
    channels = weight.shape[0]
    flat = weight.reshape(channels, -1)  # [C, K]
    if channel_lanes:
        flat = flat.t().contiguous()  # [K, C]
        return flat, 1, channels
    flat = flat.contiguous()
    return flat, flat.shape[1], 1


# ---- launching -------------------------------------------------------------------------------------


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


def _programs(g: Geometry, tile: Any, shares: int) -> int:
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


def _may_tune(device: torch.device) -> bool:
    if INTERPRETED or device.type == "cpu" or not torch.backends.cudnn.benchmark:
        return False
    if settings.current().must_be_deterministic:
        return False
    return not capturing(device)


def capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on this device."""
    module = getattr(torch, device.type, None)
    check = getattr(module, "is_current_stream_capturing", None)
    return bool(check and check())


_TUNED_BY = ["batch", "channels", "depth", "height", "width", "src_depth", "src_height", "src_width"]


@lru_cache(maxsize=512)
def _tuner(g: Geometry, use: Use, exact_rows: bool) -> Any:
    kernel = kernels.correlate if use == "result" else grad_weight_kernels.correlate_sum
    configs = [
        triton.Config({**tile.constants(use)}, num_warps=tile.warps, num_stages=1)
        for tile in candidates(g, use)
        if not exact_rows or exact(g, tile)
    ]
    return triton.autotune(configs=configs, key=_TUNED_BY, cache_results=True)(kernel)


def exact(g: Geometry, tile: Tile) -> bool:
    """Whether every row of every row group exists."""
    height = g.axes[1]
    return height.result % (height.phases * tile.rows) == 0


class Call(NamedTuple):
    """One launch: a kernel, its arguments by name, and its warps."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int


_recorded: ContextVar[list[Call] | None] = ContextVar("_recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Collect the launches of this block instead of making them; operands may be on the meta device."""
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def _launch(g: Geometry, use: Use, arguments: dict[str, Any], tile: Tile, shares: int, device: torch.device) -> None:
    def grid(meta: Any) -> tuple[int]:
        return (_programs(g, meta, shares),)

    if _may_tune(device) and _recorded.get() is None:
        with _on(device):
            _tuner(g, use, arguments.get("EXACT", False))[grid](**arguments, enable_fp_fusion=True)
        return
    kernel = kernels.correlate if use == "result" else grad_weight_kernels.correlate_sum
    _start(Call(kernel, {**arguments, **tile.constants(use)}, tile.warps), grid, device)


def _start(call: Call, grid: Any, device: torch.device) -> None:
    calls = _recorded.get()
    if calls is not None:
        calls.append(call)
        return
    with _on(device):
        call.kernel[grid](**call.arguments, num_warps=call.warps, num_stages=1, enable_fp_fusion=True)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the operands'."""
    if device.type == "cpu" or torch.accelerator.current_device_index() == device.index:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(device.index)


def _sizes(g: Geometry) -> dict[str, int]:
    names = ("depth", "height", "width")
    sizes: dict[str, int] = {"batch": g.batch, "channels": g.channels, "zero": 0}
    for name, axis in zip(names, g.axes, strict=True):
        sizes[name] = axis.result
        sizes[f"src_{name}"] = axis.source
        sizes[f"pad_{name[0]}"] = axis.low
    return sizes


def _strides(prefix: str, strides: Iterable[int]) -> dict[str, int]:
    return {f"{prefix}_{axis}": stride for axis, stride in zip("ncdhw", strides, strict=True)}


class Prepared(NamedTuple):
    """All that a problem fixes: what is left for a call is tensors and their strides."""

    geometry: Geometry
    tile: Tile
    parts: int
    arguments: dict[str, Any]


@lru_cache(maxsize=4096)
def _prepared(problem: ConvProblem, use: Use, adjoint: bool, channel_lanes: bool, wide: bool) -> Prepared:
    g = geometry(problem, adjoint=adjoint, channel_lanes=channel_lanes, wide=wide)
    tile = fixed(g, use)
    arguments: dict[str, Any] = {**_sizes(g), **constants(g)}
    count = 0
    if use != "result":
        count = parts(g, tile)
        arguments |= {"parts": count, "SWEEP": use == "sweep", "EXACT": exact(g, tile)}
    return Prepared(g, tile, count, arguments)


# ---- the passes ------------------------------------------------------------------------------------


def _correlate(problem: ConvProblem, source: Tensor, weight: Tensor, bias: Tensor | None, adjoint: bool) -> Tensor:
    lanes = problem.channels_last
    source = _ready(problem, source, lanes)
    out = _empty(problem, problem.input_shape if adjoint else problem.output_shape, source)
    flat, weight_c, weight_k = _filter(weight, lanes)
    g, tile, _, known = _prepared(problem, "result", adjoint, lanes, needs_wide(source))
    arguments = {
        **known,
        "src": source,
        "weight": flat,
        "bias": flat if bias is None else bias.contiguous(),
        "out": out,
        **_strides("src", view_5d(g, source)),
        **_strides("out", view_5d(g, out)),
        "weight_c": weight_c,
        "weight_k": weight_k,
        "HAS_BIAS": bias is not None,
    }
    _launch(g, "result", arguments, tile, 0, source.device)
    return out


def output(problem: ConvProblem, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The pass ``forward``."""
    return _correlate(problem, input, weight, bias, adjoint=False)


def grad_input(problem: ConvProblem, grad_output: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The pass ``grad_input``; a bias is that of a transposed convolution."""
    return _correlate(problem, grad_output, weight, bias, adjoint=True)


def _sum(
    problem: ConvProblem,
    use: Use,
    source: Tensor,
    centre: Tensor,
    weight: Tensor | None,
    with_bias: bool,
    workspace: Tensor | None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """grad_input (for a sweep), grad_weight and grad_bias."""
    lanes = problem.channels_last if use == "sweep" else _channel_lanes(problem, source, centre)
    source, centre = _ready(problem, source, lanes), _ready(problem, centre, lanes)
    g, tile, count, known = _prepared(problem, use, use == "sweep", lanes, needs_wide(source, centre))
    elements = g.kernel_elements

    result = torch.empty(problem.weight_shape, dtype=problem.dtype, device=source.device)  # [C_out, 1, *k]
    bias = result.new_empty(g.channels) if with_bias else None
    shares, bias_shares = result, result if bias is None else bias
    share_c, share_k = elements, 1
    if count > 1:
        accumulated = torch.float64 if g.double else torch.float32
        values = count * g.channels * (elements + with_bias)
        if workspace is None:
            scratch = torch.empty(values, dtype=accumulated, device=source.device)
        else:
            scratch = workspace.view(accumulated)[:values]
        shares, bias_shares = scratch, scratch[count * g.channels * elements :]
        if lanes:
            share_c, share_k = 1, g.channels

    out = _empty(problem, problem.input_shape, source) if use == "sweep" else source
    flat, weight_c, weight_k = (source, 0, 0) if weight is None else _filter(weight, lanes)
    arguments = {
        **known,
        "src": source,
        "centre": centre,
        "weight": flat,
        "out": out,
        "shares": shares,
        "bias_shares": bias_shares,
        **_strides("src", view_5d(g, source)),
        **_strides("centre", view_5d(g, centre)),
        **_strides("out", view_5d(g, out)),
        "weight_c": weight_c,
        "weight_k": weight_k,
        "share_c": share_c,
        "share_k": share_k,
        "BIAS_TAP": g.field("whole_tap") if with_bias else (-1, -1, -1),
    }
    _launch(g, use, arguments, tile, count, source.device)
    if count > 1:
        _add(shares, result, count, g.channels * elements, elements, share_c, share_k, g.double)
        if bias is not None:
            _add(bias_shares, bias, count, g.channels, 1, 1, 0, g.double)
    # [C, 1, *k] has the same strides in every format.
    return (out if use == "sweep" else None), result, bias


def _add(
    shares: Tensor, out: Tensor, count: int, size: int, elements: int, share_c: int, share_k: int, double: bool
) -> None:
    block = 64
    arguments = {
        "shares": shares,
        "out": out,
        "parts": count,
        "count": size,
        "share_c": share_c,
        "share_k": share_k,
        "ELEMENTS": elements,
        "ACC": tl.float64 if double else tl.float32,
        "BP": 32,
        "BN": block,
    }
    _start(Call(grad_weight_kernels.add_shares, arguments, 4), (triton.cdiv(size, block),), out.device)


def grad_weight(problem: ConvProblem, grad_output: Tensor, input: Tensor, workspace: Tensor | None = None) -> Tensor:
    """The pass ``grad_weight``."""
    return _sum(problem, "sum", input, grad_output, None, False, workspace)[1]


def sweep(
    problem: ConvProblem,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    with_bias: bool,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_input, grad_weight and, if asked for, grad_bias; see `Axis.whole_tap` for when a bias can be had."""
    out, result, bias = _sum(problem, "sweep", grad_output, input, weight, with_bias, workspace)
    assert out is not None
    return out, result, bias
