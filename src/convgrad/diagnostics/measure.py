"""How long the chosen backend and ATen take for each output of a problem, on the machine that is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .. import engine
from ..engine import Plan, Step, get_backend, slots_of
from ..engine.ab_timer import compare
from ..problem import PASSES, ConvProblem, Pass
from .aten_rules import Machine
from .explanation import Answer
from .onednn_log import OneDNNLog

_MOST_BYTES = 4 << 30
_SLOW = 0.2  # seconds
_DIFFERENT = 1.05  # times as long: less is noise


def is_here(machine: Machine) -> bool:
    """Whether a machine is this one, not one that is only described."""
    try:
        return machine == Machine.here(machine.device_type)
    except (ValueError, RuntimeError):
        return False


def require_here(machine: Machine) -> None:
    """Refuse a machine that is only described.

    Raises:
        ValueError: it is not here.
    """
    if not is_here(machine):
        raise ValueError(f"{machine} is not here, so nothing can be measured on it")


def random_operands(problem: ConvProblem, pass_: Pass, device: torch.device) -> list[Tensor]:
    """The two operands of a pass, in the problem's layout."""
    return engine.random_operands(problem, slots_of((pass_,)), device)


def plan_of(problem: ConvProblem, pass_: Pass, backend: str, device: torch.device) -> Plan:
    """A plan of one pass by a named backend."""
    return Plan(problem, (pass_,), device, (Step(get_backend(backend), (pass_,), "requested by name"),))


def timed(problem: ConvProblem, answers: list[Answer], device: torch.device) -> list[Answer]:
    """The answers with the time of the chosen backend and of ATen, each pass timed alternately in this process."""
    if problem.empty or problem.least_bytes > _MOST_BYTES:
        return answers
    found = list(answers)
    for pass_ in PASSES:
        rows = [i for i, r in enumerate(found) if r.output == pass_ and (r.chosen or (r.backend == "aten" and r.runs))]
        if not rows:
            continue
        a, b = random_operands(problem, pass_, device)
        plans = {found[i].backend: plan_of(problem, pass_, found[i].backend, device) for i in rows}
        calls: dict[str, Callable[[], object]] = {name: partial(p.contract, a, b) for name, p in plans.items()}
        seconds = _seconds(calls, device)
        for i in rows:
            name, runs = found[i].backend, found[i].runs
            primitive = _onednn_primitive(calls[name]) if name == "aten" and device.type == "cpu" else ""
            runs = f"{runs}: {primitive}" if primitive else runs
            found[i] = replace(found[i], seconds=seconds[name], runs=runs, reasons=_seen(found[i], seconds))
    return found


def _seen(row: Answer, seconds: dict[str, float]) -> tuple[str, ...]:
    """The reasons of a row; one that expects another order than was measured just now says that it was a rule's."""
    slower = "aten" in seconds and seconds[row.backend] > seconds["aten"] * _DIFFERENT
    if row.chosen and slower and row.reasons[0].startswith("by rule"):
        return ("by rule; in this measurement aten took less time",)
    return row.reasons


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


def _onednn_primitive(call: Callable[[], object]) -> str:
    """oneDNN's names of the primitives behind one call on the CPU."""
    log = OneDNNLog()
    log.start()
    try:
        call()
        return " + ".join(dict.fromkeys(log.take()))
    finally:
        log.stop()
