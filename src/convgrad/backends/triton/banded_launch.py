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
from .launch import adding
from .start import Launch

__all__ = ["bound"]

_WORDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def bound(problem: ConvProblem, output: Output, precision: str, verify: Callable[..., None]) -> Callable[..., Tensor]:
    """A pass of a problem, as `launch.bound` gives it; float32 is multiplied in this precision, Triton's word."""
    return (Sum if output == "grad_weight" else Result)(problem, output, precision, verify)


class Result:
    """``forward`` or ``grad_input`` of one problem."""

    def __init__(self, problem: ConvProblem, output: Output, precision: str, verify: Callable[..., None]) -> None:
        self._problem = problem
        self._output = output
        self._precision = precision
        self._verify = verify
        self._launches: dict[bool, Launch] = {}

    def __call__(
        self, source: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        p = self._problem
        shape = p.input_shape if self._output == "grad_input" else p.output_shape
        source, weight = source.contiguous(), weight.contiguous()
        out = torch.empty(shape, dtype=p.dtype, device=source.device)
        launch = self._launches.get(bias is None)
        if launch is None:
            launch = self._launches[bias is None] = self._launch(bias is not None)
        _, new = launch.start(source, weight, weight if bias is None else bias.contiguous(), out)
        if new:
            self._verify(new, (self._output,), (source, weight, bias), (out,))
        return out.contiguous(memory_format=p.memory_format)

    def _launch(self, with_bias: bool) -> Launch:
        adjoint = self._output == "grad_input"
        g = geometry(self._problem, adjoint=adjoint)
        more = {"FLIPPED": adjoint, "HAS_BIAS": with_bias}
        return _launch(banded.correlate, self._problem, g, "result", self._precision, more, 0)


class Sum:
    """``grad_weight`` of one problem."""

    def __init__(self, problem: ConvProblem, output: Output, precision: str, verify: Callable[..., None]) -> None:
        self._problem = problem
        self._verify = verify
        g = geometry(problem, adjoint=False)
        count = parts(g, choose(g, "sum"))
        self._values = count * g.channels * g.kernel_elements
        more = {"KP": triton.next_power_of_2(g.axes[2].kernel)}
        self._main = _launch(banded.correlate_sum, problem, g, "sum", precision, more, count)
        self._add = adding(count, g.channels * g.kernel_elements, 0) if count > 1 else None

    def __call__(
        self, grad_output: Tensor, input: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        p = self._problem
        source, centre = input.contiguous(), grad_output.contiguous()
        result = source.new_empty(p.weight_shape)  # [C_out, 1, *k]
        partials = result
        if self._add is not None:
            if workspace is None:
                workspace = torch.empty(self._values * 4, dtype=torch.uint8, device=source.device)
            partials = workspace.view(torch.float32)
        _, new = self._main.start(source, centre, partials)
        if self._add is not None:
            self._add.start(partials, result, partials, result)
        if new:
            self._verify(new, ("grad_weight",), (grad_output, input, None), (result,))
        return result


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
