"""Depthwise convolutions with long kernels, by the convolution theorem.

In the frequency domain a sliding sum is one product for each frequency, however long the kernel is. With the discrete
Fourier transforms X, G and W of the input, of grad_output and of the kernel,

    output = inverse of X * conj(W)      grad_input = inverse of G * W      grad_weight = inverse of sum X * conj(G)

where the sum is over images (Oppenheim and Schafer, "Discrete-Time Signal Processing", chapter 8). A transform is
periodic, so it is as long as all positions that one dimension of a problem reads, padding included on one side, and
the kernel begins at minus the low padding. With a stride grad_output has zeros between its positions.

Sums of 16-bit numbers are in float32. Channels and images are transformed a few at a time, so that memory is bounded.

A NaN or an infinity spreads over its channel of its image. On a CPU a result that holds one is computed by PyTorch's
kernel instead. On a GPU that check would wait for the result, so there it spreads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._compat import accumulate_dtype
from ..problem import OPERANDS, RESULT, ConvProblem, Outputs, Pass, Slot, passes_of
from .aten import AtenBackend
from .base import Arithmetic, Backend, Kernel

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Kernels of fewer elements gain nowhere, so measuring need not try them.
_LEAST_ELEMENTS = 64
#: Bytes of the transforms of one operand at a time. They are few on a CPU, whose memory may be fresh from the system.
_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}


class FftBackend(Backend):
    """Depthwise convolutions as products of Fourier transforms."""

    name = "fft"
    summary = "depthwise convolutions with long kernels, by PyTorch's Fourier transforms"
    sweeps = (("grad_input", "grad_weight"),)
    capture_safe = False  # the first call of a shape makes a plan of cuFFT's
    states_workspace = False  # PyTorch's transforms take what they need
    layouts = ("contiguous",)

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons: list[str] = []
        if problem.in_channels != problem.groups:
            reasons.append("it computes depthwise convolutions only (one input channel a group)")
        if prod(problem.kernel_size) < _LEAST_ELEMENTS:
            reasons.append(f"transforms take longer than the products of fewer than {_LEAST_ELEMENTS} elements")
        if problem.dtype not in _DTYPES:
            reasons.append(f"it has no transform for {str(problem.dtype).removeprefix('torch.')}")
        if device.type not in _BYTES:
            reasons.append(f"it was tried on cpu and cuda only, not on {device.type}")
        return reasons

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "transform"

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        p, transforms, passes = problem, _Transforms(problem), passes_of(outputs)
        slots: tuple[Slot, ...] = OPERANDS[passes[0]] if len(passes) == 1 else ("grad_output", "input", "weight")
        exact: dict[Pass, Kernel] = {pass_: AtenBackend().bind(p.replace(origin="plain"), (pass_,)) for pass_ in passes}

        def kernel(given: dict[Slot, Tensor]) -> list[Tensor]:
            first = given[slots[0]]
            results: dict[Pass, Tensor] = {pass_: first.new_empty(p.result_shape(pass_)) for pass_ in passes}
            operands = {slot: transforms.by_channel(slot, t) for slot, t in given.items()}
            filled = {pass_: transforms.by_channel(RESULT[pass_], t) for pass_, t in results.items()}
            for c, batches in transforms.parts(_BYTES[first.device.type]):
                spectra: dict[Slot, Tensor] = {}
                if "weight" in given:
                    spectra["weight"] = transforms.of_weight(operands["weight"][c])
                total: Tensor | None = None
                for n in batches:
                    if "input" in given:
                        spectra["input"] = transforms.of_input(operands["input"][n, c])
                    if "grad_output" in given:
                        spectra["grad_output"] = transforms.of_grad_output(operands["grad_output"][n, c])
                    for pass_ in passes:
                        a, b = (spectra[slot] for slot in OPERANDS[pass_])
                        if pass_ == "forward":
                            filled[pass_][n, c] = transforms.output(a * b.conj_physical())
                        elif pass_ == "grad_input":
                            filled[pass_][n, c] = transforms.input((a * b).sum(2, keepdim=True))
                        else:
                            summed = (a * b.conj_physical_()).sum(0)
                            total = summed if total is None else total.add_(summed)
                if total is not None:
                    filled["grad_weight"][c] = transforms.weight(total.conj_physical())
            return list(results.values())

        def run(*operands: Any) -> Any:
            given: dict[Slot, Tensor] = dict(zip(slots, operands, strict=False))
            results = kernel(given)
            if operands[0].is_cpu and not all(t.sum(dtype=transforms.dtype).isfinite() for t in results):
                results = [call(*(given[slot] for slot in OPERANDS[pass_])) for pass_, call in exact.items()]
            results = [t.contiguous(memory_format=p.memory_format) for t in results]
            return tuple(results) if len(results) > 1 else results[0]

        return run


class _Transforms:
    """The Fourier transforms of operands, and the results of inverse ones: [n, C, C_out/C, ...], a weight without n."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem = p = problem
        self.sizes, self.dtype, self._dims = transform_sizes(p), accumulate_dtype(p.dtype), tuple(range(-p.ndim, 0))
        #: Where the results of a stride are, and the kernel elements, which begin at minus the padding.
        self._strided = tuple(slice(0, dim.stride * dim.output, dim.stride) for dim in p.dims)
        taps = [torch.arange(dim.kernel, device="cpu") * dim.dilation - dim.low for dim in p.dims]
        self._taps = torch.meshgrid(*[at % n for at, n in zip(taps, self.sizes, strict=True)], indexing="ij")

    def by_channel(self, slot: Slot, t: Tensor) -> Tensor:
        """Return a view of an operand or a result whose output channels are those of each input channel."""
        of_each = (self.problem.in_channels, 1 if slot == "input" else -1)
        return t.view(*of_each, *t.shape[2:]) if slot == "weight" else t.unflatten(1, of_each)

    def parts(self, most: int) -> Iterator[tuple[slice, list[slice]]]:
        """Yield some channels, and the images of which they are transformed at a time, within so many bytes."""
        p = self.problem
        each = self.dtype.itemsize * p.out_channels // p.in_channels * prod(self.sizes)
        channels = min(p.in_channels, max(1, most // each))
        images = max(1, most // (each * channels))
        batches = [slice(n, n + images) for n in range(0, p.batch, images)]
        for c in range(0, p.in_channels, channels):
            yield slice(c, c + channels), batches

    def of_input(self, x: Tensor) -> Tensor:
        return torch.fft.rfftn(x.to(self.dtype), s=self.sizes, dim=self._dims)

    def of_grad_output(self, g: Tensor) -> Tensor:
        if max(self.problem.stride) > 1:
            apart = g.new_zeros((*g.shape[:3], *self.sizes))
            apart[(..., *self._strided)] = g
            g = apart
        return self.of_input(g)

    def of_weight(self, weight: Tensor) -> Tensor:
        placed = weight.new_zeros((*weight.shape[:2], *self.sizes))
        placed[self._at_taps(weight)] = weight
        return self.of_input(placed)

    def output(self, spectrum: Tensor) -> Tensor:
        return self._inverse(spectrum)[(..., *self._strided)]

    def input(self, spectrum: Tensor) -> Tensor:
        return self._inverse(spectrum)[(..., *map(slice, self.problem.input_size))]

    def weight(self, spectrum: Tensor) -> Tensor:
        return self._inverse(spectrum)[self._at_taps(spectrum)]

    def _inverse(self, spectrum: Tensor) -> Tensor:
        return torch.fft.irfftn(spectrum, s=self.sizes, dim=self._dims)

    def _at_taps(self, like: Tensor) -> tuple[Any, ...]:
        return (..., *[at.to(like.device) for at in self._taps])


def transform_sizes(problem: ConvProblem) -> tuple[int, ...]:
    """Return the length of the transform in each dimension, even and without a factor above 7.

    No wanted sum of a transform meets another: the padding before the input, or what is read behind it, fits beside it.
    """
    least = []
    for dim in problem.dims:
        kernel, read = (dim.kernel - 1) * dim.dilation, (dim.output - 1) * dim.stride  # from the first one to the last
        least.append(max(dim.input, dim.input + dim.low, read + 1 + kernel - dim.low, kernel + 1, read + 1))
    return tuple([next(n for n in count(size + size % 2, 2) if _of_small_factors(n)) for size in least])


def _of_small_factors(n: int) -> bool:
    for factor in (2, 3, 5, 7):
        while n % factor == 0:
            n //= factor
    return n == 1
