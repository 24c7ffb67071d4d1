"""Candidates as functions without arguments, to be timed alternately, and as a training step would run them.

There other layers run between two calls of one. So each call takes other operands, of more bytes than a cache holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ...problem import ConvProblem, Outputs, passes_of
from ..events import thread
from ..plan import SLOTS, Plan, Step, slots_of

Call = Callable[[], Any]
_COLD_BYTES = 64 << 20  # of operands and results, more than a cache holds
_MOST_SETS = 64


def trials(
    candidates: Mapping[str, tuple[ConvProblem, tuple[Step, ...]]],
    outputs: Outputs,
    device: torch.device,
    given: dict[int, Tensor] | None = None,
) -> dict[str, Call]:
    """Return candidates as plans run them, with copies of operands, the bias and the sum of its gradient.

    ``candidates``: name -> the problem (the same one, perhaps in another layout) and the steps. ``given``: the operands
    by their numbers in `SLOTS`; None: random ones, of more bytes than a cache holds.
    """
    slots = slots_of(passes_of(outputs))
    sets: dict[ConvProblem, list[dict[int, Tensor]]] = {}
    for problem in dict.fromkeys(problem for problem, _ in candidates.values()):
        first = given or random_operands(problem, slots, device)
        more = 0 if given else _sets(problem, device) - 1
        sets[problem] = [first, *({i: t.clone() for i, t in first.items()} for _ in range(more))]
    return in_turn({name: _calls(Plan(p, outputs, device, steps), sets[p]) for name, (p, steps) in candidates.items()})


def _sets(problem: ConvProblem, device: torch.device) -> int:
    """Return the number of operand sets: one on a GPU, where the timer itself flushes the caches."""
    return 1 + min(_MOST_SETS, _COLD_BYTES // max(problem.least_bytes, 1)) if device.type == "cpu" else 1


def _calls(plan: Plan, sets: list[dict[int, Tensor]]) -> list[Call]:
    """Return a call of the plan for each set of operands."""
    p = plan.problem
    if len(passes_of(plan.outputs)) > 1:
        # The user's grad_output, input and weight; of a transposed problem the first two change places.
        order = (1, 0, 2) if p.transposed else (0, 1, 2)
        return [partial(plan.gradients, *[s[i] for i in order]) for s in sets]
    biased = p.has_bias and plan.outputs == (p.bias_pass,)
    bias = next(iter(sets[0].values())).new_ones(p.shape_of(p.bias_slot)[1]) if biased else None
    return [partial(plan.contract, *s.values(), bias) for s in sets]


def in_turn(candidates: Mapping[str, Sequence[Call]]) -> dict[str, Call]:
    """Return one callable for the several of each candidate, which do the same with other operands.

    Any call takes the next operands: with a turn of its own, a candidate would find in a cache what the one before it
    has just read. A result is held until as many others were returned, or results would lie in a cache.
    """
    count = len(next(iter(candidates.values())))
    turns, held = cycle(range(count)), deque[object](maxlen=count)

    def call(calls: Sequence[Call]) -> Any:
        outer, thread.unobserved = thread.unobserved, True
        try:
            held.append(result := calls[next(turns)]())
        finally:
            thread.unobserved = outer
        return result

    return {name: partial(call, calls) for name, calls in candidates.items()}


def random_operands(problem: ConvProblem, slots: tuple[int, ...], device: torch.device) -> dict[int, Tensor]:
    """Random tensors for some of `SLOTS`, in the problem's layout; the user's random state stays as it is."""
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for i in slots:
        shape, dtype = problem.shape_of(SLOTS[i]), problem.dtype
        if dtype.is_floating_point or dtype.is_complex:
            t = torch.empty(shape, dtype=dtype, device=device)
            (torch.view_as_real(t) if t.is_complex() else t).uniform_(-1, 1, generator=generator)
        else:
            least = max(-3, torch.iinfo(dtype).min)
            t = torch.randint(least, 4, shape, dtype=dtype, device=device, generator=generator)
        found[i] = t.contiguous(memory_format=problem.memory_format)
    return found
