"""How long the chosen backend and ATen take for each output of a problem, on the machine that is here."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..engine.ab_timer import compare
from ..engine.choice import Step
from ..engine.plan import Plan
from ..engine.registry import get
from ..problem import OPERANDS, PASSES, ConvProblem, Pass, Slot
from .aten_rules import Machine
from .onednn_log import OneDNNLog
from .row import Row

__all__ = ["require_here", "times"]

_MOST_BYTES = 4 << 30
_SLOW = 0.2  # seconds


def require_here(machine: Machine) -> None:
    """Refuse a machine that is only described.

    Raises:
        ValueError: it is not here.
    """
    try:
        here = Machine.here(machine.device_type)
    except (ValueError, RuntimeError):
        here = None
    if machine != here:
        raise ValueError(f"{machine} is not here, so nothing can be measured on it")


def times(problem: ConvProblem, rows: list[Row], device: torch.device) -> list[Row]:
    """Rows with the time of the chosen backend and of ATen, each pass timed alternately in this process."""
    if problem.empty or problem.least_bytes > _MOST_BYTES:
        return rows
    names: tuple[Slot, ...] = ("input", "weight", "grad_output")
    slots: dict[Slot, torch.Tensor] = {s: _random(problem.shape_of(s), problem, device) for s in names}
    found = list(rows)
    passes: list[Pass] = [p for p in PASSES if any(r.output == p for r in rows)]
    for output in passes:
        mine = {r.backend: i for i, r in enumerate(found) if r.output == output and (r.chosen or _usable_aten(r))}
        calls = {name: _call(problem, output, name, slots, device) for name in mine}
        seconds = _seconds(calls, device)
        kernels = _kernel(calls["aten"], device) if "aten" in calls else ""
        for name, i in mine.items():
            found[i] = found[i].with_seconds(seconds[name], kernels if name == "aten" else "")
    return found


def _seconds(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Seconds of one call each, timed alternately; a slow one is called twice and no more."""
    first = {}
    for _ in range(2):  # the first call allocates, compiles, plans
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            first[name] = time.perf_counter() - start
    if max(first.values()) > _SLOW:
        return first
    seen = compare(calls, seconds=0.3, device=device, least_rounds=3)
    return {name: seen.median(name) for name in calls}


def _usable_aten(row: Row) -> bool:
    return row.backend == "aten" and bool(row.runs)


def _random(shape: tuple[int, ...], problem: ConvProblem, device: torch.device) -> torch.Tensor:
    make = torch.randn if problem.dtype.is_floating_point else torch.ones
    t = make(shape, device="cpu")
    return t.to(device, problem.dtype).contiguous(
        memory_format=problem.memory_format if len(shape) > 3 else torch.contiguous_format
    )


def _call(
    problem: ConvProblem, output: Pass, name: str, slots: dict[Slot, torch.Tensor], device: torch.device
) -> Callable[[], object]:
    plan = Plan(problem, (output,), device, (Step(get(name), (output,), "measured"),))
    a, b = (slots[s] for s in OPERANDS[output])
    return lambda: plan.contract(a, b)


def _kernel(call: Callable[[], object], device: torch.device) -> str:
    """oneDNN's name of the primitive behind one call on the CPU."""
    if device.type != "cpu":
        return ""
    log = OneDNNLog()
    log.start()
    try:
        call()
        kernels = log.take()
    finally:
        log.stop()
    return " + ".join(dict.fromkeys(kernels))
