"""Norms of the gradients of single samples, as clipping needs them: without the gradients where that is smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._compat import accumulate_dtype
from ..engine import checked_grad_weight
from ..ops import autocast_is_on, cast_operands
from ..problem import Geometry, Ints, Padding, by_pytorch, effective_kernel, require_bool
from ._arguments import gradient_arguments, of_tensors, sizes
from ._gradients import grad_bias, grad_weight


@of_tensors("input", "grad_output")
def per_sample_norms(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor, stride: Ints = 1, padding: Padding | str = 0,
    dilation: Ints = 1, transposed: bool = False, output_padding: Ints = 0, groups: int = 1, *, bias: bool = False,
) -> Tensor:  # fmt: skip
    """Return the 2-norm of each sample's weight gradient, often without computing that gradient.

    The squared norm of a gradient, a sum over T positions of grad_output times a window of the input, is the sum over
    the T x T products of two of each (ghost norms: Li et al., "Large Language Models Can Be Strong Differentially
    Private Learners", arXiv:2110.05679; of convolutions: Bu et al., "Scalable and Efficient Training of Large
    Convolutional Neural Networks with Differential Privacy", arXiv:2205.10683). It is computed in this way where these
    products take less memory than the gradient.

    Args:
        bias: return the norm of the gradients of weight and bias together.

    Shape:
        as of `grad_weight`, whose errors it has, too; the result is (N,), real, float32 for operands of 16 bits

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(5, 4, 9), torch.randn(5, 6, 7)
        >>> want = convgrad.grad_weight(x, (6, 4, 3), g, per_sample=True).flatten(1).norm(dim=1)
        >>> torch.allclose(convgrad.per_sample_norms(x, (6, 4, 3), g), want, rtol=1e-4)
        True
    """
    form = (stride, padding, dilation, transposed, output_padding, groups)
    require_bool("bias", bias)
    size = sizes(weight_size, "weight_size")
    operands: Any = cast_operands(input, grad_output)  # as autocast does for the gradient
    input, grad_output = operands
    arguments = gradient_arguments(form, input.shape, size, grad_output.shape)
    layout = torch.contiguous_format  # which is not read
    geometry = checked_grad_weight(grad_output, input, size, *arguments, memory_format=layout).geometry
    # Read as a plain convolution: windows of `data`, one for each position of `other`.
    data, other = (grad_output, input) if transposed else (input, grad_output)
    positions, per_group = prod(other.shape[2:]), size[1]
    if positions * groups * (2 * positions + per_group) < prod(size):
        device = data.device.type
        with torch.autocast(device, enabled=False) if autocast_is_on(device) else nullcontext():
            squared = _squared(data, other, size[2:], geometry)
            nothing = squared <= 0  # by rounding; its derivative is 0
            norms = squared.masked_fill(nothing, 1).sqrt().masked_fill(nothing, 0)
    else:
        norms = _norm(grad_weight(input, size, grad_output, *form, per_sample=True))
    if not bias:
        return norms
    return torch.linalg.vector_norm(torch.stack([norms, _norm(grad_bias(grad_output, per_sample=True))]), dim=0)


def _norm(gradients: Tensor) -> Tensor:
    """Return the 2-norm of each sample: (N, *) -> (N,)."""
    return torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=accumulate_dtype(gradients.dtype))


def _squared(data: Tensor, other: Tensor, kernel: Sequence[int], g: Geometry) -> Tensor:
    """Return the sum of the products of all pairs of positions; each factor is a matrix of T x T."""
    if data.dtype.itemsize == 2:
        data, other = data.float(), other.float()
    rows = other.flatten(2).unflatten(1, (g.groups, -1))  # [N, g, co, T]
    of_other = rows.mT @ rows.conj()  # [N, g, T, T]
    of_data = torch.zeros_like(of_other)
    for tap in _taps(data, other.shape[2:], kernel, g):
        rows = tap.flatten(2).unflatten(1, (g.groups, -1))  # [N, g, ci, T]
        of_data = of_data + rows.mT @ rows.conj()
    return (of_data.conj() * of_other).sum((1, 2, 3)).real


def _taps(data: Tensor, positions: Sequence[int], kernel: Sequence[int], g: Geometry) -> Iterator[Tensor]:
    """Yield the data that each element of the kernel reads, [N, C, *positions]: a view of the padded data."""
    sides = tuple(
        (low, (t - 1) * s + effective_kernel(k, dil) - low - n)
        for t, k, s, (low, _), dil, n in zip(
            positions, kernel, g.stride, g.padding, g.dilation, data.shape[2:], strict=True
        )
    )
    windows = by_pytorch(data, sides)
    for i, (k, s, dil) in enumerate(zip(kernel, g.stride, g.dilation, strict=True), 2):
        windows = windows.unfold(i, effective_kernel(k, dil), s)[..., ::dil]  # [N, C, *positions, *kernel]
    for tap in product(*map(range, kernel)):
        yield windows[(..., *tap)]
