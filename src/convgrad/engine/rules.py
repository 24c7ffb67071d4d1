"""The rules: what is taken where nobody requested a backend, no kernel of the user's is there and nothing was measured.

PyTorch's own kernels are, except where a line of the table below says otherwise. ``benchmarks/derive.py`` writes the
table from what ``benchmarks/sweep.py`` measured. There is none for a GPU: nobody has measured our kernels on one yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from operator import ge, lt
from typing import NamedTuple

import torch

from .._compat import cpu_lacks
from ..problem import ConvProblem

#: FLOPs of a dense pass up to which PyTorch's own call is kept: its autograd is faster in such a small one. A pointwise
#: one is no exception to the rules: in squeeze and excitation ours is several times as fast.
_SMALL = 200_000

#: A kind of problem; conditions, all of them; what is taken; how many times as fast as PyTorch's call as given it was
#: in the sweep, on geometric average. The first line counts that fits and whose backend can compute it.
TABLE = """
# begin of the derived lines
# 2373 measurements. Held out: 4 % slower than the fastest way, 3.9 % of the rows below 0.9x
# of PyTorch's better layout (1.2 % by PyTorch's call as given), 0.16x at worst.
dense      always  native        2.6x
depthwise  always  native        6.0x
emulated   always  native        9.7x
emulated   always  aten:float32  4.6x
grouped    always  native        2.7x
pointwise  always  native        1.6x
# end of the derived lines
"""

#: What a condition may be about: more features fit the problems of the sweep, and lose as much or more on others.
FEATURES: dict[str, Callable[[ConvProblem], float]] = {
    "smaller": lambda p: min(p.in_channels, p.out_channels) // p.groups,
    "taps": lambda p: prod(p.kernel_size),
    "channels_last": lambda p: p.channels_last,
    "kB": lambda p: p.least_bytes / 1e3,
    "itemsize": lambda p: p.dtype.itemsize,
}


class Rule(NamedTuple):
    """A line of the table."""

    conditions: tuple[str, ...]
    way: str
    gain: str

    def holds(self, problem: ConvProblem) -> bool:
        return all(_holds(condition, problem) for condition in self.conditions)


def _holds(condition: str, problem: ConvProblem) -> bool:
    """``taps >= 16``, ``taps < 16``, ``channels_last`` or ``not channels_last``."""
    name, *rest = condition.removeprefix("not ").split()
    value = FEATURES[name](problem)
    if rest:
        return {">=": ge, "<": lt}[rest[0]](value, float(rest[1]))
    return bool(value) != condition.startswith("not ")


@lru_cache
def rules_of(table: str) -> dict[str, tuple[Rule, ...]]:
    """Kind -> the lines about it, in order."""
    found: dict[str, tuple[Rule, ...]] = {}
    for line in table.splitlines():
        if line and not line.startswith("#"):
            kind, conditions, way, gain = re.split(r"\s{2,}", line.strip())
            rule = Rule(tuple(c for c in conditions.split(", ") if c != "always"), way, gain)
            found[kind] = (*found.get(kind, ()), rule)
    return found


def kind_of(problem: ConvProblem, emulated: bool) -> str | None:
    """The first column of the lines about a problem; None of one that is PyTorch's in any case.

    Args:
        emulated: the processor has no arithmetic for its 16 bits, with which PyTorch is slow unless it is depthwise.
    """
    if _mostly_padding(problem):
        return None
    if problem.depthwise:
        return "depthwise"
    if emulated:
        return "emulated"
    if problem.groups > 1:
        return "grouped"
    if _is_matrix_product(problem):  # products of 16 bits are PyTorch's, which has to lay contiguous operands out anew
        return None if problem.channels_last and problem.dtype.itemsize < 4 else "pointwise"
    return "dense" if problem.flops >= _SMALL else None


def by_rule(problem: ConvProblem, device: torch.device) -> Iterator[tuple[str, str]]:
    """The backends that are expected to be faster than PyTorch's own, best first, and why."""
    kind = kind_of(problem, cpu_lacks(problem.dtype)) if device.type == "cpu" else None
    if kind is None:
        return
    for rule in rules_of(TABLE).get(kind, ()):
        if rule.holds(problem):
            where = f", {', '.join(rule.conditions)}" if rule.conditions else ""
            yield rule.way, f"{kind} problems{where}: {rule.gain} as fast as PyTorch when it was measured"


def _is_matrix_product(p: ConvProblem) -> bool:
    """A pointwise convolution without stride or padding."""
    return p.pointwise and p.input_size == p.output_size and not any(map(any, p.padding))


def _mostly_padding(p: ConvProblem) -> bool:
    """Nearly all of the image is padding, which our tiles write out; the sweep has no such problem."""
    padded = prod(n + max(low, 0) + max(high, 0) for n, (low, high) in zip(p.input_size, p.padding, strict=True))
    return padded > max(2**18, 16 * prod(p.input_size), 16 * prod(p.output_size))
