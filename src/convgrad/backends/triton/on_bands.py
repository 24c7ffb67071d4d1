"""The backend that computes large depthwise kernels on the tensor cores; see `banded` for how."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import settings
from ...problem import ConvProblem, Output, Pass
from ..base import Arithmetic, Kernel, capability
from . import TritonBackend
from .bands import LEAST_COLUMNS, Precision, advantage, align, share_elements
from .geometry import geometry, needs_wide, view_5d
from .operands import planes
from .ways import Way, like, tiny

__all__ = ["TritonBandedBackend"]

#: Three TF32 products are one of float32 but for 2**-21 of it; a float32 sum of 64 products may be that far off.
_LEAST_SUM = 64
#: Older ones know neither TF32 nor bfloat16, and Triton multiplies float16 one by one there, too.
_TENSOR_CORES = (8, 0)


def precision(dtype: torch.dtype, device: torch.device) -> Precision:
    """How operands are multiplied on a device, under PyTorch's flags as they are now."""
    if dtype != torch.float32 or device.type == "cpu" or torch.version.hip is not None:
        return "ieee"
    return "tf32" if settings.cudnn_allows_tf32() else "tf32x3"


class TritonBandedBackend(TritonBackend):
    """Depthwise kernels of 9 columns and more as products with banded matrices.

    A backend of its own beside ``triton``, so that it is checked, measured, chosen and banned for itself.
    """

    name = "triton:banded"
    summary = "large depthwise kernels on a GPU's tensor cores, as products with banded matrices"
    sweeps = ()

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons = super().reasons_against(problem, outputs, device)
        if len(outputs) > 1:
            return ["it computes one output at a time"]
        if problem.dtype == torch.float64:
            reasons.append("it has no kernel for float64")
        chip = capability(device)
        if chip is not None and chip < _TENSOR_CORES:
            reasons.append(f"Triton uses tensor cores from compute capability 8.0 on, this GPU has {chip[0]}.{chip[1]}")
        columns = geometry(problem, adjoint=False, channel_lanes=False).axes[2].kernel
        if columns < LEAST_COLUMNS:
            reasons.append(f"the band of a kernel of fewer than {LEAST_COLUMNS} columns is mostly zeros")
        if precision(problem.dtype, device) == "tf32x3" and _shortest_sum(problem, outputs) < _LEAST_SUM:
            reasons.append(f"without TF32 its products are not exact enough for sums of fewer than {_LEAST_SUM}")
        return reasons

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        if "grad_weight" not in outputs or problem.empty or problem.in_channels != problem.groups:
            return 0
        return share_elements(problem) * 4

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "tf32" if precision(problem.dtype, device) == "tf32" else "direct"

    def expected_speedup(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> float:
        """Not measured on any GPU: where the model of `bands` expects twice the speed of ``triton``."""
        if self.reasons_against(problem, outputs, device):
            return 0.0
        scalar = super().expected_speedup(problem, outputs, device)
        return 2 * scalar if advantage(problem, precision(problem.dtype, device)) >= 2 else 0.0

    def _made(
        self, problem: ConvProblem, outputs: tuple[Output, ...], *, fixed_tiles: bool = False, wide: bool = False
    ) -> Kernel:
        from . import banded_launch

        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]

        def run(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            way = precision(problem.dtype, a.device)
            return banded_launch.bound(problem, pass_, way, fixed_tiles=fixed_tiles, wide=wide)(a, b, bias, workspace)

        return run

    def _way(self, problem: ConvProblem, what: str, a: Tensor, b: Tensor) -> BandWay:
        """What tells the kernels of one pass and dtype apart."""
        g = geometry(problem, adjoint=what == "grad_input", channel_lanes=False)
        source, centre = (b, a) if what == "grad_weight" else (a, None)
        shape = problem.input_shape if what == "grad_input" else problem.output_shape
        result = centre if centre is not None else torch.empty(shape, dtype=problem.dtype, device="meta")
        source, result = (planes(problem, like(t)) for t in (source, result))
        return BandWay(
            align((*view_5d(g, source)[:4], g.axes[2].source), problem.dtype.itemsize),
            align((*view_5d(g, result)[:4], g.axes[2].result), problem.dtype.itemsize),
            any(s > 1 for s in problem.stride),
            g.wide or needs_wide(source, result),
            precision(problem.dtype, a.device),
        )

    def _fault(self, dtype: torch.dtype, what: str, way: Any, device: torch.device) -> str | None:
        from .selfcheck import first_fault

        made = partial(self._made, fixed_tiles=True, wide=way.wide)
        here = Way("patches", way.result, way.source, strided=way.strided)
        return first_fault(what, dtype, here, device, tiny(what, dtype, here, (9, 11)), made)


class BandWay(NamedTuple):
    """What tells kernels for one pass and dtype apart: vectors of source and result, offsets, the way of products."""

    source: int
    result: int
    strided: bool
    wide: bool
    precision: Precision


def _shortest_sum(problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
    """Products in a sum of this pass, where no border cuts it."""
    if "grad_weight" in outputs:
        return problem.batch * prod(problem.output_size)
    kernel, stride = prod(problem.kernel_size), prod(problem.stride)
    return kernel if "forward" in outputs else kernel // stride
