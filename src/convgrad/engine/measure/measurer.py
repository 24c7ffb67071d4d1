"""The measurer: which candidate computes some outputs of a problem fastest, found out on this machine.

A plan whose choice is not final is measured when it runs (`watched`). The candidates are the backends that can, for
several gradients each joint backward and the fastest separate passes. Each is checked before it is timed for the first
time. All are called alternately, as a plan calls them. One that takes more than twice as long as the best is called a
few times and no more; one that looks faster than ATen is compared with it once more, by themselves, and the worse of
both comparisons counts. What rules propose on a GPU is timed once against ATen, on the operands of its first call. One
process at a time measures; the others read the result.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from ..._compat import dispatch_modes, jit_tracing, out_of_memory, warn_user
from ...backends import Backend, padded
from ...problem import ConvProblem, Outputs, passes_of
from ...settings import capturing, determinism_demanded, measuring, measuring_share
from ..events import thread, unobserved
from ..plan import Plan, Step, bind_step, slots_of
from ..registry import backends, computed_at_once, registered
from . import store
from .environment import environment, kind_of_machine
from .measurements import SETTLED, Measurement, add, find, reload, similar
from .timer import Comparison, call_seconds, compare, second_call
from .trials import trials

_HOPELESS = 2.0  # times the best
_SECONDS = 0.1  # for the rounds of one comparison
_TIE = 1.03  # times as long: not worth finding out which of two is the faster
_LONGEST = 10  # times as long, where one call takes long
#: Before them, a candidate that takes no longer than this is called once more.
_LOOKS = (1.0, 0.1, 0.03, 0.01)
_MOST_BYTES = 2 << 30  # of operands and result
_GRANTED = 0.5  # seconds of measuring before its share of the running time counts
_TURN = 60.0  # seconds to wait for others, where every problem is to be measured
_AGAIN = 10.0  # seconds until a choice that is not final is measured again
_PAUSE = 1.0  # seconds until it is tried again, if there was no time
#: The share of the running time that timing what a rule proposed may take, and the seconds before it counts.
_FOR_PROPOSALS = 0.05, 5.0

#: What is wrong with some outputs of a problem by a backend, empty where nothing is; handed in from above.
Check = Callable[[Backend, ConvProblem, Outputs, torch.device], str]
Kernel = Callable[..., Any]
Candidates = dict[str, tuple[Step, ...]]
Calls = Mapping[str, Callable[[], object]]
Given = dict[int, torch.Tensor] | None


@dataclass
class _State:
    """The state of measuring in this process: since when it is on, the time it took, and what was measured when."""

    check: Check | None = None
    since: float | None = None
    spent: float = 0.0
    busy: bool = False
    measured: dict[Any, float] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)


_state = _State()
if hasattr(os, "register_at_fork"):  # another thread of the parent was measuring
    os.register_at_fork(after_in_child=lambda: vars(_state).update(lock=threading.RLock(), busy=False))


def check_with(check: Check) -> None:
    """Look at every candidate with this function before it is timed for the first time."""
    _state.check = check


# ---- whether to measure ----------------------------------------------------------------------------


def worth_measuring(problem: ConvProblem, device: torch.device, known: Measurement | None) -> bool:
    """Whether a choice is not final, and a call may measure it, now or a little later."""
    share = measuring_share(device)
    settled = known and known.count >= SETTLED and known.complete and (known.same or share < inf)
    if share == 0 or settled or problem.least_bytes > _MOST_BYTES or not kind_of_machine(device):
        return False
    return not (jit_tracing() is not None or dispatch_modes() or torch.compiler.is_compiling())


def not_timed(device: torch.device) -> str:
    """Return why a proposal may not be timed on a device now; empty where it may."""
    if determinism_demanded(device):
        return "under deterministic algorithms nothing is timed"
    if measuring[0] == 0:
        return "measure(False) forbids timing"
    return "in a capture nothing is timed" if device.type == "cuda" and capturing() else ""


@contextmanager
def _alone(device: torch.device, share: float, granted: float) -> Iterator[bool]:
    """Tell the block whether it may measure: there is time, and no capture, thread or process prevents it."""
    now = time.perf_counter()
    if _state.since is None:
        _state.since = now
    late = share < inf and _state.spent >= granted + share * (now - _state.since)
    capture = device.type == "cuda" and capturing()
    if share == 0 or late or capture or not _state.lock.acquire(blocking=share == inf):
        yield False
        return
    start, outer = time.perf_counter(), _state.busy
    try:
        _state.busy = True
        with store.alone(_TURN if share == inf else 0.0) if not outer else nullcontext(False) as alone:
            yield alone  # not by a candidate that calls the library
    finally:
        _state.busy = outer
        _state.spent += time.perf_counter() - start
        _state.lock.release()


def measure_now(
    problem: ConvProblem,
    outputs: Outputs,
    device: torch.device,
    *,
    force: bool = False,
    proposal: Candidates | None = None,
    given: Given = None,
) -> Measurement | None:
    """Measure a problem if there is time and no other process measures, or read what one has just measured; else None.

    ``force``: the user asked for it, so it waits for others, whatever the settings and the time say. ``proposal``: what
    a rule proposed and ATen's, for which there is time of its own, on ``given`` operands; else all candidates.
    """
    share, granted = _FOR_PROPOSALS if proposal else (inf if force else measuring_share(device), _GRANTED)
    every = share == inf  # also one of which a similar one was measured
    key = passes_of(outputs), problem if every else similar(problem), environment(device)
    if not force and time.perf_counter() - _state.measured.get(key, -inf) < _AGAIN:
        return None
    with suppress(RuntimeError, MemoryError), _alone(device, share, granted) as alone:
        if not alone:
            return None
        first, _state.measured[key] = key not in _state.measured, time.perf_counter()
        if first and not force:
            reload()
            known = find(problem, outputs, device)
            if known is not None and (known.same or not every):
                return known
        return _compared(problem, outputs, device, proposal or _candidates(problem, outputs, device), given)
    return None


def watched(kernel: Kernel, problem: ConvProblem, step: Step, device: torch.device) -> Kernel:
    """Return the kernel of a step whose choice is not final: a call measures it, and then all choices are made anew.

    What a rule proposed is timed at its first call; until then ATen runs.
    """
    problem = problem if problem.padding_mode == "zeros" else padded(problem)
    runs, due, proposal = kernel, 0.0, None
    if step.proposed:
        pytorchs = step._replace(backend=backends()["aten"])
        runs, proposal = bind_step(problem, pytorchs), {s.backend.name: (s,) for s in (pytorchs, *step.proposed)}

    def run(*args: Any) -> Any:
        nonlocal due
        now = time.perf_counter()
        if now >= due and not (proposal and not_timed(device)):
            due = now + (0.0 if proposal else _PAUSE)
            given = dict(zip(slots_of(step.outputs), args, strict=False)) if proposal else None
            measure_now(problem, step.unsettled or step.outputs, device, proposal=proposal, given=given)
        return runs(*args)

    return run


def fusion_gains(plan: Plan, apart: Callable[[], object], fused: Callable[[], object]) -> bool:
    """Return whether one call is faster than another for the same: timed once and stored, as what a rule proposes."""
    if plan.fusion_gains is None:
        key = f"{environment(plan.device)} | {similar(plan.problem)}"
        if time.perf_counter() - _state.measured.get(key, -inf) < _PAUSE:
            return False
        plan.fusion_gains = store.read("fusion", key)
        if plan.fusion_gains is None and not_timed(plan.device):
            plan.fusion_gains = False  # for this plan, which is not that of calls under other flags
        elif plan.fusion_gains is None:
            _state.measured[key] = time.perf_counter()  # the store is not read in each call until there is time
            with suppress(RuntimeError, MemoryError), _alone(plan.device, *_FOR_PROPOSALS) as alone, torch.no_grad():
                if alone:
                    with unobserved():
                        times, raised = _times({"apart": apart, "fused": fused}, plan.device, compile=True)
                    if "fused" in (*times, *raised):
                        plan.fusion_gains = times.get("fused", 1.0) < 1
                        store.write("fusion", key, plan.fusion_gains)
    return bool(plan.fusion_gains)


# ---- candidates ------------------------------------------------------------------------------------


def steps_of(candidate: str, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[Step, ...] | None:
    """The steps of a candidate; None where one of its backends is not there or cannot."""
    names, there, steps = candidate.split(", "), backends(), list[Step]()
    parts: list[Outputs] = [outputs] if len(names) == 1 else [(p,) for p in passes_of(outputs)]
    for name, part in zip(names, parts, strict=False):
        given = computed_at_once(there[name], problem, part, device) if name in there else None
        steps += [Step(there[name], given, "")] if given else []
    return tuple(steps) if len(steps) == len(parts) == len(names) else None


def _candidates(problem: ConvProblem, outputs: Outputs, device: torch.device) -> Candidates:
    """Name -> steps, ATen's first where it can; for several passes also the fastest of each, which is measured."""
    found: Candidates = {}
    for name, entry in registered().items():
        steps = steps_of(name, problem, outputs, device) if entry.candidate else None
        if steps and not entry.backend.repeats_aten(problem, device):
            found[name] = steps
    if len(passes := passes_of(outputs)) > 1:
        each = [_compared(problem, (p,), device, _candidates(problem, (p,), device)) for p in passes]
        name = ", ".join(m.ranked()[0][0] for m in each if m is not None)
        if steps := steps_of(name, problem, outputs, device):
            found[name] = steps
    return found


def _compared(
    problem: ConvProblem, outputs: Outputs, device: torch.device, candidates: Candidates, given: Given = None
) -> Measurement | None:
    """Measure candidates once more, on given operands or random ones, and keep the result; None if none can run."""
    known = find(problem, outputs, device) or Measurement()
    wrong, check = known.wrong.copy(), _state.check
    for name, steps in candidates.items():
        for backend, part, *_ in () if known.same and name in known.times else steps:
            trusted = backend.name == "aten" or backend.checks_itself  # ATen is never banned
            if name not in wrong and not trusted and check and (why := check(backend, problem, part, device)):
                text = f"the backend {backend.name!r} is not used for {problem}, it is wrong there: {why}"
                warn_user(text, RuntimeWarning)
                wrong[name] = why
    right = {name: (problem, steps) for name, steps in candidates.items() if name not in wrong}
    recorded, thread.in_backend = thread.in_backend, True  # PyTorch's convolutions in it are not taken over
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            times, raised = _times(trials(right, outputs, device, given), device, compile=given is not None)
        # A backend that checks itself may have found at its first call that it is wrong.
        times = {name: t for name, t in times.items() if steps_of(name, problem, outputs, device)}
    finally:
        thread.in_backend = recorded
    if not times or (given and len(times) + len(raised) < len(right)):  # of two, one had no memory
        return None
    used = {step.backend for steps in candidates.values() for step in steps}
    versions = {backend.name: backend.version for backend in used if backend.version}
    new = Measurement({name: (t,) for name, t in times.items()}, wrong | raised, versions)
    return add(problem, outputs, device, new)


def _times(calls: Calls, device: torch.device, compile: bool = False) -> tuple[dict[str, float], dict[str, str]]:
    """The time of each candidate relative to the first one's, and what those raised that cannot be called.

    ``compile``: the first calls are not counted as time of measuring.
    """
    once: dict[str, float] = {}
    raised: dict[str, str] = {}
    for name, call in calls.items():
        start = time.perf_counter()
        try:
            once[name] = second_call(call, device)
        except Exception as error:  # whatever a user's function raises
            if not out_of_memory(error):  # which passes
                raised[name] = f"it raised {type(error).__name__}: {str(error)[:200]}"
        if compile:
            _state.spent -= time.perf_counter() - start
    if not once:
        return {}, raised
    for most in _LOOKS:  # caches and memory settle; a disturbance hits one look, and makes a brief call a long one
        for name, took in once.items():
            if took <= most:
                once[name] = min(took, call_seconds(calls[name], device))
    first, fastest = next(iter(once)), min(once, key=lambda name: once[name])
    times = {name: took / once[first] for name, took in once.items()}

    def compared(names: list[str]) -> Comparison:
        known, base = {name: once[name] for name in names}, first if first in names else fastest
        rounds = max(1, min(7, int(_LONGEST * _SECONDS / sum(known.values()))))
        options = {"seconds": _SECONDS, "device": device, "tie": _TIE, "host": True}
        return compare({name: calls[name] for name in names}, base, least_rounds=rounds, known=known, **options)

    hopeful = [name for name in calls if once.get(name, inf) <= _HOPELESS * once[fastest]]
    if len(hopeful) > 1:
        seen = compared(hopeful)
        times |= {name: times[seen.baseline] / seen.speedup(name).value for name in hopeful}
    confirmed = {first}
    while (best := min(times, key=lambda name: times[name])) not in confirmed:
        confirmed.add(best)  # the choice would leave the first one: once more, by themselves
        seen = compared([first, best])
        clearly = seen.at_least(best) > 1
        times[best] = max(times[best], 1 / seen.speedup(best).value, 0.0 if clearly else 1.0)
    return times, raised
