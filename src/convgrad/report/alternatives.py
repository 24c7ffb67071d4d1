"""What else could compute a row: every other backend and the other layout, timed alternately with what is chosen."""

from __future__ import annotations

import torch

from .._compat import channels_last_of
from ..check import first_look
from ..engine import Step, active, backends, choose, measurements, steps_of, trials
from ..engine.ab_timer import Comparison, compare, second_call
from ..problem import ConvProblem, Output, passes_of

CHOSEN, LAST = "chosen", "channels_last"

_HOPELESS = 2.0  # times what is chosen
_SECONDS = 0.15  # for one comparison
_MOST_SECONDS = 1.0  # of one call
_MOST_BYTES = 2 << 30


def compared(
    problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device, backend: str, *, layout: bool = False
) -> Comparison | None:
    """The backend that runs (`CHOSEN`), and all others that can and are not hopeless, by name.

    Each is checked before it is timed. None where the call takes too long or too much memory, or there is no other.

    Args:
        layout: also the convolution as it would run on operands in channels_last (`LAST`).
    """
    passes = passes_of(outputs)
    if not passes or problem.empty or problem.least_bytes > _MOST_BYTES:
        return None
    outputs = passes if len(passes) == 1 else outputs  # a sum costs every backend the same
    here = backends()

    def steps(name: str) -> tuple[Step, ...]:
        way = measurements.label(here[name]) if name in here else name
        return steps_of(way, problem, outputs, device) or ()

    def chosen(p: ConvProblem) -> tuple[Step, ...]:
        return choose(p, outputs, device, active())

    ways = {CHOSEN: (problem, steps(backend) or chosen(problem))}
    for name, other in here.items():
        found = steps(name) if other.candidate and name != backend else ()
        if found and not first_look(other, problem, found[0].outputs, device):
            ways[name] = (problem, found)
    if layout and problem.ndim > 1 and not problem.channels_last:
        turned = problem.replace(memory_format=channels_last_of(problem.ndim))
        ways[LAST] = (turned, chosen(turned))
    try:
        with torch.no_grad():
            calls = trials(ways, outputs, device)
            once = {name: second_call(call, device) for name, call in calls.items()}
            most = min(_MOST_SECONDS, _HOPELESS * once[CHOSEN])
            calls = {name: call for name, call in calls.items() if once[name] <= most}
            if len(calls) < 2 or CHOSEN not in calls:
                return None
            return compare(calls, CHOSEN, seconds=_SECONDS, device=device)
    except (RuntimeError, MemoryError):  # no memory for the operands
        return None
