"""The conformance suite on a user's kernel, before anybody can use it.

The problems are made for the kernel (`convgrad.check.construct`) and checked in a child process, where a crash or a
hang is a result like others. What passed is remembered under a digest of the kernel (`verified.Verified`).
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import torch

from ..backends import Backend
from ..check import (
    Lost,
    NoChild,
    accepts,
    calls_with,
    check_problem,
    construct,
    cost,
    default_problems,
    in_child,
    is_large,
    outputs_of,
    why_not_in_child,
)
from ..engine import store
from ..errors import CheckError
from ..problem import ConvProblem, Output
from ..tables import counted
from . import refusal
from .adapted import ModuleBackend
from .backend import CustomBackend
from .source import hints
from .verified import Verified, parts_of

#: Problems of one output, those named not counted.
_MOST: Final = 120
_REPEATS: Final = 3
#: What every problem is checked for, and what only the first ones are, and after them each on every fourth.
_ALWAYS = ("memory", "exact", "bound", "bias", "sweeps", "pages")
_IN_TURN = ("deterministic", "again", "layouts", "nonfinite", "threads")
_FIRST, _TURNS = 12, 4
#: Of the first problems, then of every fourth and of large ones, with at most so many images.
_PARALLEL, _MOST_PARALLEL = 4, 64
_OF_LARGE = ("samples", "deterministic")
_ENDS_THE_PROCESS = ("pages",)
#: The first few are checked whole even if they are large, for a kernel that accepts no others.
_WHOLE, _MOST_WHOLE = 3, 30_000_000
#: So many times the given time may go into the problems that are needed: a busy machine lets no bugs through.
_OVERTIME: Final = 3
#: Seconds that the search for problems of an output may take beside that time: a part of it, or this if it is more.
_SEARCH, _LEAST_SEARCH = 0.3, 10.0
#: What any problem costs at least.
_LEAST_COST: Final = cost(ConvProblem.parse("ic1iw1oc1kw1"))
#: Seconds that one call may take; at first, and while problems are searched for, it may be more.
_PATIENCE, _FIRST_PATIENCE = 30.0, 90.0
#: So many calls of ``accepts`` may take that long, not the whole search, which is slow on a busy machine.
_SIGN_OF_LIFE = 500

#: What PyTorch says where a fork cannot differentiate, since the process that it came from did on a GPU's threads.
_UNFIT = "fork-based multiprocessing"


def verify(backend: CustomBackend, named: Sequence[ConvProblem], seconds: float) -> list[str]:
    """Check every output on problems that the backend accepts; the first that fails, crashes or hangs is a CheckError.

    Args:
        named: problems that the user names, checked first.
        seconds: how long it may take on each type of device; no problem is begun that does not fit in. The first one is
            not counted: it waits for what is loaded and compiled when the kernel is first called. Nor is the search.

    Returns:
        What was checked on each type of device, as sentences that begin with "verified" or "not verified".
    """
    devices = [d for d in ("cpu", "cuda") if backend.runs_on(d) and (d == "cpu" or torch.cuda.is_available())]
    if not devices:
        return [f"not verified: no {' or '.join(backend.devices or ())} is here"]
    return list(dict.fromkeys(_on_device(backend, device, named, seconds) for device in devices))


def _on_device(backend: CustomBackend, device: str, named: Sequence[ConvProblem], seconds: float) -> str:
    verified = Verified.remembered(backend, device)
    with store.alone() as alone:  # of many processes that begin together, one goes on with a check, and no worker does
        if not verified.enough(named, seconds, alone and multiprocessing.parent_process() is None):
            _go_on(backend, named, seconds, verified)
    return verified.sentence(seconds)


def _go_on(backend: CustomBackend, named: Sequence[ConvProblem], seconds: float, verified: Verified) -> None:
    """Check what is left to check, for this long, and remember it."""
    device, before = verified.device, len(verified.passed)
    verified.alone = why_not_in_child() if device == "cpu" else f"{device} does not outlive a fork"
    threads = torch.get_num_threads()
    examine = partial(_examine, backend, named, seconds, verified)
    if verified.alone or not _in_child(backend, examine, verified):
        try:
            examine(partial(_note, backend, verified))
        finally:
            torch.set_num_threads(threads)
    if len(verified.passed) == before:
        verified.tried = max(verified.tried, seconds)
    verified.named = sorted({*verified.named, *map(str, named)})
    verified.remember()


# ---- what happens --------------------------------------------------------------------------------

#: A kind, and what belongs to it: "doing", the output, the problem and the property that is looked at next (None and ""
#: while problems are searched for); "passed", the output and the problem; "failed", the results and what to do;
#: "nothing", the output that accepts no problem, and the reasons; "over", how many problems are left (None: unknown).
Send = Callable[..., None]


def _in_child(backend: CustomBackend, examine: Callable[[Send], None], verified: Verified) -> bool:
    """Examine the backend in a child; whether that was possible."""
    doing: tuple[Any, ...] = ("forward", None, "")
    started = False

    def patience() -> float:
        return _PATIENCE if started and doing[1] else _FIRST_PATIENCE

    try:
        for kind, *what in in_child(lambda send: examine(lambda *event: send(event)), patience):
            if kind == "doing":
                doing = tuple(what)
                continue
            started = True
            if kind == "failed" and any(_UNFIT in r.message for r in what[0]):
                verified.alone = "PyTorch cannot differentiate in a fork of this process"
                return False
            _note(backend, verified, kind, *what)
    except NoChild as no:
        verified.alone = str(no)
        return False
    except Lost as lost:
        output, problem, name = doing
        raise CheckError(refusal.lost(backend, output, problem, name, str(lost), len(verified.passed))) from None
    return True


def _note(backend: CustomBackend, verified: Verified, kind: str, *what: Any) -> None:
    """Keep what passed, or raise what did not."""
    if kind == "passed":
        verified.add(*what)
    elif kind == "failed":
        results, advice = what
        raise CheckError(refusal.wrong(results, advice, f"{counted(len(verified.passed))} passed"))
    elif kind == "nothing":
        output, reasons = what
        raise CheckError(refusal.nothing_accepted(backend, output, reasons, verified.device))
    elif kind == "over":
        (verified.left,) = what


# ---- the checks ----------------------------------------------------------------------------------


def _examine(
    backend: CustomBackend, named: Sequence[ConvProblem], seconds: float, verified: Verified, send: Send
) -> None:
    """Check the outputs in turn, problem by problem, until one fails or the time is over."""
    outputs, device = outputs_of(backend), verified.device
    search, found = max(_LEAST_SEARCH, seconds * _SEARCH / len(outputs)), list[ConvProblem]()
    queues: dict[Output, Iterator[Any]] = {
        o: _problems(backend, device, o, named, search, found, partial(send, "doing", o, None, "")) for o in outputs
    }
    budget, numbers, left = _Budget(seconds), Counter[Output](), 0
    several = max(2, torch.get_num_threads())  # kernels may share work among threads
    while queues:
        for output, queue in [*queues.items()]:
            number, needed = numbers[output], verified.few(output)
            if number and budget.spent(needed):  # the first problem of each output is checked in any case
                # Where many have passed the search is over, and the others can be counted.
                more = None if needed else sum(not verified.has(output, p) for p in queue)
                left = None if left is None or more is None else left + more
                del queues[output]
                continue
            send("doing", output, None, "")
            problem = next(queue, None)
            if not isinstance(problem, ConvProblem):
                del queues[output]
                if problem is not None:
                    send("nothing", output, problem)
                continue
            numbers[output] += 1
            if number and verified.has(output, problem):  # the first one is run again, to load
                continue
            large = is_large(problem) and (number >= _WHOLE or problem.flops > _MOST_WHOLE)
            if number and not budget.allows(problem, large, needed):
                left = None if left is None else left + 1
                continue
            begun: list[float] = []  # of each property, and of each call in it
            results = check_problem(
                backend,
                problem,
                output,
                device=device,
                repeats=_REPEATS,
                threads=several if _in_parallel(number, problem, large) else 1,
                properties=_properties(number, large, bool(verified.alone)),
                progress=partial(_doing, send, begun, output, problem),
            )
            torch.set_num_threads(1)  # faster for small ones; not before a first call, with which numba sets it itself
            if failures := [r for r in results if r.status == "failed"]:
                send("failed", failures, [*refusal.advice(backend, failures, _REPEATS)])
                return
            budget.took(begun, problem, large)
            if any(r.status == "passed" for r in results):
                verified.add(output, problem)
                send("passed", output, problem)
    send("over", left)


def _doing(send: Send, begun: list[float], output: Output, problem: ConvProblem, name: str) -> None:
    begun.append(time.monotonic())
    send("doing", output, problem, name)


def problems_for(backend: Backend) -> list[ConvProblem]:
    """The problems on which a backend is checked where none are named: `default_problems`; for a kernel that a user
    registered, those made for it.
    """
    if isinstance(backend, ModuleBackend):
        return list(backend.problems())
    if not isinstance(backend, CustomBackend):
        return list(default_problems())
    place = torch.device(next(iter(backend.devices or ("cpu",))))
    return list(construct(lambda p: accepts(backend, p, place), hints=hints(parts_of(backend)), most=_MOST))


def _problems(
    backend: CustomBackend,
    device: str,
    output: Output,
    named: Sequence[ConvProblem],
    seconds: float,
    found: list[ConvProblem],
    searching: Callable[[], None],
) -> Iterator[ConvProblem | list[tuple[str, int]]]:
    """The problems to check, or the reasons why there are none; ``found`` is shared by all outputs."""
    computed, reasons, place, calls = calls_with(backend, output), Counter[str](), torch.device(device), count(1)

    def computes(p: ConvProblem) -> bool:
        if not next(calls) % _SIGN_OF_LIFE:
            searching()
        against = [backend.against(p, outputs, place) for outputs in computed]
        # What it was registered for is said where nothing else is in the way: the user knows that.
        reasons.update([r for r in against[0] if not r.startswith("it was registered for")] or against[0])
        return not all(against)

    none = True
    for problem in construct(computes, named, hints=hints(parts_of(backend)), most=_MOST, seconds=seconds, found=found):
        none = False
        yield problem
    if none and output != "grad_bias":  # few problems have a bias
        yield reasons.most_common(5)


def _properties(number: int, large: bool, alone: bool) -> list[str]:
    """What the problem with this number is checked for."""
    turns = [name for i, name in enumerate(_IN_TURN) if number < _FIRST or (number + i) % _TURNS == 0]
    names = _OF_LARGE if large else (*_ALWAYS, *turns)
    return [name for name in names if not (alone and name in _ENDS_THE_PROCESS)]


def _in_parallel(number: int, problem: ConvProblem, large: bool) -> bool:
    """Whether it is checked with several threads of PyTorch: not where every one of many images would wait for them."""
    return problem.batch <= _MOST_PARALLEL and (large or number < _PARALLEL or number % _TURNS == 0)


class _Budget:
    """The time for checks, not for what is between them, and how much of it problems take."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._spent = seconds, 0.0
        self._took: dict[bool, tuple[float, float]] = {}  # of large ones or of others: seconds, and what was expected
        self._first: float | None = None  # the same ratio of the first one

    def spent(self, needed: bool) -> bool:
        """Whether no problem fits in."""
        return not self._fits(self._expected(_LEAST_COST, large=False), needed)

    def allows(self, problem: ConvProblem, large: bool, needed: bool) -> bool:
        """Whether the problem fits into the time that is left; a large one may take a quarter of all."""
        seconds = self._expected(cost(problem), large)
        return self._fits(seconds, needed and not large) and (not large or seconds <= self._seconds / 4)

    def _fits(self, seconds: float, needed: bool) -> bool:
        return self._spent + seconds <= self._seconds * (_OVERTIME if needed else 1)

    def _expected(self, cost: float, large: bool) -> float:
        took, expected = self._took.get(large, (self._first or 0.0, 1.0))
        return took / expected * cost

    def took(self, begun: Sequence[float], problem: ConvProblem, large: bool) -> None:
        now = time.monotonic()
        if self._first is None:  # its first call may have loaded and compiled, those after it have not
            self._first = (now - (begun[2:] or [now])[0]) / cost(problem)
        else:
            seconds = now - (begun or [now])[0]
            took, expected = self._took.get(large, (0.0, 0.0))
            self._took[large] = (took + seconds, expected + cost(problem))
            self._spent += seconds
