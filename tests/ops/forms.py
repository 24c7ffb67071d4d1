"""Small problems in float64 that together meet every rule: dimensions, roles, groups, strides, dilation, padding."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROUPS = {"dense": (1, 2, 2), "grouped": (2, 4, 2), "depthwise": (2, 2, 2), "depthwise x2": (2, 2, 4)}


class Case(NamedTuple):
    """Arguments of one convolution as the operators take them, with operands that match."""

    name: str
    input: Tensor
    weight: Tensor
    bias: Tensor
    arguments: tuple[Any, ...]

    @property
    def output(self) -> Tensor:
        return torch.ops.convgrad.convolution(self.input, self.weight, None, *self.arguments).detach()


def case(d: int, transposed: bool, kind: str, geometry: str, dtype: torch.dtype = torch.float64) -> Case:
    groups, channels, outputs = GROUPS[kind]
    stride, padding, dilation = {
        "plain": ([1] * d, [0] * d, [1] * d),
        "strided": ([2] + [1] * (d - 1), [1, 1, 0][:d], [1] * d),
        "dilated": ([1] * d, [1] + [0] * (d - 1), [2] + [1] * (d - 1)),
        "one-sided": ([2] + [1] * (d - 1), [1, 0] * d, [1] * d),
    }[geometry]
    kernel = [2, 3, 1][:d]
    size = [4, 3, 2][:d]
    output_padding = [1 if transposed and s > 1 else 0 for s in stride]
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    return Case(
        f"{d}d {'transposed' if transposed else 'plain'} {kind} {geometry}",
        torch.randn(1 if d == 3 else 2, channels, *size, dtype=dtype),
        torch.randn(*shape, *kernel, dtype=dtype),
        torch.randn(outputs, dtype=dtype),
        (stride, padding, dilation, transposed, output_padding, groups),
    )


GEOMETRIES = ("plain", "strided", "dilated", "one-sided")
EVERY = tuple(product((1, 2, 3), (False, True), GROUPS, GEOMETRIES))
#: Every pair of a dimension, a direction, a kind and a geometry.
SOME = tuple(
    (d, transposed, kind, geometry)
    for d, transposed, (i, kind), (j, geometry) in product(
        (1, 2, 3), (False, True), enumerate(GROUPS), enumerate(GEOMETRIES)
    )
    if (i + j + d + transposed) % 4 == 0
)


def identify(value: object) -> str:
    if isinstance(value, bool):
        return "transposed" if value else "plain"
    return f"{value}d" if isinstance(value, int) else str(value)
