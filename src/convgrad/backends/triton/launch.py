"""From tensors to launches: a problem is prepared once, a call looks its operands' strides up and starts the kernel.

Preparing: choose the lanes, describe the sum (`geometry`), choose the tile (`tiles`), and bring strides, sizes and
constants together with a kernel in a `start.Launch`. An operand is copied only if its lanes are not neighbours in
memory.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import ConvProblem
from . import channel_launch, kernels, patch_launch
from . import grad_weight as grad_weight_kernels
from .arguments import constants, programs, sizes, strides, weight_strides
from .geometry import Geometry, geometry, needs_wide
from .operands import channel_last, filter_of, ready, result_like, sum_lanes
from .start import Call, Launch, capturing, recording
from .tiles import Tile, Use, fixed, parts
from .tuning import exact, may_tune, tuner

__all__ = [
    "Call",
    "Result",
    "Sum",
    "adding",
    "bound",
    "capturing",
    "grad_input",
    "grad_weight",
    "output",
    "recording",
    "remember",
    "start",
    "sweep",
]

What = Literal["forward", "grad_input", "grad_weight", "sweep", "sweep+bias"]
_MOST = 64  # sets of strides that are remembered for a problem


def _launch(g: Geometry, use: Use, arguments: dict[str, Any], tile: Tile, shares: int, tune: bool) -> Launch:
    kernel = kernels.correlate if use == "result" else grad_weight_kernels.correlate_sum
    find = partial(tuner, kernel, g, use, bool(arguments.get("EXACT"))) if tune else None
    chosen = {**tile.constants(use), "num_warps": tile.warps}
    return Launch(kernel, {**sizes(g), **constants(g), **arguments}, chosen, partial(programs, g, shares), find)


# ---- forward and grad_input ------------------------------------------------------------------------


class Result:
    """``forward`` or ``grad_input`` of one problem: a function of (source, weight, bias)."""

    def __init__(self, problem: ConvProblem, *, adjoint: bool, tune: bool, wide: bool) -> None:
        self._problem = problem
        self._wide = wide
        self._adjoint = adjoint
        self._tune = tune
        self._shape = problem.input_shape if adjoint else problem.output_shape
        self._strides = result_like(problem, self._shape).stride()
        #: Each with its lanes.
        self._launches: dict[object, tuple[Launch, bool]] = {}

    def __call__(self, source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        p = self._problem
        out = source.new_empty_strided(self._shape, self._strides)
        known = self._launches.get((source.stride(), bias is None))
        if known is None:
            lanes = channel_last(p, source)
            source = ready(p, source, lanes)
            known = self._launches.get((source.stride(), bias is None))
            known = known or self._prepare(source, out, lanes, bias is not None)
        launch, lanes = known
        weight = filter_of(weight, lanes)
        added = weight if bias is None else bias.contiguous()
        addresses = (source.data_ptr(), weight.data_ptr(), added.data_ptr(), out.data_ptr())
        if not launch.again(source.device.index, *addresses):
            launch.first(source, weight, added, out)
        return out

    def _prepare(self, source: Tensor, out: Tensor, lanes: bool, with_bias: bool) -> tuple[Launch, bool]:
        p = self._problem
        g = geometry(p, adjoint=self._adjoint, channel_lanes=lanes, wide=self._wide or needs_wide(source))
        patches = channel_launch if lanes else patch_launch
        launch = patches.result(g, source, out, with_bias, self._tune)
        launch = launch or self._by_rows(g, source, out, with_bias)
        return remember(self._launches, (source.stride(), not with_bias), (launch, lanes))

    def _by_rows(self, g: Geometry, source: Tensor, out: Tensor, with_bias: bool) -> Launch:
        arguments = {
            **strides("src", g, source),
            **strides("out", g, out),
            **weight_strides(g),
            "HAS_BIAS": with_bias,
        }
        return _launch(g, "result", arguments, fixed(g, "result"), 0, self._tune)


def remember(known: dict[object, Any], key: object, value: Any) -> Any:
    if len(known) >= _MOST:
        known.clear()
    known[key] = value
    return value


# ---- sums ------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """How a sum is cut, and how its shares are added: nothing to add where there is one."""

    lanes: bool
    main: Launch
    add: Launch | None
    #: Values of the scratch memory, and those in front of the shares of grad_bias.
    values: int
    before_bias: int


class Sum:
    """``grad_weight`` of one problem, or all its gradients: a function of (source, centre, weight, workspace).

    The source is what slides: ``input`` for ``grad_weight`` alone, ``grad_output`` for a sweep.
    """

    def __init__(self, problem: ConvProblem, *, sweep: bool, with_bias: bool, tune: bool, wide: bool) -> None:
        self._problem = problem
        self._wide = wide
        self._sweep = sweep
        self._with_bias = with_bias
        self._tune = tune
        self._accumulated = torch.float64 if problem.dtype == torch.float64 else torch.float32
        self._input_strides = result_like(problem, problem.input_shape).stride()
        self._shares: dict[object, Shares] = {}

    def __call__(
        self, source: Tensor, centre: Tensor, weight: Tensor | None, workspace: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """grad_input (for a sweep), grad_weight and grad_bias (if asked for)."""
        p = self._problem
        out = source.new_empty_strided(p.input_shape, self._input_strides) if self._sweep else None
        known = self._shares.get((source.stride(), centre.stride()))
        if known is None:
            lanes = sum_lanes(p, self._sweep, source, centre)
            source, centre = ready(p, source, lanes), ready(p, centre, lanes)
            known = self._shares.get((source.stride(), centre.stride())) or self._prepare(source, centre, out, lanes)
        result = source.new_empty(p.weight_shape)  # [C_out, 1, *k]
        bias = source.new_empty(p.out_channels) if self._with_bias else None
        shares, bias_shares = result, result if bias is None else bias
        if known.values:
            if workspace is None:
                shares = source.new_empty(known.values, dtype=self._accumulated)
            else:
                shares = workspace.view(self._accumulated)
            bias_shares = shares if bias is None else shares[known.before_bias :]
        flat = source if weight is None else filter_of(weight, known.lanes)
        start(known.main, source, centre, flat, source if out is None else out, shares, bias_shares)
        if known.add is not None:
            start(known.add, shares, result, bias_shares, result if bias is None else bias)
        # [C, 1, *k] has the same strides in every format.
        return out, result, bias

    def _prepare(self, source: Tensor, centre: Tensor, out: Tensor | None, lanes: bool) -> Shares:
        p, use = self._problem, "sweep" if self._sweep else "sum"
        wide = self._wide or needs_wide(source, centre)
        g = geometry(p, adjoint=self._sweep, channel_lanes=lanes, wide=wide)
        bias_tap = g.field("whole_tap") if self._with_bias else (-1, -1, -1)
        patches = channel_launch if lanes else patch_launch
        found = patches.sums(g, use, source, centre, out, bias_tap, self._tune)
        main, count = found or self._by_rows(g, use, source, centre, out, bias_tap)
        elements = g.kernel_elements
        share_c, share_k = _share_strides(g, count)
        add = adding(g, count, share_c, share_k, self._with_bias) if count > 1 else None
        values = count * g.channels * (elements + self._with_bias) if count > 1 else 0
        shares = Shares(lanes, main, add, values, count * g.channels * elements)
        return remember(self._shares, (source.stride(), centre.stride()), shares)

    def _by_rows(
        self,
        g: Geometry,
        use: Use,
        source: Tensor,
        centre: Tensor,
        out: Tensor | None,
        bias_tap: tuple[int, int, int],
    ) -> tuple[Launch, int]:
        tile = fixed(g, use)
        count = parts(g, tile)
        share_c, share_k = _share_strides(g, count)
        arguments = {
            **strides("src", g, source),
            **strides("centre", g, centre),
            **strides("out", g, source if out is None else out),
            **(weight_strides(g) if self._sweep else {"weight_c": 0, "weight_k": 0}),
            "share_c": share_c,
            "share_k": share_k,
            "parts": count,
            "SWEEP": self._sweep,
            "EXACT": exact(g, tile),
            "BIAS_TAP": bias_tap,
        }
        return _launch(g, use, arguments, tile, count, self._tune), count


def _share_strides(g: Geometry, count: int) -> tuple[int, int]:
    """Between channels and between kernel positions of a share; the only one is the result itself."""
    return (1, g.channels) if g.channel_lanes and count > 1 else (g.kernel_elements, 1)


def adding(g: Geometry, count: int, share_c: int, share_k: int, with_bias: bool) -> Launch:
    """A launch that takes (shares, result, shares of the bias, bias)."""
    size = g.channels * g.kernel_elements
    arguments = {
        "parts": count,
        "count": size,
        "share_c": share_c,
        "share_k": share_k,
        "ELEMENTS": g.kernel_elements,
        "HAS_BIAS": with_bias,
        "ACC": tl.float64 if g.double else tl.float32,
    }
    tile = {"BP": 32, "BN": 64, "num_warps": 4}

    def blocks(tile: Any) -> int:
        return triton.cdiv(size, tile["BN"]) + (triton.cdiv(g.channels, tile["BN"]) if with_bias else 0)

    return Launch(grad_weight_kernels.add_shares, arguments, tile, blocks)


def start(launch: Launch, *tensors: Tensor) -> None:
    if not launch.again(tensors[0].device.index, *[t.data_ptr() for t in tensors]):
        launch.first(*tensors)


# ---- the passes ------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _bound(problem: ConvProblem, what: What, tune: bool, wide: bool) -> Callable[..., Any]:
    if what in ("forward", "grad_input"):
        return Result(problem, adjoint=what == "grad_input", tune=tune, wide=wide)
    return Sum(problem, sweep=what != "grad_weight", with_bias=what == "sweep+bias", tune=tune, wide=wide)


def bound(problem: ConvProblem, what: What, *, fixed_tiles: bool = False, wide: bool = False) -> Callable[..., Any]:
    """A `Result` or a `Sum` under PyTorch's flags as they are now; made once and remembered.

    Args:
        wide: offsets have 64 bits though the problem needs no more than 32.
    """
    return _bound(problem, what, not fixed_tiles and may_tune(), wide)


def output(problem: ConvProblem, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The pass ``forward``."""
    return bound(problem, "forward")(input, weight, bias)


def grad_input(problem: ConvProblem, grad_output: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The pass ``grad_input``; a bias is that of a transposed convolution."""
    return bound(problem, "grad_input")(grad_output, weight, bias)


def grad_weight(problem: ConvProblem, grad_output: Tensor, input: Tensor, workspace: Tensor | None = None) -> Tensor:
    """The pass ``grad_weight``."""
    return bound(problem, "grad_weight")(input, grad_output, None, workspace)[1]


def sweep(
    problem: ConvProblem,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    with_bias: bool,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """grad_input, grad_weight and, if asked for, grad_bias; see `Axis.whole_tap` for when a bias can be had."""
    return bound(problem, "sweep+bias" if with_bias else "sweep")(grad_output, input, weight, workspace)
