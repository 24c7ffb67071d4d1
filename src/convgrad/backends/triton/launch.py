"""From tensors to launches of `correlate` or `banded`: what a pass, or the sweep of both gradients, runs."""

# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import ConvProblem, Output, Outputs
from . import banded, bands
from .correlate import add_partials, correlate
from .geometry import Axis, Geometry, geometry
from .start import Launch
from .tiles import MOST_PROGRAMS, Tile, Use, choose, lines, parts

_NO_TAP = (-1, -1, -1)


def bound(problem: ConvProblem, outputs: Outputs, verify: Callable[..., None]) -> Callable[..., Any]:
    """What computes these outputs of a problem.

    Args:
        verify: called with a compiled kernel's hash, the outputs' names, the operands and the results of a call.
    """
    g = geometry(problem, adjoint="grad_input" in outputs)
    if outputs in (("forward",), ("grad_input",)):
        launch = partial(launch_of, g, "result", bias_tap=_NO_TAP)
        return result_of(problem, outputs, verify, launch, problem.memory_format)
    use: Use = "sweep" if len(outputs) > 1 else "sum"
    tile = choose(g, use)
    assert tile is not None
    main = launch_of(g, use, False, g.whole_tap if "grad_bias" in outputs else _NO_TAP)
    return gradients_of(problem, outputs, verify, main, parts(g, use, tile, MOST_PROGRAMS), problem.memory_format)


def result_of(
    problem: ConvProblem,
    outputs: Outputs,
    verify: Callable[..., None],
    launch: Callable[[bool], Launch],
    layout: torch.memory_format,
) -> Callable[..., Tensor]:
    """``forward`` or ``grad_input`` of one problem.

    Args:
        launch: makes the launch for calls without or with a bias.
        layout: of the kernel's source and result.
    """
    shape = problem.input_shape if outputs == ("grad_input",) else problem.output_shape
    launches: dict[bool, Launch] = {}

    def run(source: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
        out = torch.empty(shape, dtype=source.dtype, device=source.device, memory_format=layout)
        source, weight = source.contiguous(memory_format=layout), weight.contiguous()
        with_bias = bias is not None
        if with_bias not in launches:
            launches[with_bias] = launch(with_bias)
        _, compiled = launches[with_bias].start(
            src=source, centre=source, weight=weight, bias=weight if bias is None else bias.contiguous(), out=out,
            partials=out, bias_partials=out,
        )  # fmt: skip
        if compiled:
            verify(compiled, outputs, (source, weight, bias), (out,))
        return out.contiguous(memory_format=problem.memory_format)

    return run


def gradients_of(
    problem: ConvProblem,
    outputs: Outputs,
    verify: Callable[..., None],
    main: Launch,
    most: int,
    layout: torch.memory_format,
) -> Callable[..., Any]:
    """``grad_weight`` of one problem, or two or three gradients: one launch, and one that adds its partial sums.

    Args:
        most: parts of the sums, at most; one part is the result itself.
        layout: of the kernel's operands.
    """
    p, sweep, with_bias = problem, len(outputs) > 1, "grad_bias" in outputs
    weights = most * prod(p.weight_shape)
    size = 4 * (weights + most * p.out_channels * with_bias)
    adds: dict[int, Launch] = {}

    def run(grad_output: Tensor, input: Tensor, weight: Tensor | None = None, workspace: Tensor | None = None) -> Any:
        first, second = (t.contiguous(memory_format=layout) for t in (grad_output, input))
        source, centre = (first, second) if sweep else (second, first)
        out = source
        if sweep:
            out = torch.empty(p.input_shape, dtype=p.dtype, device=source.device, memory_format=p.memory_format)
        taps = source if weight is None else weight.contiguous()
        result = source.new_empty(p.weight_shape)  # [C_out, 1, *k]
        bias = source.new_empty(p.out_channels) if with_bias else result
        partials, bias_partials = result, bias
        if most > 1:
            if workspace is None:
                workspace = torch.empty(size, dtype=torch.uint8, device=source.device)
            partials = workspace.view(torch.float32)
            bias_partials = partials[weights:] if with_bias else partials
        count, compiled = main.start(
            src=source, centre=centre, weight=taps, bias=taps, out=out, partials=partials, bias_partials=bias_partials
        )
        if most > 1:
            if count not in adds:
                adds[count] = adding(count, result.numel(), bias.numel() if with_bias else 0)
            adds[count].start(partials=partials, out=result, bias_partials=bias_partials, bias=bias)
        results = {"grad_input": out, "grad_weight": result, "grad_bias": bias}
        found = tuple(results[output] for output in outputs)
        if compiled:
            verify(compiled, outputs, (grad_output, input, weight), found)
        return found if sweep else result

    return run


def launch_of(g: Geometry, use: Use, with_bias: bool, bias_tap: tuple[int, int, int]) -> Launch:
    """A launch of `correlate`."""
    tile = choose(g, use)
    assert tile is not None
    depth, height, width = g.axes
    arguments = {
        **_sizes(g, tile.vector, tile.stored, tile.loaded),
        "DEPTH": depth.constants,
        "HEIGHT": height.constants,
        "WIDTH": width.constants,
        "ADJOINT": g.adjoint,
        "CHANNELS_LAST": g.channels_last,
        "RESULT": use != "sum",
        "SUM": use != "result",
        "HAS_BIAS": with_bias,
        "BIAS_TAP": bias_tap,
        "EXACT": height.result % tile.rows == 0 and width.result % tile.columns == 0,
        **tile.constants(),
    }
    warps = max(1, tile.lanes // (64 if torch.version.hip is not None else 32))
    return Launch(correlate, arguments, {"num_warps": warps}, partial(grid_of, g, use, tile))


def _sizes(g: Geometry, vector: int, stored: int, loaded: int) -> dict[str, int]:
    """Arguments of both kernels; channels, and rows of the result and of the source, in vectors of so many."""
    depth, height, width = g.axes
    return {
        "batch": g.batch, "channels": g.channels // vector, "MULTIPLIER": g.multiplier, "WIDE": g.wide,
        "depth": depth.result, "height": height.result, "columns": width.result // stored,
        "src_depth": depth.source, "src_height": height.source, "src_columns": width.source // loaded,
    }  # fmt: skip


def grid_of(g: Geometry, use: Use, tile: Tile, programs: int) -> tuple[int, int]:
    """The size of the grid, and the parts into which it cuts the batch and space."""
    count = parts(g, use, tile, programs)
    return lines(g, tile) * count, count


def adding(count: int, weights: int, biases: int) -> Launch:
    """A launch that adds so many parts."""
    size = 64
    blocks = -(-weights // size) + -(-biases // size)
    arguments = {"weights": weights, "biases": biases, "BP": 32, "BN": size}
    return Launch(add_partials, arguments, {"num_warps": 4}, lambda _: (blocks, count))


# ---- banded ----------------------------------------------------------------------------------------

_WORDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def bound_bands(
    problem: ConvProblem, output: Output, precision: str, verify: Callable[..., None]
) -> Callable[..., Tensor]:
    """A pass of a problem, as `bound` gives it; float32 is multiplied in this precision, Triton's word."""
    g = geometry(problem, adjoint=output == "grad_input")
    if output != "grad_weight":
        launch = partial(_bands_launch, problem, g, "result", precision)
        return result_of(problem, (output,), verify, launch, torch.contiguous_format)
    main = _bands_launch(problem, g, "sum", precision, False)
    return gradients_of(
        problem, (output,), verify, main, bands.parts(g, bands.choose(g, "sum")), torch.contiguous_format
    )


def _bands_launch(problem: ConvProblem, g: Geometry, use: bands.Use, precision: str, with_bias: bool) -> Launch:
    kernel = banded.correlate if use == "result" else banded.correlate_sum
    depth, height, width = g.axes
    interpreted = not isinstance(kernel, triton.runtime.JITFunction)
    # The interpreter gets sums of bfloat16 wrong.
    operand = torch.float32 if interpreted and problem.dtype == torch.bfloat16 else problem.dtype
    source, result = bands.align(width.source, g.itemsize), bands.align(width.result, g.itemsize)
    band = bands.choose(g, use)
    count = bands.parts(g, band) if use == "sum" else 1
    arguments = {
        **_sizes(g, 1, result, source),
        "DEPTH": _constants(depth),
        "HEIGHT": _constants(height),
        "WIDTH": _constants(width),
        "OPERAND": _WORDS[operand],
        "PRECISION": precision,
        "SRC_ALIGN": source,
        "OUT_ALIGN": result,
        "FLIPPED": g.adjoint,
        "HAS_BIAS": with_bias,
        "KP": triton.next_power_of_2(width.kernel),
        **band.constants(),
    }
    programs = bands.programs(g, use, band, count)
    return Launch(kernel, arguments, {"num_warps": band.warps, "num_stages": 2}, lambda _: (programs, count))


def _constants(axis: Axis) -> tuple[int, int, int, int]:
    """Of the flipped kernel in the direction of grad_input, which is then another forward; see `geometry`."""
    kernel, stride, dilation, low = axis.constants
    return (kernel, 1, dilation, (kernel - 1) * dilation - low) if axis.adjoint else (kernel, stride, dilation, low)
