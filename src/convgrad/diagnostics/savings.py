"""Avoidable costs, the largest first, and what to do about each: another layout, another backend, measuring.

Every other backend, and the other layout, is timed alternately with what is chosen (`alternatives`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .._compat import channels_last_of
from ..backends import padded
from ..check import first_look
from ..engine import Step, active, choose, registered, steps_of
from ..engine.measure import Comparison
from ..problem import ConvProblem, Outputs, passes_of
from .measure import compared
from .profile import Cost
from .records import Call

CHOSEN, LAST = "chosen", "channels_last"

_HOPELESS = 2.0  # times what is chosen
_SECONDS = 0.15  # for one comparison
_MOST_BYTES = 2 << 30
_WORTH = 0.005  # of the whole: less is not worth a line
_MOST_LINES = 12


def costs_of_layout(seen: Comparison) -> list[Cost]:
    """Return what channels_last would save of a step that was timed in both layouts."""
    names = ("PyTorch, channels_last", "convgrad, channels_last")
    if names[1] not in seen.samples:
        return []
    both = Comparison("convgrad", seen.samples)
    ours = both.speedup(names[1])
    if ours.low <= 1:
        return []
    needed = Comparison(names[0], seen.samples).speedup(names[1]).low > 1
    remedy = 'convgrad.accelerate_(model, "channels_last")' if needed else "model.to(memory_format=torch.channels_last)"
    saved = (both.seconds("convgrad") - both.seconds(names[1])) * 1e3
    said = "" if needed else "; PyTorch's own kernels are as fast there"
    return [Cost("layout", f"In channels_last the whole step is {ours} as fast{said}.", remedy, saved)]


def costs_of_rows(
    rows: Sequence[Call], whole: float, until: float, tune: str, *, layout: bool, stock: bool
) -> tuple[list[Cost], str]:
    """Return what other backends would save of ``whole`` milliseconds, row by row, and how much was examined.

    No row is looked at after the time ``until``. ``tune``: the command that measures and remembers. ``layout``: also
    try each row in channels_last. ``stock``: nothing was taken over.
    """
    result: list[Cost] = []
    lasts: list[tuple[int, float]] = []
    looked = 0
    for i, row in enumerate(rows):
        if time.perf_counter() > until:
            break
        looked += 1
        seen = alternatives(row.convolution, row.passes, torch.device(row.device), row.backend_name, layout=layout)
        speedups = {} if seen is None else {name: seen.speedup(name) for name in seen.samples if name != CHOSEN}
        last = speedups.pop(LAST, None)
        if last and last.low > 1:
            lasts.append((i, row.total * (1 - 1 / last.value)))
        if faster := {name: speed for name, speed in speedups.items() if speed.low > 1}:
            best, gain = max(faster.items(), key=lambda one: one[1].value)
            what = f"{row.shown} of {row.layers[0] if row.layers else row.problem}: {best} is {gain} as fast as "
            kind, remedy = "backend", "convgrad.accelerate_(model)"
            if row.reason.startswith("requested by name"):
                remedy = f"leave out the request for {row.backend_name!r} (use_backend, backend=)"
            elif row.reason.startswith("registered by the user"):
                remedy = f'convgrad.unregister("{row.backend_name}")'
            elif row.reason != "PyTorch's own kernel":
                kind, remedy = "tune", tune
            elif not stock:  # a function, or a layer that `accelerate_` left
                remedy = "with convgrad.takeover(): around the training loop"
            result.append(Cost(kind, f"{what}{row.backend_name}.", remedy, row.total * (1 - 1 / gain.value), (i,)))
    if lasts:
        said = f"In channels_last {len(lasts)} of the {looked} most expensive rows are faster, each timed alone."
        remedy = "model.to(memory_format=torch.channels_last), and the inputs"
        result.append(Cost("layout", said, remedy, sum(ms for _, ms in lasts), tuple(i for i, _ in lasts)))
    result = [cost for cost in result if cost.milliseconds > _WORTH * whole]
    share = sum(row.total for row in rows[:looked]) / (sum(row.total for row in rows) or 1)
    how = f"{looked} of {len(rows)} rows, {share:.0%} of the time in convolutions, were timed against other backends."
    return result[:_MOST_LINES], how


def alternatives(
    problem: ConvProblem, outputs: Outputs, device: torch.device, backend: str, *, layout: bool = False
) -> Comparison | None:
    """Compare the backend that runs (`CHOSEN`) with all others that can and are not hopeless, by name.

    Each is checked before it is timed. None where the call takes too long or too much memory, or there is no other.
    ``layout``: also the convolution as it would run on operands in channels_last (`LAST`).
    """
    if problem.padding_mode != "zeros":
        problem = padded(problem)  # which every backend computes that does not pad in this way itself
    passes = passes_of(outputs)
    if not passes or problem.empty or problem.least_bytes > _MOST_BYTES:
        return None
    outputs = passes if len(passes) == 1 else outputs  # a sum costs every backend the same

    def steps(name: str) -> tuple[Step, ...]:
        return steps_of(name, problem, outputs, device) or ()

    candidates = {CHOSEN: (problem, steps(backend) or choose(problem, outputs, device, active()))}
    for name, (other, _, candidate, _) in registered().items():
        result = steps(name) if candidate and name != backend else ()
        if result and not (
            other.repeats_aten(problem, device) or first_look(other, problem, result[0].outputs, device)
        ):
            candidates[name] = (problem, result)
    if layout and problem.ndim > 1 and not problem.channels_last:
        turned = problem.replace(memory_format=channels_last_of(problem.ndim))
        candidates[LAST] = (turned, choose(turned, outputs, device, active()))
    if len(candidates) < 2:
        return None
    return compared(candidates, outputs, device, baselines=[CHOSEN], seconds=_SECONDS, hopeless=_HOPELESS)
