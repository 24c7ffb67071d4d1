"""A list of problems in which every pair of properties comes as early as it can.

Kernels are wrong for a property or two: for one image, for float64 with a stride. A list in which each pair of
properties is met finds these, with far fewer problems than all combinations would be: a covering array (Kuhn, Wallace
and Gallo, "Software Fault Interactions and Implications for Software Testing", IEEE Transactions on Software
Engineering 30(6), 2004).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import gcd, prod
from typing import Final

import torch

from ..problem import ConvProblem
from ..sizes import effective_kernel

#: The limit of the second and third dimension of a grid of CUDA blocks, and of 16-bit counters.
PLANES: Final = 65_536
#: More operations, or a larger kernel, and only samples of the result are compared.
_LARGE_FLOPS: Final = 2_500_000
_LARGE_KERNEL: Final = 200
#: What a property that was not met before is worth, in pairs of properties.
_NEW: Final = 40.0
#: Square images that kernels are specialized for.
_TYPICAL: Final = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128, 224, 256)


def is_large(problem: ConvProblem) -> bool:
    """Whether the result is too large to be computed a second time, by the reference."""
    return problem.flops > _LARGE_FLOPS or prod(problem.kernel_size) > _LARGE_KERNEL


def spread(problems: list[ConvProblem], most: int, before: Sequence[ConvProblem] = ()) -> list[ConvProblem]:
    """At most ``most`` of them: each time the one with the most new pairs of properties for its cost.

    Args:
        before: some of them that were chosen before; they count as met and are not chosen again.
    """
    if not problems:
        return []
    rows = [_properties(p) for p in problems]
    numbers = [_numbers(p) for p in problems]
    least, largest = ([f(column) for column in zip(*numbers, strict=True)] for f in (min, max))
    for row, mine in zip(rows, numbers, strict=True):
        row += [(i, "least") for i, n in enumerate(mine) if n == least[i]]
        row += [(i, "largest") for i, n in enumerate(mine) if n == largest[i]]
    numbering = {label: i for i, label in enumerate(dict.fromkeys(label for row in rows for label in row))}
    has = torch.zeros(len(rows), len(numbering), dtype=torch.float32, device="cpu")
    for i, row in enumerate(rows):
        has[i, [numbering[label] for label in row]] = 1
    worth = torch.ones(len(numbering), len(numbering), device="cpu")  # of a pair that has not been met
    worth.fill_diagonal_(_NEW)
    gain = (has @ worth * has).sum(1)
    costs = torch.tensor([cost(p) for p in problems], device="cpu")
    places = {p: i for i, p in enumerate(problems)}
    forced = [places[p] for p in before]
    chosen: list[int] = []
    while len(chosen) < min(most + len(forced), len(problems)):
        best = forced[len(chosen)] if len(chosen) < len(forced) else int((gain / costs).argmax())
        chosen.append(best)
        mine = has[best].nonzero().flatten()
        met = worth[mine][:, mine].clone()
        worth[mine.unsqueeze(1), mine] = 0
        theirs = has[:, mine]
        gain -= (theirs @ met * theirs).sum(1)
        gain[best] = -torch.inf
    return [problems[i] for i in chosen[len(forced) :]]


def _numbers(p: ConvProblem) -> tuple[int, ...]:
    """The attributes that have a least and a largest value."""
    g = p.groups
    return (
        *(p.batch, p.in_channels, p.out_channels, g, p.in_channels // g, p.out_channels // g),
        *(p.batch * p.in_channels, p.batch * p.out_channels),
        *(f(v) for v in (p.input_size, p.output_size, p.kernel_size, p.stride, p.dilation) for f in (min, max)),
        min(low for low, _ in p.padding),
        max(high for _, high in p.padding),
    )


def _properties(p: ConvProblem) -> list[Hashable]:
    """What a kernel may be wrong for, as labels."""
    kind = "grouped" if p.groups > 1 else "dense"
    if p.depthwise:
        kind = "depthwise" if p.in_channels == p.out_channels else "multiplier"
    over = [low - high for low, high in p.padding]
    edge = [max(pair) >= size for pair, size in zip(p.padding, p.kernel_size, strict=True)]
    labels: list[Hashable] = [
        ("ndim", p.ndim),
        ("kind", p.ndim, kind),
        ("dtype", p.dtype),
        ("layout", p.channels_last),
        ("origin", p.origin),
        ("bias", p.has_bias),
        ("batch", min(p.batch, 3) if p.batch < 64 else "large"),
        ("square", len(set(p.input_size)) == 1),
        ("square kernel", len(set(p.kernel_size)) == 1),
        ("kernel", p.kernel_size if max(p.kernel_size) <= 7 else "large"),
        ("stride", p.stride if max(p.stride) <= 2 else "large"),
        ("dilation", p.dilation if max(p.dilation) <= 2 else "large"),
        ("padding", "same" if p.padding == same_padding(p.kernel_size, p.dilation) else min(map(min, p.padding)) > 0),
        ("lopsided", min(over) < 0, max(over) > 0),
        ("crop", min(map(min, p.padding)) < 0),
        ("more padding than kernel", any(edge)),
        ("two paddings", len(set(p.padding)) > 1),
        ("unread", any(d.high > d.least_high for d in p.dims)),
        ("planes", p.batch * p.in_channels >= PLANES, p.batch * p.out_channels >= PLANES),
        ("image", p.input_size if len(set(p.input_size)) == 1 and p.input_size[0] in _TYPICAL else None),
    ]
    sizes = {"in": p.in_channels, "out": p.out_channels, "rows": p.input_size[0], "columns": p.input_size[-1]}
    for name, n in sizes.items():
        modulo = n % (16 if name == "columns" else 8)  # what vectors leave over
        labels += [(name, n.bit_length()), (name, "modulo", modulo), (name, "of 64", n % 64 == 0)]
    labels += [("output columns", gcd(p.output_size[-1], 8)), ("elements", prod(p.output_shape).bit_length() // 3)]
    return labels


def cost(p: ConvProblem) -> float:
    """Roughly how long a check takes, compared with other problems."""
    elements = sum(map(prod, (p.input_shape, p.weight_shape, p.output_shape)))
    if is_large(p):
        return 0.02 + p.flops / 1e9 + elements / 2e7
    return 0.02 + prod(p.kernel_size) * 3e-4 + p.flops / 1e8 + elements / 5e6


def same_padding(kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The padding with which an odd kernel keeps the size of the image."""
    halves = [effective_kernel(k, d) // 2 for k, d in zip(kernel, dilation, strict=True)]
    return tuple((n, n) for n in halves)
