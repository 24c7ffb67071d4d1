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
from ..problem import OPERANDS, RESULT, ConvProblem, Pass, Slot
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
    read, inside = _read(problem, pass_, index)
    a, b = (operands[slot].cpu()[read[slot]].to(wide_dtype(problem.dtype)) for slot in OPERANDS[pass_])
    products = a * b * inside
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


def _read(p: ConvProblem, pass_: Pass, index: list[Tensor]) -> tuple[dict[Slot, _Index], Tensor]:
    """The elements of input, weight and output that meet where the result has this index, and which are no padding.

    An output position y and a kernel position k meet at the input position x = stride * y - low + dilation * k. Each
    pass has two of the three in its index, or in the sum, and the third follows.
    """
    per_in, per_out = p.in_channels // p.groups, p.out_channels // p.groups
    first, second, *place = index
    if pass_ == "grad_weight":
        n, o, c, kernel, place = _count(p.batch), first, second, place, _positions(p.output_size)
        group = o // per_out
    elif pass_ == "forward":
        n, o, c, kernel = first, second, _count(per_in), _positions(p.kernel_size)
        group = o // per_out
    else:
        n, c, kernel, group = first, second % per_in, _positions(p.kernel_size), second // per_in
        o = group * per_out + _count(per_out)
    inside = torch.ones((), dtype=torch.bool, device="cpu")
    inputs, outputs = [], []
    for i, (at, k) in enumerate(zip(place, kernel, strict=True)):
        shift = k * p.dilation[i] - p.padding[i][0]
        if pass_ == "grad_input":
            x, y = at, (at - shift).div(p.stride[i], rounding_mode="floor")
            inside = inside & (y * p.stride[i] + shift == x)
        else:
            x, y = at * p.stride[i] + shift, at
        inside = inside & (x >= 0) & (x < p.input_size[i]) & (y >= 0) & (y < p.output_size[i])
        inputs.append(x.clamp(0, p.input_size[i] - 1))
        outputs.append(y.clamp(0, p.output_size[i] - 1))
    return {
        "input": (n, group * per_in + c, *inputs),
        "weight": (o, c, *kernel),
        "grad_output": (n, o, *outputs),
    }, inside


def _count(n: int) -> Tensor:
    """[1, n, 1]."""
    return torch.arange(n, device="cpu").view(1, -1, 1)


def _positions(size: tuple[int, ...]) -> list[Tensor]:
    """Every position of a grid, one tensor [1, 1, positions] a dimension."""
    return index_of(torch.arange(prod(size), device="cpu").view(1, 1, -1), size)
