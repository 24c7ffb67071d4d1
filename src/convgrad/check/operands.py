"""Operands to check a backend with: integers that every order of summation gets exactly, and real numbers.

They are in the problem's memory format, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt, sqrt

import torch
from torch import Tensor

from ..backends import ReferenceBackend, wide_dtype
from ..problem import OPERANDS, ConvProblem, Output, Pass, Slot, sum_of_bias
from .bounds import reduction_length

#: A tensor for each slot that the passes read.
Operands = dict[str, Tensor]

_REFERENCE = ReferenceBackend()


def reference(problem: ConvProblem, output: Output, operands: Operands) -> Tensor:
    """Return the output in 64 bits, not rounded to the problem's dtype, on the CPU."""
    wide = wide_dtype(problem.dtype)
    if output == "grad_bias":
        return sum_of_bias(operands[problem.bias_slot].cpu().to(wide))
    a, b = (operands[slot].cpu().to(wide) for slot in OPERANDS[output])
    return _REFERENCE.bind(problem.replace(dtype=wide, memory_format=torch.contiguous_format), (output,))(a, b)


def magnitude(problem: ConvProblem, output: Output, operands: Operands) -> Tensor:
    """Return the output of the absolute values in float64, a bound on every partial sum."""
    absolute: Operands = {}
    for slot, t in operands.items():
        parts = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.unsqueeze(-1)
        absolute[slot] = parts.to(torch.float64).abs().sum(-1)
    return reference(problem.replace(dtype=torch.float64), output, absolute)


@lru_cache(64)
def structural(problem: ConvProblem, pass_: Pass) -> Tensor:
    """Return which elements of the result read anything but padding."""
    wide = problem.replace(dtype=torch.float64)
    ones = {slot: torch.ones(problem.shape_of(slot), dtype=wide.dtype, device="cpu") for slot in OPERANDS[pass_]}
    return reference(wide, pass_, dict(ones)) != 0


def integer_operands(problem: ConvProblem, passes: Sequence[Pass], seed: int) -> Operands:
    """Return small integers of which every partial sum, in any order and any of the passes, is exact in the dtype.

    Long sums of a narrow dtype need zeros among them, as many as leave most results other than zero.
    """
    # Half of what is exact, which leaves room for a bias.
    limit = exact_limit(problem.dtype) // 2
    length = max(reduction_length(problem, q) for q in passes)
    largest = max(1, min(4, isqrt(limit // length))) if length else 1
    density = min(1.0, sqrt(limit / (2 * length * largest**2))) if length > limit else 1.0
    generator = torch.Generator("cpu").manual_seed(seed)
    while True:
        operands: Operands = {slot: _integers(problem, slot, largest, density, generator) for slot in slots_of(passes)}
        if length * largest**2 <= limit or all(magnitude(problem, q, operands).amax() <= limit for q in passes):
            return operands
        density /= 2


def exact_limit(dtype: torch.dtype) -> int:
    """Return up to which magnitude a dtype holds every integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def slots_of(passes: Sequence[Pass]) -> list[Slot]:
    """Return the slots that passes read, in the order in which operands are made."""
    return [slot for slot in ("input", "weight", "grad_output") if any(slot in OPERANDS[q] for q in passes)]


def _integers(problem: ConvProblem, slot: Slot, largest: int, density: float, generator: torch.Generator) -> Tensor:
    dtype, shape = problem.dtype, list(problem.shape_of(slot))
    if dtype.is_complex:
        shape.append(2)
    values = torch.randint(1, largest + 1, shape, generator=generator, device="cpu")
    if dtype.is_floating_point or dtype.is_complex or dtype.is_signed:
        # Three positive ones for every negative one: sums rarely cancel to zero.
        values *= torch.where(torch.rand(shape, generator=generator, device="cpu") < 0.25, -1, 1)
    values *= torch.rand(shape, generator=generator, device="cpu") < density
    if dtype.is_complex:
        values = torch.view_as_complex(values.to(torch.float64))
    return values.to(dtype).contiguous(memory_format=problem.memory_format)


#: Factors of real numbers, if the dtype has the range of float32: gradients and weights are often tiny.
_SCALE: dict[Slot, float] = {"input": 2.0**30, "weight": 2.0**-30, "grad_output": 2.0**-30}


def real_operands(problem: ConvProblem, passes: Sequence[Pass], seed: int) -> Operands:
    """Return normally distributed numbers of different sizes, rounded to the problem's dtype."""
    generator = torch.Generator("cpu").manual_seed(seed)
    wide = torch.complex128 if problem.dtype.is_complex else torch.float64
    narrow = torch.finfo(problem.dtype).max < 1e30
    return {
        slot: torch.randn(problem.shape_of(slot), generator=generator, dtype=wide, device="cpu")
        .mul_(1.0 if narrow else _SCALE[slot])
        .to(problem.dtype)
        .contiguous(memory_format=problem.memory_format)
        for slot in slots_of(passes)
    }
