"""How fast a kernel is that is being registered, compared with what would run without it, on a few of its problems."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from .._compat import warn_user
from ..check import check_problem, default_problems, real_layers
from ..engine import Step, choose, measurements, store, trials, without
from ..engine.ab_timer import Ratio, compare, second_call
from ..errors import CheckError
from ..problem import ConvProblem, Outputs
from . import refusal
from .backend import CustomBackend, Timing, in_words

#: How many problems are timed for each way in which a kernel is called.
_MOST = 3
#: Seconds in all at most, and for one comparison. Calls that take a quarter of that are made four times and no more.
_SECONDS, _EACH = 0.5, 0.06
#: Of a kernel that is preferred and never as fast as this, a warning says so.
_SLOW = 0.5


def measure(backend: CustomBackend, named: Sequence[ConvProblem], seconds: float) -> tuple[Timing, ...]:
    """Time a backend on some of the problems that it accepts, or read from the store what was found before.

    For a preferred one that is slower everywhere, the user is warned when it is timed.

    Args:
        named: problems that the user names, taken first.
        seconds: how long the check of it may take; this takes a quarter of that at most, and less than a second.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # an interpreter's time says nothing of the kernel's
        return ()
    device = torch.device("cpu" if backend.runs_on("cpu") else "cuda")
    texts = sorted(str(p) for p in named)
    key = f"speed of {backend.name} {backend.version} on {measurements.environment(device)}, {' '.join(texts)}"
    found = store.read("speed", key)
    if isinstance(found, list):
        return tuple(Timing(t[0], tuple(t[1]), *t[2:]) for t in found)
    timings = tuple(_timings(backend, named, device, time.perf_counter() + min(_SECONDS, seconds / 4)))
    store.write("speed", key, [list(t) for t in timings])
    slow = {t.outputs for t in timings} - {t.outputs for t in timings if t.speed >= _SLOW}
    if backend.preferred and slow:
        worst = [t for t in timings if t.outputs in slow]
        warn_user(
            f"{backend.name!r} runs wherever it is usable, and is slower there: {in_words(worst)} "
            f"({worst[0]}); prefer=False runs it only where it is named"
        )
    return timings


def _timings(
    backend: CustomBackend, named: Sequence[ConvProblem], device: torch.device, end: float
) -> Iterator[Timing]:
    swept: list[Outputs] = [s for s in backend.sweeps if "grad_bias" not in s]
    computed = [*((p,) for p in backend.passes if not any(p in s for s in swept)), *swept]
    queues = [(outputs, _problems(backend, outputs, named, device)) for outputs in computed]
    for number in range(_MOST):
        for outputs, problems in queues:
            if number and time.perf_counter() > end:  # each way once in any case
                return
            for problem in islice(problems, 1):
                yield _timed(backend, outputs, problem, device)


def _problems(
    backend: CustomBackend, outputs: Outputs, named: Sequence[ConvProblem], device: torch.device
) -> Iterator[ConvProblem]:
    """Accepted ones: those named, then the usual that do not take too long; if there are none, a small one."""

    def accepted(problems: Iterable[ConvProblem]) -> list[ConvProblem]:
        plain = [p for p in problems if not (p.empty or (p.transposed and len(outputs) > 1))]
        return [p for p in plain if not backend.against(p, outputs, device)]

    found = accepted(named)
    yield from found
    small = accepted(sorted(default_problems(), key=lambda p: -p.flops))[:1]
    mine = (Step(backend, outputs, ""),)
    per_flop = [second_call(trials({"mine": (p, mine)}, outputs, device)["mine"], device) / p.flops for p in small]
    layers = real_layers()
    first = "contiguous" not in backend.layouts and "channels_last" in backend.layouts  # no copy is its own cost
    usual, last = ([p for p in layers if p.channels_last == wanted] for wanted in (first, not first))
    others = [p.replace(dtype=d) for d in (torch.float64, torch.bfloat16, torch.float16) for p in (*usual, *last)]
    for group in (usual, last, others):
        some = [p for p in accepted(group) if not per_flop or per_flop[0] * p.flops < _EACH]
        yield from some
        if some:
            return
    yield from small


def _timed(backend: CustomBackend, outputs: Outputs, problem: ConvProblem, device: torch.device) -> Timing:
    with without(backend.name):  # one that is to be replaced
        others = choose(problem, outputs, device)
    ways = {"mine": (problem, (Step(backend, outputs, ""),)), "theirs": (problem, others)}
    try:
        calls = trials(ways, outputs, device)
        once = {"mine": second_call(calls["mine"], device)}
    except Exception as error:  # it has accepted it
        [again] = check_problem(backend, problem, outputs[0], device=device, properties=["samples"])
        if again.status != "failed":
            again = replace(again, status="failed", message=f"it raised {type(error).__name__}: {error}")
        raise CheckError(refusal.wrong([again], [], "when it was timed")) from error
    once["theirs"] = second_call(calls["theirs"], device)
    if max(once.values()) > _EACH / 4:
        least = {who: min(once[who], second_call(call, device)) for who, call in calls.items()}
        ratio = Ratio(*[least["theirs"] / least["mine"]] * 3)
    else:
        ratio = compare(calls, "theirs", seconds=_EACH, device=device).speedup("mine")
    name = " and ".join(dict.fromkeys(s.backend.name for s in others))
    return Timing(str(problem), outputs, name, *ratio)
