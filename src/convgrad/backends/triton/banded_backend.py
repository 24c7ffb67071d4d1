"""The backend that computes large depthwise kernels on the tensor cores; see `banded` for how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import settings
from ...problem import ConvProblem, Output, Pass
from ..base import Arithmetic, capability
from . import TritonBackend
from .bands import LEAST_COLUMNS, partial_values
from .geometry import geometry

#: Older ones know neither TF32 nor bfloat16, and Triton multiplies float16 one by one there, too.
_TENSOR_CORES = (8, 0)


def _tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products are TF32: float32 on an NVIDIA GPU; others multiply exactly."""
    return dtype == torch.float32 and device.type == "cuda" and torch.version.hip is None


class TritonBandedBackend(TritonBackend):
    """Depthwise kernels of 9 columns and more as products with banded matrices.

    A backend of its own beside ``triton``, so that it is checked, measured, chosen and banned for itself.
    """

    name = "triton:banded"
    summary = "large depthwise kernels on a GPU's tensor cores, as products with banded matrices"
    sweeps = ()
    layouts = ("contiguous",)

    def _reasons_of_the_machine(self, problem: ConvProblem, device: torch.device) -> list[str]:
        reasons = super()._reasons_of_the_machine(problem, device)
        chip = capability(device)
        if chip is not None and chip < _TENSOR_CORES:
            reasons.append(f"Triton uses tensor cores from compute capability 8.0 on, this GPU has {chip[0]}.{chip[1]}")
        if _tf32(problem.dtype, device) and not settings.cudnn_allows_tf32():
            reasons.append("it multiplies float32 in TF32, which torch.backends.cudnn.allow_tf32 forbids")
        return reasons

    def _reasons_of_the_kernels(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> list[str]:
        g = geometry(problem, adjoint=outputs == ("grad_input",))
        if g.axes[2].kernel < LEAST_COLUMNS:
            return [f"the band of a kernel of fewer than {LEAST_COLUMNS} columns is mostly zeros"]
        if g.adjoint and any(axis.stride > 1 for axis in g.axes):
            return ["it computes grad_input without a stride only"]
        return []

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        if "grad_weight" not in outputs or problem.empty or problem.in_channels != problem.groups:
            return 0
        return 4 * partial_values(problem)

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "tf32" if _tf32(problem.dtype, device) else "direct"

    def kernel_name(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> str:
        return "banded"

    def _made(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> Callable[..., Any]:
        from .banded_launch import bound

        return bound(problem, outputs[0], "tf32" if _tf32(problem.dtype, device) else "ieee", self._verifier(problem))
