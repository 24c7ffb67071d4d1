"""From tensors to launches of `banded`: planes of neighbouring columns, their alignment, tiles, shares.

An operand in another layout (channels_last) is copied first and a result in one is copied last: a band takes hundreds
of products for each value that is moved, and columns that lie apart would be loaded one by one.
"""

# pyright: reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import ConvProblem, Pass
from . import banded
from .arguments import constants
from .bands import Precision, Use, align, candidates, fixed, parts, programs
from .geometry import Geometry, geometry, needs_wide, view_5d
from .launch import adding, remember, start
from .operands import planes
from .start import Launch
from .tuning import may_tune

__all__ = ["bound"]

INTERPRETED = not isinstance(banded.correlate, triton.runtime.JITFunction)
_CONSTANTS = ("KERNEL", "STRIDE", "DILATION", "MULTIPLIER", "WIDE")
_DIRECTED = ("PHASES", "TAPS", "TAP_STRIDE", "SRC_STEP", "TAP_STEP", "ADJOINT")


def _described(g: Geometry, name: str, t: Tensor, width: int) -> dict[str, int]:
    """Strides and length of a row, divided by what divides them all."""
    strides = view_5d(g, t)[:4]
    step = align((*strides, width), t.itemsize)
    columns = "src_columns" if name == "src" else "columns"
    names = (*(f"{name}_{axis}" for axis in "ncdh"), columns)
    values = {key: n // step for key, n in zip(names, (*strides, width), strict=True)}
    return {**values, f"{name.upper()}_ALIGN": step}


def _known(problem: ConvProblem, g: Geometry, precision: Precision) -> dict[str, Any]:
    depth, height, _ = g.axes
    # The interpreter gets sums of bfloat16 wrong.
    operand = torch.float32 if INTERPRETED and problem.dtype == torch.bfloat16 else problem.dtype
    every = constants(g)
    return {
        **{name: every[name] for name in _CONSTANTS},
        **{f"pad_{axis}": n for axis, n in zip("dhw", g.field("low"), strict=True)},
        "batch": g.batch,
        "channels": g.channels,
        "depth": depth.result,
        "height": height.result,
        "src_depth": depth.source,
        "src_height": height.source,
        "OPERAND": _WORDS[operand],
        "PRECISION": precision,
        "DEEP": depth.result > 1,
    }


_WORDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Result:
    """``forward`` or ``grad_input`` of one problem: a function of (source, weight, bias, workspace)."""

    def __init__(self, problem: ConvProblem, adjoint: bool, precision: Precision, tune: bool, wide: bool) -> None:
        self._problem = problem
        self._wide = wide
        self._tune = tune
        self._adjoint = adjoint
        self._precision: Precision = precision
        self._shape = problem.input_shape if adjoint else problem.output_shape
        self._launches: dict[object, Launch] = {}

    def __call__(
        self, source: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        p = self._problem
        source, weight = planes(p, source), weight.contiguous()
        out = torch.empty(self._shape, dtype=p.dtype, device=source.device)  # [N, C, *space], contiguous
        key = (source.stride(), bias is None)
        launch = self._launches.get(key) or remember(self._launches, key, self._prepare(source, out, bias is not None))
        start(launch, source, weight, weight if bias is None else bias.contiguous(), out)
        return out.contiguous(memory_format=p.memory_format)

    def _prepare(self, source: Tensor, out: Tensor, with_bias: bool) -> Launch:
        p = self._problem
        g = geometry(p, adjoint=self._adjoint, channel_lanes=False, wide=self._wide or needs_wide(source))
        every = constants(g)
        arguments = {
            **_known(p, g, self._precision),
            **{name: every[name] for name in _DIRECTED},
            **_described(g, "src", source, g.axes[2].source),
            **_described(g, "out", out, g.axes[2].result),
            "HAS_BIAS": with_bias,
        }
        return _launch(banded.correlate, g, "result", arguments, 0, self._tune)


class Sum:
    """``grad_weight`` of one problem: a function of (grad_output, input, bias, workspace)."""

    def __init__(self, problem: ConvProblem, precision: Precision, tune: bool, wide: bool) -> None:
        self._problem = problem
        self._wide = wide
        self._tune = tune
        self._precision: Precision = precision
        self._launches: dict[object, tuple[Launch, Launch | None, int]] = {}

    def __call__(
        self, grad_output: Tensor, input: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None
    ) -> Tensor:
        p = self._problem
        source, centre = planes(p, input), planes(p, grad_output)
        key = (source.stride(), centre.stride())
        main, add, values = self._launches.get(key) or remember(self._launches, key, self._prepare(source, centre))
        result = torch.empty(p.weight_shape, dtype=p.dtype, device=source.device)  # [C_out, 1, *k]
        shares = result
        if add is not None:
            scratch = torch.empty(values, dtype=torch.float32, device=source.device) if workspace is None else workspace
            shares = scratch.view(torch.float32)
        start(main, source, centre, shares)
        if add is not None:
            start(add, shares, result, shares, result)
        return result

    def _prepare(self, source: Tensor, centre: Tensor) -> tuple[Launch, Launch | None, int]:
        p = self._problem
        wide = self._wide or needs_wide(source, centre)
        g = geometry(p, adjoint=False, channel_lanes=False, wide=wide)
        count, elements = parts(g, fixed(g, "sum", self._precision)), g.kernel_elements
        arguments = {
            **_known(p, g, self._precision),
            **_described(g, "src", source, g.axes[2].source),
            **_described(g, "centre", centre, g.axes[2].result),
            "parts": count,
            "KP": triton.next_power_of_2(g.axes[2].kernel),
        }
        main = _launch(banded.correlate_sum, g, "sum", arguments, count, self._tune)
        add = adding(g, count, elements, 1, False) if count > 1 else None
        return main, add, count * g.channels * elements


# ---- launches --------------------------------------------------------------------------------------


def _launch(kernel: Any, g: Geometry, use: Use, arguments: dict[str, Any], shares: int, tune: bool) -> Launch:
    precision = arguments["PRECISION"]
    find = partial(_tuner, kernel, g, use, precision) if tune else None
    return Launch(kernel, arguments, fixed(g, use, precision).constants(), partial(programs, g, use, shares), find)


@lru_cache(maxsize=512)
def _tuner(kernel: Any, g: Geometry, use: Use, precision: Precision) -> Any:
    """A kernel that measures its tiles on first use of a size and keeps the fastest; see `tuning`."""
    configs = []
    for band in candidates(g, use, precision):
        tile = band.constants()
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        configs.append(triton.Config(tile, **options))
    return triton.autotune(configs=configs, key=_TUNED_BY, cache_results=True)(kernel)


_TUNED_BY = ["batch", "channels", "depth", "height", "columns", "src_depth", "src_height", "src_columns"]


@lru_cache(maxsize=4096)
def _bound(problem: ConvProblem, pass_: Pass, precision: Precision, tune: bool, wide: bool) -> Callable[..., Tensor]:
    if pass_ == "grad_weight":
        return Sum(problem, precision, tune, wide)
    return Result(problem, pass_ == "grad_input", precision, tune, wide)


def bound(
    problem: ConvProblem, pass_: Pass, precision: Precision, *, fixed_tiles: bool = False, wide: bool = False
) -> Callable[..., Tensor]:
    """A pass of one problem under PyTorch's flags as they are now: a function of (a, b, bias, workspace).

    Args:
        wide: offsets have 64 bits though the problem needs no more than 32.
    """
    return _bound(problem, pass_, precision, not fixed_tiles and may_tune(), wide)
