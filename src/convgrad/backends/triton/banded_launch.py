"""From tensors to launches of `banded`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import ConvProblem, Output
from . import banded
from .bands import Use, align, choose, parts, programs
from .geometry import Axis, Geometry, geometry
from .launch import gradients_of, result_of
from .start import Launch

_WORDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def bound(problem: ConvProblem, output: Output, precision: str, verify: Callable[..., None]) -> Callable[..., Tensor]:
    """A pass of a problem, as `launch.bound` gives it; float32 is multiplied in this precision, Triton's word."""
    adjoint = output == "grad_input"
    g = geometry(problem, adjoint=adjoint)
    if output != "grad_weight":

        def launch(with_bias: bool) -> Launch:
            more = {"FLIPPED": adjoint, "HAS_BIAS": with_bias}
            return _launch(banded.correlate, problem, g, "result", precision, more, 0)

        return result_of(problem, (output,), verify, launch, lambda *tensors: tensors, torch.contiguous_format)
    count = parts(g, choose(g, "sum"))
    more = {"KP": triton.next_power_of_2(g.axes[2].kernel)}
    main = _launch(banded.correlate_sum, problem, g, "sum", precision, more, count)
    return gradients_of(
        problem,
        (output,),
        verify,
        main,
        lambda source, centre, weight, out, partials, _: (source, centre, partials),
        count,
        torch.contiguous_format,
    )


def _launch(
    kernel: Any, problem: ConvProblem, g: Geometry, use: Use, precision: str, more: dict[str, Any], count: int
) -> Launch:
    depth, height, width = g.axes
    interpreted = not isinstance(kernel, triton.runtime.JITFunction)
    # The interpreter gets sums of bfloat16 wrong.
    operand = torch.float32 if interpreted and problem.dtype == torch.bfloat16 else problem.dtype
    source, result = align(width.source, g.itemsize), align(width.result, g.itemsize)
    band = choose(g, use)
    arguments = {
        "batch": g.batch,
        "channels": g.channels,
        "depth": depth.result,
        "height": height.result,
        "columns": width.result // result,
        "src_depth": depth.source,
        "src_height": height.source,
        "src_columns": width.source // source,
        "DEPTH": _constants(depth),
        "HEIGHT": _constants(height),
        "WIDTH": _constants(width),
        "MULTIPLIER": g.multiplier,
        "WIDE": g.wide,
        "OPERAND": _WORDS[operand],
        "PRECISION": precision,
        "SRC_ALIGN": source,
        "OUT_ALIGN": result,
        **band.constants(),
        **more,
    }
    return Launch(kernel, arguments, {"num_warps": band.warps, "num_stages": 2}, partial(_grid, g, use, count))


def _grid(g: Geometry, use: Use, count: int, at_once: int) -> tuple[int, int]:
    return programs(g, use, choose(g, use), count), count


def _constants(axis: Axis) -> tuple[int, int, int, int]:
    """Of the flipped kernel in the direction of grad_input, which is then another forward; see `geometry`."""
    kernel, stride, dilation, low = axis.constants
    return (kernel, 1, dilation, (kernel - 1) * dilation - low) if axis.adjoint else (kernel, stride, dilation, low)
