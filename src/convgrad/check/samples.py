"""Some elements of a pass, each computed by itself: what a result that is too large to compute twice is held to.

An element is one inner product. Which elements of the two operands it reads follows from its index alone, so it costs
as many products as the pass sums, however large the problem is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from ..backends import wide_dtype
from ..problem import OPERANDS, RESULT, ConvProblem, Pass
from .bounds import reduction_length
from .operands import Operands

#: Products that all samples of one result may take together.
_PRODUCTS = 400_000
_FEWEST, _MOST = 32, 8_000

_T = TypeVar("_T", int, Tensor)

#: Indices into one operand, one tensor a dimension, that broadcast to [samples, channels or images, positions].
_Index = tuple[Tensor, ...]


def sample(problem: ConvProblem, pass_: Pass, seed: int) -> Tensor:
    """Places in a result: every corner, and one in each of many parts of the same length.

    Shape:
        - result: [samples], places among all elements in the order of their indices
    """
    shape = problem.shape_of(RESULT[pass_])
    total = prod(shape)
    count = min(total, max(_FEWEST, min(_MOST, _PRODUCTS // reduction_length(problem, pass_))))
    generator = torch.Generator("cpu").manual_seed(seed)
    offset = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    spread = ((torch.arange(count, device="cpu") + offset) * (total / count)).long().clamp_(max=total - 1)
    ends = torch.cartesian_prod(*(torch.tensor([0, n - 1], device="cpu") for n in shape))  # [corners, dims]
    steps = torch.tensor([prod(shape[i + 1 :]) for i in range(len(shape))], device="cpu")
    return torch.cat([spread, (ends * steps).sum(1)]).unique()


def elements_at(problem: ConvProblem, pass_: Pass, operands: Operands, places: Tensor) -> tuple[Tensor, Tensor]:
    """These elements of the result in 64 bits, and each one's sum of absolute products.

    Shape:
        - places, both results: [samples]
    """
    index = index_of(places.view(-1, 1, 1), problem.shape_of(RESULT[pass_]))
    at_a, at_b, inside = _READ[pass_](problem, index)
    a, b = (operands[slot].cpu() for slot in OPERANDS[pass_])
    wide = wide_dtype(problem.dtype)
    products = a[at_a].to(wide) * b[at_b].to(wide) * inside
    return products.sum((1, 2)), products.abs().sum((1, 2), dtype=torch.float64)


def index_of(place: _T, shape: Sequence[int]) -> list[_T]:
    """The index of an element, or of several, from its place among all.

    `torch.unravel_index` does the same, and imports sympy for it.
    """
    index = []
    for size in reversed(shape):
        index.insert(0, place % size)
        place = place // size
    return index


# ---- which elements of the operands an element of the result reads ------------------------------


def _forward(p: ConvProblem, index: list[Tensor]) -> tuple[_Index, _Index, Tensor]:
    n, o, *position = index
    channel = _count(p.in_channels // p.groups)
    group = o // (p.out_channels // p.groups)
    kernel = _positions(p.kernel_size)
    x, inside = _meeting(p, position, kernel)
    return (n, group * (p.in_channels // p.groups) + channel, *x), (o, channel, *kernel), inside


def _grad_input(p: ConvProblem, index: list[Tensor]) -> tuple[_Index, _Index, Tensor]:
    n, c, *position = index
    per_in, per_out = p.in_channels // p.groups, p.out_channels // p.groups
    o = c // per_in * per_out + _count(per_out)
    kernel = _positions(p.kernel_size)
    inside = torch.ones((), dtype=torch.bool, device="cpu")
    found = []
    for i, (x, k) in enumerate(zip(position, kernel, strict=True)):
        shifted = x + p.padding[i][0] - k * p.dilation[i]
        y = shifted.div(p.stride[i], rounding_mode="floor")
        inside = inside & (shifted % p.stride[i] == 0) & (y >= 0) & (y < p.output_size[i])
        found.append(y.clamp(0, p.output_size[i] - 1))
    return (n, o, *found), (o, c % per_in, *kernel), inside


def _grad_weight(p: ConvProblem, index: list[Tensor]) -> tuple[_Index, _Index, Tensor]:
    o, c, *kernel = index
    n = _count(p.batch)
    group = o // (p.out_channels // p.groups)
    position = _positions(p.output_size)
    x, inside = _meeting(p, position, kernel)
    return (n, o, *position), (n, group * (p.in_channels // p.groups) + c, *x), inside


_READ = {"forward": _forward, "grad_input": _grad_input, "grad_weight": _grad_weight}


def _meeting(p: ConvProblem, position: list[Tensor], kernel: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Where in the input an output position meets a kernel position, and whether that is no padding."""
    inside = torch.ones((), dtype=torch.bool, device="cpu")
    found = []
    for i, (y, k) in enumerate(zip(position, kernel, strict=True)):
        x = y * p.stride[i] - p.padding[i][0] + k * p.dilation[i]
        inside = inside & (x >= 0) & (x < p.input_size[i])
        found.append(x.clamp(0, p.input_size[i] - 1))
    return found, inside


def _count(n: int) -> Tensor:
    """[1, n, 1]."""
    return torch.arange(n, device="cpu").view(1, -1, 1)


def _positions(size: tuple[int, ...]) -> list[Tensor]:
    """Every position of a grid, one tensor [1, 1, positions] a dimension."""
    return index_of(torch.arange(prod(size), device="cpu").view(1, 1, -1), size)
