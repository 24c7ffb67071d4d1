"""The rules: which backends are tried where none was requested or registered, and nothing was measured.

On a CPU a backend comes before PyTorch's kernels where it is faster by an estimate (`costs`), and for two kinds of
problem that PyTorch's are always slow for, wherever it can compute them. Matrix products have rules of their own, for
MKL's cost little beside their arithmetic. ``benchmarks/derive.py`` writes `TABLE` and says what the rules lose.
Those of a GPU are in `proposals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal

import torch

from .._compat import avx512_here, cpu_lacks
from ..backends import of_patches
from ..problem import ConvProblem, Outputs
from ..settings import threads
from .costs import gains, library_of
from .measure.environment import mkl_at_its_best

#: Kind of problem -> the backends to try, in order, and how many times as fast as PyTorch's call as given each was in
#: the sweep, on geometric average.
# begin of the derived lines
TABLE: dict[str, dict[str, float]] = {
    "depthwise": {"native": 7.8},
    "emulated": {"native": 8.9, "aten:float32": 3.9},
}
# end of the derived lines

#: How many times as fast as PyTorch's kernels a backend must be by estimate: of matrix products in 32 bits and more,
#: which are estimated best; by ``native:amx``; in 16 bits in channels_last, where oneDNN copies nothing; and elsewhere.
_OF_PRODUCTS, _BY_AMX, _IN_16_BITS, _ELSEWHERE = 1.0, 1.3, 1.7, 1.45
#: FLOPs below which a matrix product that PyTorch computes without oneDNN is left to it: with operands in the caches,
#: ``native`` was 0.9x as fast forward, and 1.0x for the gradients (docs/rules.md).
_SMALL_PRODUCT = 3e6
#: FLOPs from which a product of patches gains.
_SMALL_PATCH = 1e6
#: Linear layers: rows from which packing takes a small part of the time, and the harmonic mean of the sizes from which
#: it does with AMX.
_MANY_ROWS, _MEAN_SIZE = 5000, 250


def by_rule(problem: ConvProblem, outputs: Outputs, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the backends that are expected to be faster than PyTorch's kernels on a CPU, best first, and why."""
    if device.type != "cpu":
        return
    lacking = cpu_lacks(problem.dtype)
    if not lacking and _one_patch(problem):
        yield "aten:patches", "the kernel covers the whole input, so that a pass is one product of matrices as they lie"
    for_mkl = not lacking and mkl_at_its_best() and _is_linear(problem)
    for way, why in _on_cpu(problem, outputs, lacking):
        if for_mkl and not _beats_mkl(way, problem):
            break
        yield way, why
    if not lacking and "grad_input" in outputs and _slow_scatter(problem):
        yield "aten:patches", "kernels do not overlap, and PyTorch's gradient of the input takes several times as long"
    if for_mkl:
        yield "aten:matmul", "a linear layer, and MKL is made for this processor"


def _on_cpu(p: ConvProblem, outputs: Outputs, lacking: str) -> Iterator[tuple[str, str]]:
    kind = kind_of(p, lacking)
    for way, gain in TABLE.get(kind or "", {}).items():
        if way != "aten:float32" or worth_converting(p, outputs, lacking):
            yield way, f"on {kind} problems {way} is {gain}x as fast as PyTorch, on average"
    if kind != "other":
        return
    for way, gain in gains(p, outputs).items():
        if gain >= least_gain(p, way):
            yield way, f"{way} is {gain:.1f}x as fast as PyTorch, by estimate"


def least_gain(p: ConvProblem, way: str) -> float:
    """Return how many times as fast as PyTorch's kernels a backend must be by estimate."""
    if p.unpadded_pointwise and p.dtype.itemsize > 2:
        return _OF_PRODUCTS
    if way == "native:amx":
        return _BY_AMX
    return _IN_16_BITS if p.dtype.itemsize == 2 and p.channels_last else _ELSEWHERE


def kind_of(p: ConvProblem, lacking: str) -> Literal["depthwise", "emulated", "other"] | None:
    """Return by what a problem is judged on a CPU: its line of `TABLE` or, for "other", its estimate.

    None is for problems that are always PyTorch's: those with more padding than products, which the tiles of ``native``
    would hold, and small matrix products.

    Args:
        lacking: what the processor has no arithmetic for in this dtype (`cpu_lacks`), with which PyTorch is slow.
    """
    padded = prod(dim.padded for dim in p.dims)
    if p.empty or padded - prod(p.input_size) > prod(p.output_size) * prod(p.kernel_size):
        return None
    if p.depthwise:
        return "depthwise"
    if lacking:
        return "emulated"
    small = p.unpadded_pointwise and p.flops < _SMALL_PRODUCT
    copied = p.ndim == 3 and p.channels_last  # by PyTorch, first
    return None if small and not copied and library_of(p) == "columns" else "other"


def worth_converting(p: ConvProblem, outputs: Outputs, lacking: str) -> bool:
    """Whether each value of the operands is in ten products or more; in fewer, converting takes longer than they do.

    For the gradient of the weight it is worth while in any case: some processors have no kernel for that in 16 bits.

    Args:
        lacking: `cpu_lacks`.
    """
    values = sum(map(prod, (p.input_shape, p.weight_shape, p.output_shape)))
    return "grad_weight" in outputs or (lacking == "all" and p.flops >= 20 * values)


def linear_gains(elements: int, out_features: int, in_features: int) -> bool:
    """Whether a linear layer is large enough to gain as a pointwise convolution: as such it costs 50 to 80 us more.

    On one and two threads of a Zen 4, with 64 to 46000 rows and 2 to 4096 features that lie in no cache, 449 layers of
    4 to 70 million FLOPs a pass and thread were 1.42x to 1.76x as fast as PyTorch's on geometric average, the least
    0.80x below 16 million and 0.95x above. With 32 to 160 rows, 206 layers were 1.22x to 1.50x, the least 0.99x; with
    fewer rows two of 61 lost, 0.89x. (For MKL see `_beats_mkl`.) One output feature is no product of matrices
    (0.6x to 0.8x). Nor is one input feature, whose stride may be anything: as an image it may lie contiguously, and its
    result then has no rows in memory.

    Args:
        elements: of the input.
    """
    enough = 2 * elements * out_features >= 2**24 * threads() and min(out_features, in_features) > 1
    return enough and elements >= 32 * in_features


def _is_linear(p: ConvProblem) -> bool:
    """A linear layer, which is an image of one row in channels_last."""
    return p.matrix_product and p.channels_last and p.groups == p.batch == p.input_size[0] == 1


def _beats_mkl(way: str, p: ConvProblem) -> bool:
    """Whether this kernel of ours computes a linear layer faster than MKL at its best.

    With few rows, packing the weight and writing its gradient are much of the work; with few output features packing
    the input is; with many input features both are as fast as arithmetic lets them. Elsewhere 48 random layers were
    1.16x (one thread) and 1.20x (two) as fast on a Xeon with AVX-512, the least 0.97x. Without it nothing was measured.

    AMX multiplies so fast that packing is much of the work where any size is small; 529 random layers that it computes
    were 1.31x (one thread) and 1.22x (two) as fast, 10 of them below 0.95x.
    """
    rows, many = p.input_size[1], p.input_size[1] >= _MANY_ROWS
    if way == "native:amx":
        return many or 3 / (1 / rows + 1 / p.in_channels + 1 / p.out_channels) >= _MEAN_SIZE
    return many and p.in_channels <= 512 and p.out_channels >= 48 and avx512_here()


def _one_patch(p: ConvProblem) -> bool:
    """A kernel as large as the input, as in an encoder that gets its patches one by one."""
    return of_patches(p) and prod(p.output_size) == 1 and p.flops >= _SMALL_PATCH


def _slow_scatter(p: ConvProblem) -> bool:
    """Kernels that do not overlap, of a problem whose gradient of the input oneDNN is slow at; it has no float64."""
    return of_patches(p) and p.flops >= _SMALL_PATCH and p.dtype.itemsize <= 4
