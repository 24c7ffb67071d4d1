"""The measurer: which way to compute some outputs of a problem is the fastest, found out on this machine.

The candidates are the backends that can, for several gradients each sweep and the fastest separate passes. Each is
checked before it is timed for the first time. All are called alternately, as a plan calls them. One that takes more
than twice as long as the best is called a few times and no more; one that looks faster than ATen is compared with it
once more, by themselves, and the worse of both comparisons counts. What a rule proposes on a GPU is timed once against
ATen alone, on the operands of its first call (`watched`). One process at a time measures; the others read the result.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch

from ..._compat import dispatch_modes, jit_tracing, out_of_memory, warn_user
from ...backends import Backend
from ...problem import ConvProblem, Outputs, passes_of
from ...settings import capturing, determinism_demanded, measuring, measuring_share
from ..cache import invalidate
from ..events import thread
from ..plan import Step, bind_step, slots_of
from ..registry import backends, computed_at_once, registered
from . import store
from .environment import environment, kind_of_machine
from .measurements import SETTLED, Measurement, add, find, key_of, label, parts_of, reload, similar
from .timer import Comparison, call_seconds, compare, second_call
from .trials import trials

_HOPELESS = 2.0  # times the best
_SECONDS = 0.1  # for the rounds of one comparison
_TIE = 1.03  # times as long: not worth finding out which of two is the faster
_LONGEST = 10  # times as long, where one call takes long
#: Before them, a way that takes no longer than this is called once more.
_LOOKS = (1.0, 0.1, 0.03, 0.01)
_MOST_BYTES = 2 << 30  # of operands and result
_GRANTED = 0.5  # seconds of measuring before its share of the running time counts
_TURN = 60.0  # seconds to wait for others, where every problem is to be measured
_AGAIN = 10.0  # seconds until an unsettled choice is measured again
#: Of what a rule proposed: seconds of timing before they may take only a share of the running time, and that share.
_PROPOSED_GRANTED, _PROPOSED_SHARE = 5.0, 0.05

#: What is wrong with some outputs of a problem by a backend, empty where nothing is; handed in from above.
Check = Callable[[Backend, ConvProblem, Outputs, torch.device], str]
Kernel = Callable[..., Any]


@dataclass
class _State:
    """The state of measuring in this process: since when it is on, the time it took, and what was measured when."""

    check: Check | None = None
    since: float | None = None
    spent: float = 0.0
    next_look: float = 0.0
    busy: bool = False
    #: By the key of a similar problem, or where every one is measured, of the problem itself.
    measured: dict[str, float] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.RLock)


_state = _State()
if hasattr(os, "register_at_fork"):  # another thread of the parent was measuring
    os.register_at_fork(after_in_child=lambda: vars(_state).update(lock=threading.RLock(), busy=False))


def check_with(check: Check) -> None:
    """Look at every candidate with this function before it is timed for the first time."""
    _state.check = check


# ---- whether to measure ----------------------------------------------------------------------------


def worth_measuring(problem: ConvProblem, device: torch.device, known: Measurement | None) -> bool:
    """Whether a choice that is about to run is unsettled and may be measured here, now or a little later."""
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


def _affordable(amount: float, share: float, proposed: bool = False) -> bool:
    """Whether measuring may take so many seconds now, if it may take this share of the running time."""
    if share == inf:
        return True
    now = time.perf_counter()
    if _state.since is None:
        _state.since = now
    return (_PROPOSED_GRANTED if proposed else _GRANTED) + share * (now - _state.since) - _state.spent > amount


@contextmanager
def _alone(device: torch.device, share: float, proposed: bool) -> Iterator[bool]:
    """Tell the block whether it may measure: there is time, and no capture, thread or process is in the way."""
    capture = device.type == "cuda" and capturing()
    if capture or not _affordable(0.0, share, proposed) or not _state.lock.acquire(blocking=share == inf):
        yield False
        return
    start, outer = time.perf_counter(), _state.busy
    try:
        if outer:  # a candidate that calls the library
            yield False
        else:
            _state.busy = True
            with store.alone(_TURN if share == inf else 0.0) as alone:
                yield alone
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
    proposal: Callable[[], Measurement | None] | None = None,
) -> Measurement | None:
    """Measure a problem if there is time and no other process measures, or read what one has just measured; else None.

    ``force``: the user asked for it, so it waits for others, whatever the settings and the time say. ``proposal``
    measures what a rule proposed, for which there is time of its own; without it all candidates are measured.
    """
    share = inf if force else _PROPOSED_SHARE if proposal else measuring_share(device)
    every = share == inf  # also one of which a similar one was measured
    key = key_of(problem, outputs, environment(device), about=not every)
    if not force and time.perf_counter() - _state.measured.get(key, -inf) < _AGAIN:
        return None
    with suppress(RuntimeError, MemoryError), _alone(device, share, proposal is not None) as alone:  # no memory
        if not alone:
            return None
        first, _state.measured[key] = key not in _state.measured, time.perf_counter()
        known = find(problem, outputs, device, fresh=True) if first and not force else None
        if known is not None and (known.same or not every):
            return known
        return proposal() if proposal else _compared(problem, outputs, device, _candidates(problem, outputs, device))
    return None


# ---- kernels whose choice is made again ---------------------------------------------------------------


def watched(kernel: Kernel, problem: ConvProblem, step: Step, device: torch.device) -> Kernel:
    """Return the kernel of a step which is proposed or unsettled: it makes all choices anew once there is time."""
    if step.proposed:
        return _confirmed(kernel, problem, step, device)
    if not step.unsettled:
        return kernel
    _state.next_look = max(_state.next_look, time.perf_counter() + 1.0)

    def run(*args: Any) -> Any:
        now = time.perf_counter()
        if now > _state.next_look:
            _state.next_look = now + _AGAIN / 10
            if _affordable(_GRANTED, measuring_share(device)):
                _state.next_look = now + _AGAIN
                reload()
                invalidate()
        return kernel(*args)

    return run


def _confirmed(kernel: Kernel, problem: ConvProblem, step: Step, device: torch.device) -> Kernel:
    """Return the kernel of a proposed step, timed against ATen's once, on its first operands; until then ATen runs."""
    steps = {"aten": (step._replace(backend=backends()["aten"]),), label(step.backend): (step,)}
    atens, faster = bind_step(problem, steps["aten"][0]), list[bool]()

    def run(*args: Any) -> Any:
        def proposal() -> Measurement | None:
            _compile(partial(kernel, *args))
            given = dict(zip(slots_of(step.outputs), args, strict=False))
            return _compared(problem, step.outputs, device, steps, given)

        if not faster and not (not_timed(device) or _state.busy):
            known = measure_now(problem, step.outputs, device, proposal=proposal)
            if known is not None:
                faster.append(known.ranked()[0][0] != "aten")
                invalidate()
        return (kernel if faster and faster[0] else atens)(*args)

    return run


def _compile(call: Callable[[], object]) -> None:
    """Make a call whose time does not count as time of measuring; where it raises, the next one does, too."""
    start = time.perf_counter()
    with suppress(Exception):
        call()
    _state.spent -= time.perf_counter() - start


#: (problem, device) -> whether a fused kernel is faster; emptied when full.
_fused: dict[tuple[ConvProblem, torch.device], bool] = {}
_FUSED, _MOST_FUSED = "fusion", 4096


def fusion_gains(
    problem: ConvProblem, device: torch.device, apart: Callable[[], object], fused: Callable[[], object]
) -> bool:
    """Return whether one call is faster than another for the same: timed once and stored, as what a rule proposes."""
    if (problem, device) in _fused:
        return _fused[problem, device]
    key = f"{environment(device)} | {similar(problem)}"
    gains = store.read(_FUSED, key)
    if gains is None and not not_timed(device):
        with _alone(device, _PROPOSED_SHARE, proposed=True) as alone, torch.no_grad():
            if alone:
                _compile(fused)
                try:
                    gains = _comparison({"apart": apart, "fused": fused}, "apart", device).at_least("fused") > 1
                    store.write(_FUSED, key, gains)
                except Exception:  # no memory, or it cannot be compiled: not in this process
                    gains = False
    if gains is None:
        return False
    if len(_fused) >= _MOST_FUSED:
        _fused.clear()
    return _fused.setdefault((problem, device), gains)


# ---- candidates ------------------------------------------------------------------------------------


def steps_of(way: str, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[Step, ...] | None:
    """The steps of a way; None where one of its backends is not there, is another version, or cannot."""
    named, there = parts_of(way), backends()
    parts: list[Outputs] = [outputs] if len(named) == 1 else [(p,) for p in passes_of(outputs)]
    if len(named) != len(parts) or not all(n in there and there[n].version == version for n, version in named):
        return None
    each = [(there[name], part) for (name, _), part in zip(named, parts, strict=True)]
    steps = [Step(b, given, "") for b, part in each if (given := computed_at_once(b, problem, part, device))]
    return tuple(steps) if len(steps) == len(each) else None


def _candidates(problem: ConvProblem, outputs: Outputs, device: torch.device) -> dict[str, tuple[Step, ...]]:
    """Way -> its steps, ATen's first where it can; for several passes also the fastest of each, which is measured."""
    found = {}
    for backend, _, candidate, _ in registered().values():
        steps = steps_of(label(backend), problem, outputs, device) if candidate else None
        if steps and not backend.repeats_aten(problem, device):
            found[label(backend)] = steps
    if len(passes := passes_of(outputs)) > 1:
        each = [_compared(problem, (p,), device, _candidates(problem, (p,), device)) for p in passes]
        way = ", ".join(m.ranked()[0][0] for m in each if m is not None)
        if steps := steps_of(way, problem, outputs, device):
            found[way] = steps
    return found


def _compared(
    problem: ConvProblem,
    outputs: Outputs,
    device: torch.device,
    ways: dict[str, tuple[Step, ...]],
    given: dict[int, torch.Tensor] | None = None,
) -> Measurement | None:
    """Measure these ways once more, on given operands or random ones, and keep the result; None if none can run."""
    known = find(problem, outputs, device) or Measurement()
    wrong, check = known.wrong.copy(), _state.check
    for way, steps in ways.items():
        for backend, part, *_ in () if known.same and way in known.times else steps:
            trusted = backend.name == "aten" or backend.checks_itself  # ATen is never banned
            if way not in wrong and not trusted and check and (why := check(backend, problem, part, device)):
                text = f"the backend {backend.name!r} is not used for {problem}, it is wrong there: {why}"
                warn_user(text, RuntimeWarning)
                wrong[way] = why
    ways = {way: steps for way, steps in ways.items() if way not in wrong}
    if not ways:
        return None
    recorded, thread.in_backend = thread.in_backend, True  # PyTorch's convolutions in it are not taken over
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            calls = trials({way: (problem, steps) for way, steps in ways.items()}, outputs, device, given)
            times, raised = _times(calls, device)
        # A backend that checks itself may have found at its first call that it is wrong.
        times = {way: t for way, t in times.items() if steps_of(way, problem, outputs, device)}
    finally:
        thread.in_backend = recorded
    if not times:
        return None
    return add(problem, outputs, device, Measurement({w: (t,) for w, t in times.items()}, wrong | raised))


def _comparison(
    calls: Mapping[str, Callable[[], object]], baseline: str, device: torch.device, **more: Any
) -> Comparison:
    return compare(calls, baseline, seconds=_SECONDS, device=device, tie=_TIE, host=True, **more)


def _times(calls: Mapping[str, Callable[[], object]], device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """The time of each way relative to the first one's, and what those raised that cannot be called."""
    once: dict[str, float] = {}
    raised: dict[str, str] = {}
    for way, call in calls.items():
        try:
            once[way] = second_call(call, device)
        except Exception as error:  # whatever a user's function raises
            if not out_of_memory(error):  # which passes
                raised[way] = f"it raised {type(error).__name__}: {str(error)[:200]}"
    if not once:
        return {}, raised
    for most in _LOOKS:  # caches and memory settle; a disturbance hits one look, and makes a brief call a long one
        for way, took in once.items():
            if took <= most:
                once[way] = min(took, call_seconds(calls[way], device))
    first, fastest = next(iter(once)), min(once, key=lambda way: once[way])
    times = {way: took / once[first] for way, took in once.items()}

    def compared(ways: list[str]) -> Comparison:
        seconds = {way: once[way] for way in ways}
        rounds = max(1, min(7, int(_LONGEST * _SECONDS / sum(seconds.values()))))
        base = first if first in ways else fastest
        return _comparison({way: calls[way] for way in ways}, base, device, least_rounds=rounds, known=seconds)

    hopeful = [way for way in calls if once.get(way, inf) <= _HOPELESS * once[fastest]]
    if len(hopeful) > 1:
        seen = compared(hopeful)
        times |= {way: times[seen.baseline] / seen.speedup(way).value for way in hopeful}
    confirmed = {first}
    while (best := min(times, key=lambda way: times[way])) not in confirmed:
        confirmed.add(best)  # the choice would leave the first one: once more, by themselves
        seen = compared([first, best])
        clearly = seen.at_least(best) > 1
        times[best] = max(times[best], 1 / seen.speedup(best).value, 0.0 if clearly else 1.0)
    return times, raised
