"""The rules: which backends are tried where none was requested or registered, and nothing was measured.

On a CPU a backend comes before PyTorch's kernels where it is faster by an estimate (`costs`), and for two kinds of
problem that PyTorch's are always slow for, wherever it can compute them. Matrix products have rules of their own, for
MKL's cost little beside their arithmetic. ``benchmarks/derive.py`` writes `TABLE`. On a GPU a rule only proposes: how
much is gained on which card is measured at the first call (`measure.measurer.watched`). Until then PyTorch's run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from math import log2, prod
from typing import Literal

import torch

from .._compat import avx512_here, cpu_lacks
from ..backends import capability, of_patches, transform_sizes
from ..problem import ConvProblem, Outputs
from ..settings import threads
from .costs import gains, library_of
from .measure.environment import mkl_at_its_best

#: Kind of problem -> the backends to try, in order, and how many times as fast as PyTorch's call as given each was in
#: the sweep, on geometric average.
# begin of the derived lines
TABLE: dict[str, dict[str, float]] = {
    "depthwise": {"native": 8.0},
    "emulated": {"native": 9.1, "aten:float32": 4.2},
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
#: Products for each operation of a Fourier transform (`products_per_frequency`) from which transforms gain, and FLOPs
#: below which their many calls take longer (docs/rules.md).
_LONG, _SHORT = 40, 5e7
#: Linear layers: rows from which packing takes a small part of the time, and the harmonic mean of the sizes from which
#: it does with AMX.
_MANY_ROWS, _MEAN_SIZE = 5000, 250


def by_rule(p: ConvProblem, outputs: Outputs, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the backends that are expected to be faster than PyTorch's kernels on a CPU, best first, and why."""
    if device.type != "cpu":
        return
    lacking = cpu_lacks(p.dtype)
    patches = not lacking and of_patches(p) and p.flops >= _SMALL_PATCH
    if patches and prod(p.output_size) == 1:  # as in an encoder that gets its patches one by one
        yield "aten:patches", "the kernel covers the whole input, so that a pass is one product of matrices as they lie"
    # A linear layer is an image of one row in channels_last.
    linear = p.matrix_product and p.channels_last and p.groups == p.batch == p.input_size[0] == 1
    for_mkl = linear and not lacking and mkl_at_its_best()
    enough = p.flops >= _SHORT and p.batch * p.in_channels >= threads()  # a transform has one thread
    if p.depthwise and enough and (products := products_per_frequency(p)) >= _LONG:
        yield "fft", f"its long kernel has {products:.0f} products for each operation of a Fourier transform"
    kind = kind_of(p, lacking)
    tried = [
        (name, f"on {kind} problems {name} is {gain}x as fast as PyTorch, on average")
        for name, gain in TABLE.get(kind or "", {}).items()
        if name != "aten:float32" or worth_converting(p, outputs, lacking)
    ]
    if kind == "other":
        estimates = gains(p, outputs).items()
        faster = ((name, gain) for name, gain in estimates if gain >= least_gain(p, name))
        tried = [(name, f"{name} is {gain:.1f}x as fast as PyTorch, by estimate") for name, gain in faster]
    yield from takewhile(lambda found: not for_mkl or _beats_mkl(found[0], p), tried)
    if patches and "grad_input" in outputs and p.dtype.itemsize <= 4:  # oneDNN has no float64
        yield "aten:patches", "kernels do not overlap, and PyTorch's gradient of the input takes several times as long"
    if for_mkl:
        yield "aten:matmul", "a linear layer, and MKL is made for this processor"


def least_gain(p: ConvProblem, name: str) -> float:
    """Return how many times as fast as PyTorch's kernels a backend must be by estimate."""
    if p.unpadded_pointwise and p.dtype.itemsize > 2:
        return _OF_PRODUCTS
    if name == "native:amx":
        return _BY_AMX
    return _IN_16_BITS if p.dtype.itemsize == 2 and p.channels_last else _ELSEWHERE


def kind_of(p: ConvProblem, lacking: str) -> Literal["depthwise", "emulated", "other"] | None:
    """Return by what a problem is judged on a CPU: its line of `TABLE` or, for "other", its estimate.

    None is for problems that are always PyTorch's: those with more padding than products, which the tiles of ``native``
    would hold, and small matrix products. For ``lacking`` see `cpu_lacks`.
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
    """Whether each value is in ten products or more; always for grad_weight, which may have no kernel in 16 bits."""
    values = sum(map(prod, (p.input_shape, p.weight_shape, p.output_shape)))
    return "grad_weight" in outputs or (lacking == "all" and p.flops >= 20 * values)


def products_per_frequency(p: ConvProblem) -> float:
    """Return the products of a channel, those with padding left out, over positions of its transform * log2(them)."""
    products = 1
    for dim in p.dims:
        reads = 0
        for k in range(dim.kernel):  # the results that read the input through this element
            first, last = dim.low - k * dim.dilation, dim.low - k * dim.dilation + dim.input - 1
            reads += max(0, min(dim.output - 1, last // dim.stride) - max(0, -(-first // dim.stride)) + 1)
        products *= reads
    positions = prod(transform_sizes(p))
    return products / (positions * log2(positions))


def linear_gains(elements: int, out_features: int, in_features: int) -> bool:
    """Whether a linear layer is large enough to gain as a pointwise convolution: as such it costs 50 to 80 us more.

    The times are in docs/kernels.md; for MKL see `_beats_mkl`. With one feature it is no product of matrices, or its
    stride may be anything.
    """
    enough = 2 * elements * out_features >= 2**24 * threads() and min(out_features, in_features) > 1
    return enough and elements >= 32 * in_features


def _beats_mkl(name: str, p: ConvProblem) -> bool:
    """Whether this kernel of ours computes a linear layer faster than MKL at its best (times: docs/kernels.md).

    Packing is much of the work with few rows or output features, and with AMX where any size is small.
    """
    rows, many = p.input_size[1], p.input_size[1] >= _MANY_ROWS
    if name == "native:amx":
        return many or 3 / (1 / rows + 1 / p.in_channels + 1 / p.out_channels) >= _MEAN_SIZE
    return many and p.in_channels <= 512 and p.out_channels >= 48 and avx512_here()


# ---- on a GPU ----------------------------------------------------------------------------------------

#: The oldest NVIDIA GPUs for which Triton compiles.
_LEAST_CAPABILITY = (8, 0)
#: Bytes of operands and result which any GPU reads and writes in about the time of a launch: no kernel gains below.
_LEAST_BYTES = 4 << 20
#: Columns of a kernel from which tensor cores multiply it.
_WIDE_KERNEL = 9
#: Kernel elements from which PyTorch's depthwise kernels take less long out of channels_last, and up to which Triton's
#: have registers: 7x7.
_LARGE_PLANE = 49


def proposals(p: ConvProblem, device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield the backends that may be faster than PyTorch's own on a GPU, best first, and why.

    The evidence is in benchmarks/results/gpu-h100.md and docs/gpu.md. Our depthwise kernels were never run on GPUs but
    NVIDIA's. Wide ones in float32 are not proposed on tensor cores: that would be TF32.
    """
    if device.type != "cuda" or p.least_bytes < _LEAST_BYTES:
        return
    elements, half = prod(p.kernel_size), p.dtype.itemsize == 2
    if p.depthwise and elements > 1 and (capability(device) or (0, 0)) >= _LEAST_CAPABILITY:
        if p.kernel_size[-1] >= _WIDE_KERNEL and half:
            yield "triton:banded", "tensor cores multiply wide depthwise kernels, and PyTorch's do not use them"
        yield "triton", "it reads every operand once, and PyTorch's kernels or cuDNN's took longer on an H100"
    if p.depthwise and elements > _LARGE_PLANE:
        yield "fft", "a transform takes as long for any kernel, and PyTorch reads an operand once a kernel element"
    if of_patches(p):
        yield "aten:patches", "patches are one matrix product, for which convolution libraries may have no fast kernel"
    if p.ndim == 3 and half and not (p.channels_last or p.depthwise) and torch.version.hip is None:
        yield "aten:channels_last", "PyTorch keeps volumes of 16 bits away from some releases of cuDNN, but not these"
    if p.channels_last and p.groups > 1 and (not p.depthwise or elements >= _LARGE_PLANE):
        yield "aten:contiguous", "cuDNN's kernels for channels_last are slow with groups"
