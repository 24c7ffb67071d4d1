"""The speed of a kernel that is being registered, relative to what would run without it, on a few of its problems."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import torch

from .._compat import warn_user
from ..engine import Step, choose, measurements, store, trials
from ..engine.measure import compare, second_call
from ..errors import CheckError
from ..problem import ConvProblem, Outputs
from . import refusal
from .problem_set import FLOATS, default_problems, real_layers
from .suite import check_problem
from .user_backend import CustomBackend, Timing, in_words

#: Problems that are timed for each set of outputs that one call computes.
_MOST: Final = 3
#: Seconds in all at most, and for one comparison. Calls that take a quarter of that are made four times and no more.
_SECONDS, _EACH = 0.5, 0.06
#: A preferred kernel that is slower than this everywhere gets a warning.
_SLOW: Final = 0.5


def measure(backend: CustomBackend, seconds: float) -> tuple[Timing, ...]:
    """Time a backend on some of the problems that it accepts, or return what was stored; warn of a slow one.

    It takes a quarter of the ``seconds`` of the check at most, and less than a second. CheckError if the kernel raises.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":  # an interpreter's time says nothing of the kernel's
        return ()
    device = torch.device("cpu" if backend.runs_on("cpu") else "cuda")
    texts = " ".join(sorted(map(str, backend.named)))
    key = f"speed of {backend.name} {backend.version} on {measurements.environment(device)}, {texts}"
    stored = store.read("speed", key)
    if isinstance(stored, list):
        return tuple(Timing(t[0], tuple(t[1]), *t[2:]) for t in stored)
    timings = tuple(_timings(backend, device, time.perf_counter() + min(_SECONDS, seconds / 4)))
    store.write("speed", key, [list(t) for t in timings])
    slow = {t.outputs for t in timings} - {t.outputs for t in timings if t.speed >= _SLOW}
    if backend.prefer is True and slow:
        worst = [t for t in timings if t.outputs in slow]
        warn_user(
            f"{backend.name!r} runs wherever it is usable, and is slower there: {in_words(worst)} ({worst[0]}); "
            'prefer="measured" runs it only where it was measured to be faster, prefer=False only where it is named'
        )
    return timings


def _timings(backend: CustomBackend, device: torch.device, end: float) -> Iterator[Timing]:
    swept: list[Outputs] = [s for s in backend.sweeps if "grad_bias" not in s]
    computed = [*((p,) for p in backend.passes if not any(p in s for s in swept)), *swept]
    queues = [(outputs, _problems(backend, outputs, device)) for outputs in computed]
    for number in range(_MOST):
        for outputs, problems in queues:
            if number and time.perf_counter() > end:  # each set of outputs once in any case
                return
            for problem in islice(problems, 1):
                yield _timed(backend, outputs, problem, device)


def _problems(backend: CustomBackend, outputs: Outputs, device: torch.device) -> Iterator[ConvProblem]:
    """Yield accepted problems: those named, then layers of networks that do not take too long, or else a small one."""

    def accepted(problems: Iterable[ConvProblem]) -> list[ConvProblem]:
        plain = [p for p in problems if not (p.empty or (p.transposed and len(outputs) > 1))]
        return [p for p in plain if not backend.against(p, outputs, device)]

    yield from accepted(backend.named)
    small = accepted(sorted(default_problems(), key=lambda p: -p.flops))[:1]
    per_flop = [_called(backend, outputs, p, device)[1] / p.flops for p in small]
    only_last = "contiguous" not in backend.layouts and "channels_last" in backend.layouts  # no copies are timed
    layers = sorted(real_layers(), key=lambda p: p.channels_last != only_last)
    every = accepted(p.replace(dtype=dtype) for dtype in FLOATS for p in layers)
    fast = [p for p in every if not per_flop or per_flop[0] * p.flops < _EACH] or small
    yield from (p for p in fast if (p.dtype, p.channels_last) == (fast[0].dtype, fast[0].channels_last))


def _timed(backend: CustomBackend, outputs: Outputs, problem: ConvProblem, device: torch.device) -> Timing:
    others = choose(problem, outputs, device, without=backend.name)  # a registered kernel that is being replaced
    calls, seconds = _called(backend, outputs, problem, device, others)
    once = {"mine": seconds, "theirs": second_call(calls["theirs"], device)}
    slow = {"known": once, "least_rounds": 2} if max(once.values()) > _EACH / 4 else {}
    ratio = compare(calls, "theirs", seconds=_EACH, device=device, **slow).speedup("mine")
    name = " and ".join(dict.fromkeys(s.backend.name for s in others))
    return Timing(str(problem), outputs, name, ratio.value, *(ratio[1:] if ratio.low > 0 else [ratio.value] * 2))


def _called(
    backend: CustomBackend, outputs: Outputs, problem: ConvProblem, device: torch.device, others: tuple[Step, ...] = ()
) -> tuple[Any, float]:
    """Return the calls to be timed, of a backend and of ``others``, and the seconds that the backend's takes."""
    steps = {"mine": (problem, (Step(backend, outputs, ""),)), "theirs": (problem, others)}
    try:
        calls = trials({name: one for name, one in steps.items() if one[1]}, outputs, device)
        return calls, second_call(calls["mine"], device)
    except Exception as error:  # the kernel accepts it, so no error is expected
        [again] = check_problem(backend, problem, outputs[0], device=device, properties=["exact"])
        if again.status != "failed":
            again = replace(again, status="failed", message=f"it raised {type(error).__name__}: {error}")
        raise CheckError(refusal.wrong([again], [], "when it was timed")) from error
