"""The rules of a GPU: which backend is proposed for a problem. One timing against PyTorch's own decides, on each card.

A proposal says that the evidence is strong, not how much is gained on which card: that is measured at the first call
(`measurer.confirmed`), with the processor's time, and stored. Until then PyTorch's kernels are the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from ..backends import capability, of_patches
from ..problem import ConvProblem
from ..settings import capturing, determinism_demanded, measuring

#: The oldest NVIDIA GPUs for which Triton compiles.
_LEAST_CAPABILITY = (8, 0)
#: Bytes of operands and result which any GPU reads and writes in about the time of a launch: no kernel gains below.
_LEAST_BYTES = 4 << 20
#: Columns of a kernel from which tensor cores multiply it.
_WIDE_KERNEL = 9
#: Kernel elements from which PyTorch's depthwise kernels take less long out of channels_last: 7x7.
_LARGE_PLANE = 49


def proposals(problem: ConvProblem, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the backends that may be faster than PyTorch's own on a GPU, best first, and why."""
    if device.type == "cuda" and problem.least_bytes >= _LEAST_BYTES:
        yield from _depthwise(problem, device)
        yield from _routes(problem)


def not_timed(device: torch.device) -> str:
    """Return why a proposal may not be timed on a device now; empty where it may."""
    if determinism_demanded(device):
        return "under deterministic algorithms nothing is timed"
    if measuring[0] == 0:
        return "measure(False) forbids timing"
    return "in a capture nothing is timed" if device.type == "cuda" and capturing() else ""


def _depthwise(p: ConvProblem, device: torch.device) -> Iterator[tuple[str, str]]:
    """Depthwise kernels of ours, on NVIDIA's GPUs; on others they were never run.

    PyTorch's native kernels read an input once for each kernel position to sum grad_weight; cuDNN has both gradients
    in two calls, where ours read each operand once (benchmarks/results/gpu-h100.md). Wide kernels in float32 are not
    proposed on tensor cores: that would be TF32, which PyTorch's depthwise kernels do not use.
    """
    found = capability(device)
    if found is None or found < _LEAST_CAPABILITY or not p.depthwise or prod(p.kernel_size) == 1:
        return
    if p.kernel_size[-1] >= _WIDE_KERNEL and p.dtype.itemsize == 2:
        yield "triton:banded", "tensor cores multiply wide depthwise kernels, and PyTorch's do not use them"
    yield "triton", "PyTorch's depthwise kernels read their operands several times"


def _routes(p: ConvProblem) -> Iterator[tuple[str, str]]:
    """Other forms of PyTorch's call, where public reports say that its usual one is slow (docs/gpu.md has them)."""
    if of_patches(p):
        yield "aten:patches", "patches are one matrix product, for which convolution libraries may have no fast kernel"
    if p.ndim == 3 and p.dtype.itemsize == 2 and not (p.channels_last or p.depthwise) and torch.version.hip is None:
        yield "aten:channels_last", "PyTorch keeps volumes of 16 bits away from some releases of cuDNN, but not these"
    if p.channels_last and p.groups > 1 and (not p.depthwise or prod(p.kernel_size) >= _LARGE_PLANE):
        yield "aten:contiguous", "cuDNN's kernels for channels_last are slow with groups"
