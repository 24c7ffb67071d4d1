"""Quantized weights and their gradients as the papers define them, an output channel at a time, in plain torch.

Nothing here comes from the library. ``given`` is the gradient of the loss by the weight that the convolution uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def filters(weight: Tensor, transposed: bool, groups: int) -> Iterator[tuple[Any, ...]]:
    """The index of all weights of each output channel."""
    if not transposed:
        yield from ((o,) for o in range(weight.shape[0]))
    else:
        size = weight.shape[0] // groups
        yield from ((slice(g * size, (g + 1) * size), j) for g in range(groups) for j in range(weight.shape[1]))


def sign(x: Tensor) -> Tensor:
    """BinaryConnect, arXiv:1511.00363, section 2.2, equation 1: +1 where x >= 0."""
    return torch.where(x >= 0, torch.ones_like(x), -torch.ones_like(x))


def bwn(weight: Tensor, given: Tensor, transposed: bool, groups: int) -> tuple[Tensor, Tensor]:
    """XNOR-Net, arXiv:1603.05279, section 3.1: the weight and its gradient."""
    value, gradient = torch.empty_like(weight), torch.empty_like(weight)
    for at in filters(weight, transposed, groups):
        w, n = weight[at], weight[at].numel()
        alpha = float(w.abs().sum()) / n
        value[at] = alpha * sign(w)
        gradient[at] = given[at] * (1 / n + alpha * (w.abs() <= 1))
    return value, gradient


def binary_connect(weight: Tensor, given: Tensor, transposed: bool, groups: int) -> tuple[Tensor, Tensor]:
    """BinaryConnect, arXiv:1511.00363, algorithm 1: the update of w uses the gradient by w_b."""
    return sign(weight), given


def twn(weight: Tensor, given: Tensor, transposed: bool, groups: int) -> tuple[Tensor, Tensor]:
    """Ternary Weight Networks, arXiv:1605.04711, section 2: delta = 0.7 E|W|, alpha the mean of what is above it."""
    value = torch.zeros_like(weight)
    for at in filters(weight, transposed, groups):
        w = weight[at]
        delta = 0.7 * float(w.abs().mean())
        above = [abs(v) for v in w.flatten().tolist() if abs(v) > delta]
        alpha = math.fsum(above) / len(above) if above else 0.0
        value[at] = alpha * ((w > delta).to(w.dtype) - (w < -delta).to(w.dtype))
    return value, given


def shift_q(weight: Tensor, given: Tensor, transposed: bool, groups: int) -> tuple[Tensor, Tensor]:
    """DeepShift-Q, arXiv:1905.13298, section 3.1, with 5 bits: shifts from -15 to 0."""
    rounded = [0.0 if v == 0 else math.copysign(2.0 ** max(-15, min(0, round(math.log2(abs(v))))), v) for v in
               weight.flatten().tolist()]  # fmt: skip
    return torch.tensor(rounded, dtype=weight.dtype).view_as(weight), given


def shift_ps(
    shift: Tensor, sign: Tensor, given: Tensor, transposed: bool, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """DeepShift-PS, arXiv:1905.13298, section 3.2, with 5 bits: the weight, the gradients of the shift and the sign."""
    value = 2.0 ** shift.clamp(-14, 0).round() * sign.round().sign()
    return value, given * value * math.log(2), given


def convolve(layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """PyTorch's own convolution with a layer's geometry, zero padding."""
    if isinstance(layer, torch.nn.Linear):
        return F.linear(input, weight, bias)
    function = getattr(F, f"conv{'_transpose' * layer.transposed}{weight.dim() - 2}d")
    known = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}
    if layer.transposed:
        known["output_padding"] = layer.output_padding
    return function(input, weight, bias, **known)
