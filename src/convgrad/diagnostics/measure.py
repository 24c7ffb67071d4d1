"""How long the chosen backend and ATen take for each output of a problem, on the machine that is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..backends import COPY
from ..engine import Step, get_backend, reasons_against, trials
from ..engine.ab_timer import compare, second_call
from ..problem import PASSES, ConvProblem
from .explanation import Answer
from .onednn_log import onednn_log

_MOST_BYTES = 4 << 30
_SLOW = 0.2  # seconds
_DIFFERENT = 1.05  # times as long: less is noise


def timed(problem: ConvProblem, answers: list[Answer], device: torch.device) -> list[Answer]:
    """The answers with the time of the chosen backend and of ATen, each pass timed alternately in this process.

    One that computes a pass only together with others has no time.
    """
    if problem.empty or problem.least_bytes > _MOST_BYTES:
        return answers
    found = list(answers)
    for pass_ in PASSES:
        asked = [i for i, r in enumerate(found) if r.output == pass_ and (r.chosen or (r.by_aten and r.runs))]
        rows = [(i, get_backend(found[i].backend)) for i in asked]
        rows = [(i, b) for i, b in rows if not reasons_against(b, problem, (pass_,), device, requested=True)]
        if not rows:
            continue
        steps = {found[i].backend: Step(backend, (pass_,), "requested by name") for i, backend in rows}
        calls = trials({name: (problem, (step,)) for name, step in steps.items()}, (pass_,), device)
        seconds = _seconds(calls, device)
        for i, _ in rows:
            name, runs = found[i].backend, found[i].runs
            primitive = _onednn_primitive(calls[name]) if found[i].by_aten and device.type == "cpu" else ""
            runs = f"{runs}: {primitive}" if primitive else runs
            found[i] = replace(found[i], seconds=seconds[name], runs=runs, reasons=_seen(found[i], seconds))
    return found


def _seen(row: Answer, seconds: dict[str, float]) -> tuple[str, ...]:
    """The reasons of a row; one that expects another order than was measured just now says that it was a rule's."""
    aten = next((s for name, s in seconds.items() if name.removesuffix(COPY) == "aten"), None)
    slower = aten is not None and seconds[row.backend] > aten * _DIFFERENT
    if row.chosen and slower and row.reasons[0].startswith("by rule"):
        return ("by rule; in this measurement aten took less time",)
    return row.reasons


def _seconds(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Seconds of one call each, timed alternately; a slow one is called twice and no more."""
    once = {name: second_call(call, device) for name, call in calls.items()}
    if max(once.values()) > _SLOW:
        return once
    seen = compare(calls, seconds=0.3, device=device, least_rounds=3)
    return {name: seen.median(name) for name in calls}


def _onednn_primitive(call: Callable[[], object]) -> str:
    """oneDNN's names of the primitives behind one call on the CPU."""
    with onednn_log() as take:
        call()
        return " + ".join(dict.fromkeys(take()))
