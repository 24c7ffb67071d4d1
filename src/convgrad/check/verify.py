"""The conformance suite on a user's kernel, before it can be chosen.

The problems are drawn for the kernel (`generator`) and checked in a child process, where a crash or a hang is a result
like others. A check that passed is stored under a digest of the kernel, so that a script pays for it once a machine.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any, Final

import torch

from .._version import __version__
from ..engine import store
from ..errors import CheckError
from ..problem import ConvProblem, Output
from ..tables import counted
from . import refusal
from .fork import Lost, NoChild, in_child, why_not_in_child
from .generator import cost, draw, is_large, spread
from .kernels import CustomBackend, without_values
from .property_check import calls_with
from .suite import check_problem, outputs_of

#: A kernel with fewer problems of an output that passed is not verified; problems of one output, without those named.
FLOOR, MOST = 30, 120
_REPEATS: Final = 3
#: Properties that every problem is checked for, and those of the first problems and then of every fourth.
_ALWAYS = ("memory", "exact", "bound", "bias", "sweeps", "pages")
_IN_TURN = ("deterministic", "again", "layouts", "nonfinite", "threads")
_FIRST, _TURNS = 12, 4
#: Properties of large problems; the first three of an output are checked for all, up to so many operations.
_OF_LARGE, _WHOLE, _MOST_WHOLE = ("exact", "bound", "memory", "deterministic"), 3, 30_000_000
#: Images of a problem that is computed with several threads: a kernel may start them for each image.
_MOST_PARALLEL = 64
#: The problems that are needed may take so many times as long: a busy machine lets no bugs through.
_OVERTIME: Final = 3
#: Seconds that a search for problems may take, and that one call may take: at first, and later.
SEARCH, _FIRST_PATIENCE, _PATIENCE = 20.0, 90.0, 30.0
#: PyTorch's words where a fork cannot differentiate, since its parent did on a GPU's threads.
_UNFIT = "fork-based multiprocessing"

#: A kind of event, and: "doing", the output, the problem and the property that is next (None and "" while problems are
#: searched for); "passed", the output; "failed", the results and advice; "nothing", the output that accepts no problem,
#: and the reasons; "left", the number of problems that time did not suffice for.
Send = Callable[..., None]


def verify(backend: CustomBackend, digest: str, seconds: float) -> list[str]:
    """Check every output on problems that the backend accepts, those that the user names first.

    Args:
        digest: of the kernel; empty if it has none, and nothing is stored.
        seconds: the time for each type of device, without the first problem of an output, which waits for what is
            loaded and compiled at the first call, and without the search for problems.

    Returns:
        What was checked on each type of device, as sentences that begin with "verified" or "not verified".

    Raises:
        CheckError: a problem failed, crashed or hung, or an output accepts none.
    """
    devices = [d for d in ("cpu", "cuda") if backend.runs_on(d) and (d == "cpu" or torch.cuda.is_available())]
    if not devices:
        return [f"not verified: no {' or '.join(backend.devices or ())} is here"]
    return list(dict.fromkeys(_on_device(backend, device, digest, seconds) for device in devices))


def _on_device(backend: CustomBackend, device: str, digest: str, seconds: float) -> str:
    where = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    versions = (__version__, torch.__version__, platform.python_version(), platform.machine(), where)
    key = " ".join((digest, device, *versions, *sorted(map(str, backend.named))))
    stored = store.read("verified", key) if digest else None
    if isinstance(stored, dict) and (not stored.get("left") or seconds <= stored["seconds"]):
        return stored["sentence"]
    check = _Check(backend, device, seconds)
    check.run()
    sentence = check.sentence()
    if digest and sentence.startswith("verified"):
        store.write("verified", key, {"sentence": sentence, "left": check.left, "seconds": seconds})
    return sentence


class _Check:
    """One check of a backend on a type of device, and what it found."""

    def __init__(self, backend: CustomBackend, device: str, seconds: float) -> None:
        self.backend, self.device, self.seconds = backend, device, seconds
        self.outputs = outputs_of(backend)
        self.passed = Counter[Output]()
        self.left = 0
        #: Why it ran in this process and not in a child.
        self.alone = why_not_in_child() if device == "cpu" else f"{device} does not outlive a fork"

    def run(self) -> None:
        threads = torch.get_num_threads()
        if self.alone or not self._in_child():
            try:
                self._examine(self._note)
            finally:
                torch.set_num_threads(threads)

    def sentence(self) -> str:
        """Return what was checked, in words that begin with "verified" or "not verified"."""
        n, fewest = self.passed.total(), min(self.outputs, key=lambda o: self.passed[o])
        rest = f"; it was checked in this process: {self.alone}" if self.alone else ""
        late = f"more did not fit into {self.seconds:g} s"
        if self.passed[fewest] < FLOOR:
            right = counted(self.passed[fewest]) + (f" of {fewest}" if len(self.outputs) > 1 else "")
            why = late if self.left else "it accepts no more that could be found"
            return f"not verified: {right} passed, {FLOOR} are needed; {why}{rest}"
        return (
            f"verified on {n} of {n + self.left} problems; {late}{rest}"
            if self.left
            else f"verified on {n} problems{rest}"
        )

    # ---- events ----------------------------------------------------------------------------------

    def _in_child(self) -> bool:
        """Examine the backend in a child; return whether that was possible."""
        doing: list[Any] = ["forward", None, ""]
        patience = [_FIRST_PATIENCE]
        try:
            for kind, *what in in_child(lambda send: self._examine(lambda *event: send(event)), lambda: patience[0]):
                if kind == "doing":
                    doing = what
                elif kind == "failed" and any(_UNFIT in r.message for r in what[0]):
                    self.alone = "PyTorch cannot differentiate in a fork of this process"
                    return False
                else:
                    self._note(kind, *what)
                patience[0] = _PATIENCE if self.passed and doing[1] else _FIRST_PATIENCE
        except NoChild as no:
            self.alone = str(no)
            return False
        except Lost as lost:
            output, problem, name = doing
            message = refusal.lost(self.backend, output, problem, name, str(lost), self.passed.total())
            raise CheckError(message) from None
        return True

    def _note(self, kind: str, *what: Any) -> None:
        """Count what passed, or raise what did not."""
        if kind == "passed":
            self.passed[what[0]] += 1
        elif kind == "failed":
            results, advice = what
            raise CheckError(refusal.wrong(results, advice, f"{counted(self.passed.total())} passed"))
        elif kind == "nothing":
            output, reasons = what
            raise CheckError(refusal.nothing_accepted(self.backend, output, reasons, self.device))
        elif kind == "left":
            (self.left,) = what

    # ---- the checks ------------------------------------------------------------------------------

    def _examine(self, send: Send) -> None:
        """Check the outputs in turn, problem by problem, until one fails or the time is over."""
        found: list[ConvProblem] = []
        queues: list[Iterator[ConvProblem]] = []
        left, passed = 0, Counter[Output]()
        for output in self.outputs:
            send("doing", output, None, "")
            mine, drawn, reasons = self._problems(output, found)
            if not (mine or drawn or output == "grad_bias"):  # few problems have a bias
                send("nothing", output, reasons)
            left += len(mine) + min(MOST, len(drawn))
            queues.append(chain(mine, islice(spread(drawn, mine), MOST)))
        clock, several = _Clock(self.seconds), max(2, torch.get_num_threads())
        for number, problems in enumerate(zip_longest(*queues)):
            for output, problem in zip(self.outputs, problems, strict=True):
                if problem is None:
                    continue
                large = is_large(problem) and (number >= _WHOLE or problem.flops > _MOST_WHOLE)
                # The first one is checked in any case.
                if number and not clock.allows(problem, large, passed[output] < FLOOR):
                    continue
                all_of_it = number < _FIRST or number % _TURNS == 0
                names = _OF_LARGE if large else (*_ALWAYS, *_IN_TURN * all_of_it)
                begin = time.monotonic()
                results = check_problem(
                    self.backend,
                    problem,
                    output,
                    device=self.device,
                    repeats=_REPEATS,
                    threads=several if (large or all_of_it) and problem.batch <= _MOST_PARALLEL else 1,
                    # Closed pages would end a process that is not a child.
                    properties=[name for name in names if not (self.alone and name == "pages")],
                    progress=partial(send, "doing", output, problem),
                )
                left -= 1
                torch.set_num_threads(1)  # not before a first call, with which numba sets it itself
                if failures := [r for r in results if r.status == "failed"]:
                    send("failed", failures, [*refusal.advice(self.backend, failures, _REPEATS)])
                    return
                if number:
                    clock.took(time.monotonic() - begin, problem)
                if any(r.status == "passed" for r in results):
                    passed[output] += 1
                    send("passed", output)
        send("left", left)

    def _problems(
        self, output: Output, found: list[ConvProblem]
    ) -> tuple[list[ConvProblem], list[ConvProblem], list[tuple[str, int]]]:
        """Return the named and the drawn problems of an output, and reasons against others.

        What was ``found`` for another output is drawn again only where this one accepts little of it.
        """
        computed, place = calls_with(self.backend, output), torch.device(self.device)
        reasons = Counter[str]()

        def computes(p: ConvProblem) -> bool:
            against = [self.backend.against(p, outputs, place) for outputs in computed]
            # What it was registered for is said where nothing else is in the way: the user knows that.
            said = [r for r in against[0] if not r.startswith("it was registered for")] or against[0]
            reasons.update(map(without_values, said))
            return not all(against)

        mine = [p for p in dict.fromkeys(self.backend.named) if computes(p)]
        drawn = [p for p in found if computes(p)]
        if len(drawn) * 2 <= len(found):
            drawn = draw(computes, mine, seconds=SEARCH)
            found[:] = dict.fromkeys([*found, *drawn])
        return mine, drawn, reasons.most_common(5)


class _Clock:
    """The time that checks took, without the first of each output, and how much of it there is."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._took, self._cost = seconds, 0.0, 0.0

    def allows(self, problem: ConvProblem, large: bool, needed: bool) -> bool:
        """Whether the problem fits into the time that is left; a large one may take a quarter of all."""
        expected = cost(problem) * self._took / self._cost if self._cost else 0.0
        if large and expected > self._seconds / 4:
            return False
        return self._took + expected <= self._seconds * (_OVERTIME if needed and not large else 1)

    def took(self, seconds: float, problem: ConvProblem) -> None:
        self._took, self._cost = self._took + seconds, self._cost + cost(problem)
