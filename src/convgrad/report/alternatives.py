"""What else could compute a row: every other backend and the other layout, timed alternately with what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import settings
from .._compat import channels_last_of
from ..check import first_look
from ..engine import Plan, Step, backends, plan_for, random_operands, reasons_against, slots_of
from ..engine.ab_timer import Comparison, call_seconds, compare
from ..problem import ConvProblem, Output, passes_of

CHOSEN, LAST = "chosen", "channels_last"

_HOPELESS = 2.0  # times what is chosen
_SECONDS = 0.15  # for one comparison
_MOST_SECONDS = 1.0  # of one call
_MOST_BYTES = 2 << 30

Outputs = tuple[Output, ...]


def worth_looking(problem: ConvProblem, outputs: Outputs) -> bool:
    """Whether operands for it may be made here."""
    return bool(passes_of(outputs)) and not problem.empty and problem.least_bytes <= _MOST_BYTES


def compared(
    problem: ConvProblem, outputs: Outputs, device: torch.device, backend: str, *, layout: bool = False
) -> Comparison | None:
    """The backend that runs (`CHOSEN`), and all others that can and are not hopeless, by name.

    Each is checked before it is timed. None where the call takes too long, or there is no other.

    Args:
        layout: also the convolution as it would run on operands in channels_last (`LAST`).
    """
    outputs = passes_of(outputs) if len(passes_of(outputs)) == 1 else outputs  # a sum costs every backend the same
    runs = _step(backend, problem, outputs, device)
    plans = {CHOSEN: Plan(problem, outputs, device, (runs,)) if runs else plan_for(problem, outputs, device)}
    for name, other in backends().items():
        step = _step(name, problem, outputs, device) if other.candidate and name != backend else None
        if step and not first_look(other, problem, step.outputs, device):
            plans[name] = Plan(problem, outputs, device, (step,))
    if layout and problem.ndim > 1 and not problem.channels_last:
        plans[LAST] = plan_for(problem.replace(memory_format=channels_last_of(problem.ndim)), outputs, device)
    try:
        with torch.no_grad():
            calls = {name: _call(plan) for name, plan in plans.items()}
            for call in calls.values():
                call()  # the first call allocates, compiles, plans
            once = {name: call_seconds(call, device) for name, call in calls.items()}
            most = min(_MOST_SECONDS, _HOPELESS * once[CHOSEN])
            calls = {name: call for name, call in calls.items() if once[name] <= most}
            if len(calls) < 2 or CHOSEN not in calls:
                return None
            return compare(calls, CHOSEN, seconds=_SECONDS, device=device)
    except (RuntimeError, MemoryError):  # no memory for the operands
        return None


def _step(name: str, problem: ConvProblem, outputs: Outputs, device: torch.device) -> Step | None:
    """One call of a backend for all of the outputs, with the gradient of the bias where it can; None: none such."""
    backend, flags = backends().get(name), settings.current()
    if backend is None:
        return None
    calls: tuple[Outputs, ...] = (outputs, passes_of(outputs))
    able = (wanted for wanted in calls if not reasons_against(backend, problem, wanted, device, flags))
    return next((Step(backend, wanted, "") for wanted in able), None)


def _call(plan: Plan) -> Callable[[], object]:
    p = plan.problem
    operands = random_operands(p, slots_of(plan.outputs), plan.device)
    if len(operands) == 2:
        return partial(plan.contract, *operands)
    grad_output, input, weight = operands
    ordered = (input, grad_output, weight) if p.transposed else (grad_output, input, weight)
    return partial(plan.gradients, *ordered)
