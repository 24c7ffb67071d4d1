"""From tensors to launches of `correlate`: what a pass, or the sweep of both gradients, of one problem runs."""

# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...problem import ConvProblem, Output
from .correlate import add_partials, correlate
from .geometry import Geometry, geometry
from .start import Launch
from .tiles import MOST_PROGRAMS, Tile, Use, choose, lines, parts

__all__ = ["Gradients", "Result", "adding", "bound", "grid_of"]


def bound(problem: ConvProblem, outputs: tuple[Output, ...], verify: Callable[..., None]) -> Callable[..., Any]:
    """What computes these outputs of a problem.

    Args:
        verify: called with a compiled kernel's hash, the outputs' names, the operands and the results of a first call.
    """
    if outputs in (("forward",), ("grad_input",)):
        return Result(problem, outputs, verify)
    return Gradients(problem, outputs, verify)


class Result:
    """``forward`` or ``grad_input`` of one problem."""

    def __init__(self, problem: ConvProblem, outputs: tuple[Output, ...], verify: Callable[..., None]) -> None:
        self._problem = problem
        self._outputs = outputs
        self._verify = verify
        self._adjoint = outputs == ("grad_input",)
        self._shape = problem.input_shape if self._adjoint else problem.output_shape
        self._launches: dict[bool, Launch] = {}

    def __call__(
        self, source: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        out = empty(source, self._shape, self._problem)
        weight = weight.contiguous()
        added = weight if bias is None else bias.contiguous()
        launch = self._launches.get(bias is None)
        if launch is None:
            g = geometry(self._problem, adjoint=self._adjoint)
            launch = self._launches[bias is None] = launch_of(g, "result", bias is not None, (-1, -1, -1))
        _, new = launch.start(source, source, weight, added, out, out, out)
        if new:
            self._verify(new, self._outputs, (source, weight, bias), (out,))
        return out


class Gradients:
    """``grad_weight`` of one problem, or two or three gradients: one launch, and one that adds its partial sums."""

    def __init__(self, problem: ConvProblem, outputs: tuple[Output, ...], verify: Callable[..., None]) -> None:
        self._problem = problem
        self._outputs = outputs
        self._verify = verify
        self._sweep = len(outputs) > 1
        self._with_bias = "grad_bias" in outputs
        g = geometry(problem, adjoint=self._sweep)
        use: Use = "sweep" if self._sweep else "sum"
        tile = choose(g, use)
        assert tile is not None
        self._main = launch_of(g, use, False, g.whole_tap if self._with_bias else (-1, -1, -1))
        most = parts(g, use, tile, MOST_PROGRAMS)
        self._weights = most * g.channels * g.kernel_elements
        self._values = self._weights + most * g.channels * self._with_bias
        self._partial = most > 1  # one part is the result itself
        self._adds: dict[int, Launch] = {}

    def __call__(
        self, grad_output: Tensor, input: Tensor, weight: Tensor | None = None, workspace: Tensor | None = None
    ) -> Any:
        p = self._problem
        source, centre = (grad_output, input) if self._sweep else (input, grad_output)
        out = empty(source, p.input_shape, p) if self._sweep else source
        taps = source if weight is None else weight.contiguous()
        result = source.new_empty(p.weight_shape)  # [C_out, 1, *k]
        bias = source.new_empty(p.out_channels) if self._with_bias else result
        partials, bias_partials = result, bias
        if self._partial:
            scratch = workspace
            if scratch is None:
                scratch = torch.empty(self._values * 4, dtype=torch.uint8, device=source.device)
            partials = scratch.view(torch.float32)
            bias_partials = partials[self._weights :] if self._with_bias else partials
        count, new = self._main.start(source, centre, taps, taps, out, partials, bias_partials)
        if self._partial:
            add = self._adds.get(count)
            if add is None:
                add = self._adds[count] = adding(count, result.numel(), bias.numel() if self._with_bias else 0)
            add.start(partials, result, bias_partials, bias)
        results = {"grad_input": out, "grad_weight": result, "grad_bias": bias}
        found = tuple(results[output] for output in self._outputs)
        if new:
            self._verify(new, self._outputs, (grad_output, input, weight), found)
        return found if self._sweep else result


def empty(like: Tensor, shape: tuple[int, ...], problem: ConvProblem) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=problem.memory_format)


def launch_of(g: Geometry, use: Use, with_bias: bool, bias_tap: tuple[int, int, int]) -> Launch:
    """A launch that takes (source, centre, weight, bias, out, partial sums, those of grad_bias)."""
    tile = choose(g, use)
    assert tile is not None
    depth, height, width = g.axes
    arguments = {
        "batch": g.batch,
        "channels": g.channels // tile.vector,
        "depth": depth.result,
        "height": height.result,
        "columns": width.result // tile.stored,
        "src_depth": depth.source,
        "src_height": height.source,
        "src_columns": width.source // tile.loaded,
        "DEPTH": depth.constants,
        "HEIGHT": height.constants,
        "WIDTH": width.constants,
        "ADJOINT": g.adjoint,
        "MULTIPLIER": g.multiplier,
        "CHANNELS_LAST": g.channels_last,
        "WIDE": g.wide,
        "RESULT": use != "sum",
        "SUM": use != "result",
        "HAS_BIAS": with_bias,
        "BIAS_TAP": bias_tap,
        "EXACT": height.result % tile.rows == 0 and width.result % tile.columns == 0,
        **tile.constants(),
    }
    warps = max(1, tile.lanes // (64 if torch.version.hip is not None else 32))
    return Launch(correlate, arguments, {"num_warps": warps}, partial(grid_of, g, use, tile))


def grid_of(g: Geometry, use: Use, tile: Tile, programs: int) -> tuple[int, int]:
    """The size of the grid, and the parts into which it cuts the batch and space."""
    count = parts(g, use, tile, programs)
    return lines(g, tile) * count, count


def adding(count: int, weights: int, biases: int) -> Launch:
    """A launch that takes (partial sums, result, those of a bias, bias) and adds so many parts."""
    size = 64
    blocks = -(-weights // size) + -(-biases // size)
    arguments = {"weights": weights, "biases": biases, "BP": 32, "BN": size}
    return Launch(add_partials, arguments, {"num_warps": 4}, lambda _: (blocks, count))
