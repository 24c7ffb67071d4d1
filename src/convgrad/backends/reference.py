"""The definition of the three passes, in a few lines each.

Every pass visits the positions of the kernel. At position k, output o reads the padded input at
``o * stride + k * dilation``: one strided slice of it, as large as the output. The three passes contract this slice,
the weight at k and grad_output in the three possible ways. Floats are summed in float64, integers in int64 and complex
numbers in complex128, and rounded once, after the bias is added.

Every other backend is held to this one, so it favours being read over being fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from ..problem import PADDING_MODES, ConvProblem, Outputs, add_bias
from .base import Backend, Kernel


class ReferenceBackend(Backend):
    """One strided slice and one einsum for every position of the kernel, in 64 bits."""

    name = "reference"
    summary = "the definition, in 64 bits: slow, and what the others are checked against"
    layouts = ("strided",)
    padding_modes = PADDING_MODES

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        return []

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        wide = wide_dtype(problem.dtype)
        contract = {"forward": _forward, "grad_input": _grad_input, "grad_weight": _grad_weight}[outputs[0]]

        def kernel(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            # Integer matrix products exist on the CPU only, float64 not everywhere.
            integers = not (wide.is_floating_point or wide.is_complex)
            device = torch.device("cpu") if integers or a.device.type == "mps" else a.device
            result = contract(problem, a.to(device, wide), b.to(device, wide))
            result = add_bias(result, None if bias is None else bias.to(device, wide))
            return result.to(a.device, problem.dtype).contiguous(memory_format=problem.memory_format)

        return kernel


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the 64-bit dtype of the same kind."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _forward(p: ConvProblem, input: Tensor, weight: Tensor) -> Tensor:
    padded, w = _pad(p, input), _split(p, weight, 0)  # [N, C_in, *padded], [G, C_out/G, C_in/G, *k]
    output = _split(p, input.new_zeros(p.output_shape), 1)  # [N, G, C_out/G, *out]
    for k, window in _windows(p):
        output += torch.einsum("ngi...,goi->ngo...", _split(p, padded[window], 1), w[(..., *k)])
    return output.reshape(p.output_shape)


def _grad_input(p: ConvProblem, grad_output: Tensor, weight: Tensor) -> Tensor:
    g, w = _split(p, grad_output, 1), _split(p, weight, 0)  # [N, G, C_out/G, *out], [G, C_out/G, C_in/G, *k]
    size = (n + low + high for n, (low, high) in zip(p.input_size, p.padding, strict=True))
    padded = g.new_zeros((p.batch, p.in_channels, *size))
    for k, window in _windows(p):
        padded[window] += torch.einsum("ngo...,goi->ngi...", g, w[(..., *k)]).flatten(1, 2)
    return _unpad(p, padded)


def _grad_weight(p: ConvProblem, grad_output: Tensor, input: Tensor) -> Tensor:
    g, padded = _split(p, grad_output, 1), _pad(p, input)  # [N, G, C_out/G, *out], [N, C_in, *padded]
    grad_weight = _split(p, g.new_zeros(p.weight_shape), 0)  # [G, C_out/G, C_in/G, *k]
    for k, window in _windows(p):
        grad_weight[(..., *k)] = torch.einsum("ngo...,ngi...->goi", g, _split(p, padded[window], 1))
    return grad_weight.reshape(p.weight_shape)


def _windows(p: ConvProblem) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each kernel position, with the part of the padded input that it reads."""
    for k in product(*(range(size) for size in p.kernel_size)):
        starts = [i * d for i, d in zip(k, p.dilation, strict=True)]
        spans = [(o - 1) * s + 1 for o, s in zip(p.output_size, p.stride, strict=True)]
        window = (slice(start, start + n, s) for start, n, s in zip(starts, spans, p.stride, strict=True))
        yield k, (slice(None), slice(None), *window)


def _split(p: ConvProblem, tensor: Tensor, dim: int) -> Tensor:
    """Return channels [G*C, ...] as [G, C, ...]."""
    return tensor.unflatten(dim, (p.groups, -1))


def _pad(p: ConvProblem, input: Tensor) -> Tensor:
    """Return the input padded by its padding mode, and cropped where the padding is negative."""
    for d, (positions, outside) in enumerate(_read(p, input.device), start=2):
        input = input.index_select(d, positions).index_fill_(d, outside, 0)
    return input


def _unpad(p: ConvProblem, padded: Tensor) -> Tensor:
    """Return the transpose of `_pad` of a gradient, whose memory it overwrites: sum repeated reads, drop zeros."""
    for d, (positions, outside) in enumerate(_read(p, padded.device), start=2):
        size = (*padded.shape[:d], p.input_size[d - 2], *padded.shape[d + 1 :])
        padded = padded.new_zeros(size).index_add_(d, positions, padded.index_fill_(d, outside, 0))
    return padded


def _read(p: ConvProblem, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each dimension the input position that each padded position reads, and the positions that are zero."""
    for n, (low, high) in zip(p.input_size, p.padding, strict=True):
        i = torch.arange(-low, n + high, device=device)
        read = {
            "zeros": i.clamp(0, n - 1),
            "circular": i % n,
            "reflect": (n - 1) - ((n - 1) - i.abs()).abs(),
            "replicate": i.clamp(0, n - 1),
        }[p.padding_mode]
        outside = (i != read).nonzero().flatten() if p.padding_mode == "zeros" else i[:0]
        yield read, outside
