"""What a single call on an idle machine does not show: properties that cost more, or that may end the process.

Every check looks at `PROPERTIES`. These are checked where they are named, as `convgrad.register` does in a process of
its own: a kernel that reads past the end of its operands does not survive it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Final

from torch import Tensor

from .memory_guards import Poison, paged_copy
from .operands import Operands, slots_of
from .properties import Found
from .property_check import Failed, PropertyCheck, Skipped
from .samples import sample

_THREADS = 4
_ROUNDS = 3


def pages(check: PropertyCheck) -> Found:
    """It reads nothing in front of its operands and nothing behind them: a closed page lies there."""
    if check.device.type != "cpu":
        raise Skipped("only pages of the CPU's memory can be closed")
    for how, passes, run in check.variants():
        operands = check.integers(*passes)
        slots = slots_of(passes)
        for at_end, side in ((True, "behind"), (False, "in front of")):
            try:
                closed: Operands = {
                    slot: paged_copy(t, at_end=at_end)
                    for slot, t in zip(slots, check.prepared(operands, slots), strict=True)
                }
            except NotImplementedError as e:
                raise Skipped(str(e)) from None
            where = f"closed pages {side} its operands {how}".rstrip()
            yield check.compare(run(closed), operands, where=where)


def threads(check: PropertyCheck) -> Found:
    """Four threads at once, with one weight and two inputs, three times each, do not disturb one another."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise Skipped("Triton's interpreter runs one kernel at a time")
    for how, passes, run in check.variants():
        first = check.integers(*passes)
        weight = {slot: t for slot, t in first.items() if slot == "weight"}
        inputs = [first, {**check.integers(*passes, other=True), **weight}]
        placed: list[Operands] = [{slot: check.place(t) for slot, t in each.items()} for each in inputs]
        for i, result in _at_once(run, placed):
            where = f"in one of {_THREADS} threads at once {how}".rstrip()
            yield check.compare(result, inputs[i], where=where)


def _at_once(run: Callable[[Operands], Tensor], operands: list[Operands]) -> list[tuple[int, Tensor]]:
    """Every result, with the number of the operands that it is of."""
    barrier = Barrier(_THREADS)

    def calls(thread: int) -> list[tuple[int, Tensor]]:
        barrier.wait()
        return [(i, run(operands[i])) for i in ((thread + r) % len(operands) for r in range(_ROUNDS))]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            return [found for thread in pool.map(calls, range(_THREADS)) for found in thread]
    finally:
        sys.setswitchinterval(before)


def samples(check: PropertyCheck) -> Found:
    """Of a result that is too large to compute twice, every element is written, and those at the corners and one in
    each of many parts are right.
    """
    if check.problem.padding_mode != "zeros":
        raise Skipped("single elements are computed for padding with zeros only")
    for how, passes, run in check.variants():
        operands = check.integers(*passes, certain=False)
        placed: Operands = {slot: check.place(t) for slot, t in operands.items()}
        with Poison() as poison, check.parallel():
            result = run(placed)
        if poison.overstepped():
            raise Failed("it wrote outside a tensor that it allocated")
        if check.output == "grad_bias":
            yield check.compare(result, operands, where=how)
            continue
        unwritten = ~result.isfinite()
        if bool(unwritten.any()):
            at = tuple(unwritten.nonzero()[0].tolist())
            raise Failed(f"element {at} is {result[at].item()}: never written, or made of what was not {how}".rstrip())
        places = sample(check.problem, check.output, check.seed)
        yield check.compare_at(places, result, operands, how)


STRESS: Final = {p.__name__: p for p in (pages, threads, samples)}
