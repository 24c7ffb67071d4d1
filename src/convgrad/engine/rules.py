"""The rules: what is taken where nobody requested a backend, no kernel of the user's is there and nothing was measured.

PyTorch's own kernels are, except where a line of the table below says otherwise. ``benchmarks/derive.py`` writes the
table from what ``benchmarks/sweep.py`` measured. There is none for a GPU: nobody has measured our kernels on one yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from operator import ge, le, lt
from typing import NamedTuple

import torch

from .._compat import cpu_lacks
from ..problem import PASSES, ConvProblem, Output, passes_of

#: FLOPs of a dense pass up to which PyTorch's own call is kept: its autograd is faster in such a small one. A pointwise
#: one is no exception to the rules: in squeeze and excitation ours is several times as fast.
_SMALL = 200_000

#: Each pass by its own rule, rather than several in one sweep.
SEPARATE = "separate"

#: Of each pass, and of both gradients.
ANY = "any"

#: What is computed, of which kind of problem, under which conditions (all of them); what is taken; how many times as
#: fast as PyTorch's call as given it was in the sweep, on geometric average. The first line counts that fits and whose
#: backend can compute it.
TABLE = """
# begin of the derived lines
# 2316 measurements. Held out: 8 % slower than the fastest, 3.5 % of rows below 0.9x of PyTorch, 0.15x at worst.
any  dense      channels_last, kB < 240          native        1.8x
any  dense      not channels_last, smaller < 13  native        2.7x
any  depthwise  always                           native        6.5x
any  emulated   kB >= 37                         native        7.9x
any  emulated   kB >= 37                         aten:float32  7.9x
any  emulated   kB < 37                          native        4.2x
any  grouped    smaller >= 14, taps >= 40        native        1.9x
any  grouped    smaller < 14                     native        2.8x
any  pointwise  kB >= 2650, smaller >= 10        native        1.4x
any  pointwise  kB < 2650                        native        1.8x
# end of the derived lines
"""

#: What a condition is about, of a problem and a number of threads.
FEATURES: dict[str, Callable[[ConvProblem, int], float]] = {
    "threads": lambda p, threads: threads,
    "batch": lambda p, _: p.batch,
    "channels": lambda p, _: p.in_channels,
    "inputs": lambda p, _: p.in_channels // p.groups,
    "outputs": lambda p, _: p.out_channels // p.groups,
    "group": lambda p, _: max(p.in_channels, p.out_channels) // p.groups,
    "smaller": lambda p, _: min(p.in_channels, p.out_channels) // p.groups,
    "ndim": lambda p, _: p.ndim,
    "taps": lambda p, _: prod(p.kernel_size),
    "stride": lambda p, _: max(p.stride),
    "dilation": lambda p, _: max(p.dilation),
    "pixels": lambda p, _: prod(p.output_size),
    "Mflop": lambda p, _: p.flops / 1e6,
    "kB": lambda p, _: p.least_bytes / 1e3,
    "itemsize": lambda p, _: p.dtype.itemsize,
    "channels_last": lambda p, _: p.channels_last,
    "asymmetric": lambda p, _: not p.symmetric,
    "patches": lambda p, _: max(p.stride) > 1 and all(map(le, p.kernel_size, p.stride)),
}


class Rule(NamedTuple):
    """A line of the table."""

    conditions: tuple[str, ...]
    way: str
    gain: str

    def holds(self, problem: ConvProblem, threads: int) -> bool:
        return all(_holds(condition, problem, threads) for condition in self.conditions)


def _holds(condition: str, problem: ConvProblem, threads: int) -> bool:
    """``taps >= 16``, ``taps < 16``, ``channels_last`` or ``not channels_last``."""
    name, *rest = condition.removeprefix("not ").split()
    value = FEATURES[name](problem, threads)
    if rest:
        return {">=": ge, "<": lt}[rest[0]](value, float(rest[1]))
    return bool(value) != condition.startswith("not ")


@lru_cache
def rules_of(table: str) -> dict[tuple[str, str], tuple[Rule, ...]]:
    """Outputs and kind -> the lines about them, in order."""
    found: dict[tuple[str, str], tuple[Rule, ...]] = {}
    for line in table.splitlines():
        if line and not line.startswith("#"):
            outputs, kind, conditions, way, gain = re.split(r"\s{2,}", line.strip())
            rule = Rule(tuple(c for c in conditions.split(", ") if c != "always"), way, gain)
            for what in (*PASSES, "both") if outputs == ANY else (outputs,):
                found[what, kind] = (*found.get((what, kind), ()), rule)
    return found


def case_of(problem: ConvProblem, outputs: tuple[Output, ...], emulated: bool) -> tuple[str, str]:
    """The first two columns of the lines about some outputs of a problem.

    Args:
        emulated: the processor has no arithmetic for its 16 bits, with which PyTorch is slow unless it is depthwise.
    """
    passes = passes_of(outputs)
    kind = "depthwise" if problem.depthwise else "dense" if problem.groups == 1 else "grouped"
    if kind != "depthwise" and _is_matrix_product(problem):
        kind = "pointwise"
    if emulated and kind != "depthwise":
        kind = "emulated"
    return passes[0] if len(passes) == 1 else "both", kind


def by_rule(
    problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device, threads: int
) -> Iterator[tuple[str, str]]:
    """The backends that are expected to be the fastest (or `SEPARATE`), best first, and why; then PyTorch's own."""
    if device.type != "cpu" or _mostly_padding(problem):
        return
    what, kind = case_of(problem, outputs, cpu_lacks(problem.dtype))
    if kind == "dense" and problem.flops < _SMALL:
        return
    for rule in rules_of(TABLE).get((what, kind), ()):
        if rule.holds(problem, threads):
            where = f", {', '.join(rule.conditions)}" if rule.conditions else ""
            named = "both gradients" if what == "both" else what
            found = f"{rule.gain} as fast as PyTorch when it was measured"
            if rule.way == "aten":
                found = "nothing is clearly faster than PyTorch's own call"
            why = f"{named} of {kind} problems{where}: {found}"
            yield rule.way, why
            if rule.way == "native:avx2":  # which is no other backend on a processor without wider vectors
                yield "native", why


def _is_matrix_product(p: ConvProblem) -> bool:
    """A pointwise convolution without stride or padding."""
    return p.pointwise and p.input_size == p.output_size and not any(map(any, p.padding))


def _mostly_padding(p: ConvProblem) -> bool:
    """Nearly all of the image is padding, which our tiles write out; the sweep has no such problem."""
    padded = prod(n + max(low, 0) + max(high, 0) for n, (low, high) in zip(p.input_size, p.padding, strict=True))
    return padded > max(2**18, 16 * prod(p.input_size), 16 * prod(p.output_size))
