"""The conformance suite on a user's kernel, before it can be chosen.

The problems are drawn for the kernel (`problem_set`) and checked in a child process, where a crash or a hang is a
result like others. A check that passed is stored under a digest of the kernel, so that a script pays for it once a
machine.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from itertools import zip_longest
from typing import Any, Final

import torch

from .._version import __version__
from ..engine import store
from ..errors import CheckError
from ..problem import ConvProblem, Output
from ..tables import counted
from . import refusal
from .child import Child, Lost, NoChild, say, why_not_in_child
from .problem_set import cost, is_large
from .results import CheckResult
from .suite import check_problem, outputs_of, problems_for
from .user_backend import CustomBackend

#: A kernel with fewer problems of an output that passed is not verified.
FLOOR: Final = 30
_REPEATS: Final = 3
#: Properties that every problem is checked for, and those of the first problems and then of every fourth.
_ALWAYS = ("memory", "exact", "bound", "bias", "sweeps", "pages")
_IN_TURN = ("deterministic", "again", "layouts", "nonfinite", "threads")
_FIRST, _TURNS = 12, 4
#: Properties of large problems; the first of an output is checked for all, up to so many operations.
_OF_LARGE, _MOST_WHOLE = ("exact", "bound", "memory", "deterministic"), 30_000_000
#: Images of a problem that is computed with several threads: a kernel may start them for each image.
_MOST_PARALLEL = 64
#: The problems that are needed may take so many times as long: a busy machine lets no bugs through.
_OVERTIME: Final = 3
#: Seconds that one call may take: at first, and later.
_FIRST_PATIENCE, _PATIENCE = 90.0, 30.0
#: PyTorch's words where a fork cannot differentiate, since its parent did on a GPU's threads.
_UNFIT = "fork-based multiprocessing"


def verify(backend: CustomBackend, digest: str, seconds: float) -> list[str]:
    """Check every output on each type of device; return sentences that begin with "verified" or "not verified".

    Without a ``digest`` nothing is stored. The ``seconds`` are those of a type of device, without the first problem of
    an output, which waits for what is loaded and compiled, and without the search for problems.

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
    """One check of a backend on a type of device."""

    def __init__(self, backend: CustomBackend, device: str, seconds: float) -> None:
        self.backend, self.device, self.seconds = backend, device, seconds
        self.outputs = outputs_of(backend)
        #: How many problems of each output passed, and how many are left in all.
        self.passed, self.left = Counter[Output](), 0
        #: Seconds and `cost` of all but the first problem of each output.
        self.took = self.cost = 0.0
        self.threads = torch.get_num_threads()
        #: Why it runs in this process and not in a child.
        self.alone = why_not_in_child() if device == "cpu" else f"{device} does not outlive a fork"
        self.child = Child(self.answer, fork=True)

    def sentence(self) -> str:
        """Return what was checked, in words that begin with "verified" or "not verified"."""
        n, fewest = self.passed.total(), min(self.outputs, key=lambda o: self.passed[o])
        rest = f"; it was checked in this process: {self.alone}" if self.alone else ""
        late = f"more did not fit into {self.seconds:g} s"
        if self.passed[fewest] < FLOOR:
            right = counted(self.passed[fewest]) + (f" of {fewest}" if len(self.outputs) > 1 else "")
            why = late if self.left else "it accepts no more that could be found"
            return f"not verified: {right} passed, {FLOOR} are needed; {why}{rest}"
        if self.left:
            return f"verified on {n} of {n + self.left} problems; {late}{rest}"
        return f"verified on {n} problems{rest}"

    def run(self) -> None:
        """Check the outputs in turn, problem by problem, until one fails or the time is over."""
        queues = list[list[ConvProblem]]()
        for output in self.outputs:
            queues.append(problems_for(self.backend, output, self.device))
            if not (queues[-1] or output == "grad_bias"):  # few problems have a bias
                raise CheckError(refusal.nothing_accepted(self.backend, output, self.device))
        self.left = sum(map(len, queues))
        with self.child:
            try:
                for number, problems in enumerate(zip_longest(*queues)):
                    for output, problem in zip(self.outputs, problems, strict=True):
                        if problem is not None:
                            self._examine(number, output, problem)
            finally:
                torch.set_num_threads(self.threads)

    def _examine(self, number: int, output: Output, problem: ConvProblem) -> None:
        """Check one problem, if there is time for it."""
        large = is_large(problem) and (number > 0 or problem.flops > _MOST_WHOLE)
        expected = cost(problem) * self.took / self.cost if self.cost else 0.0
        limit = self.seconds * (_OVERTIME if self.passed[output] < FLOOR and not large else 1)
        if number and (self.took + expected > limit or (large and expected > self.seconds / 4)):
            return
        all_of_it, begin = number < _FIRST or number % _TURNS == 0, time.monotonic()
        names = _OF_LARGE if large else (*_ALWAYS, *_IN_TURN * all_of_it)
        several = (large or all_of_it) and problem.batch <= _MOST_PARALLEL
        results, hints = self._ask(output, problem, names, max(2, self.threads) if several else 1)
        self.left -= 1
        if failures := [r for r in results if r.status == "failed"]:
            raise CheckError(refusal.wrong(failures, hints, f"{counted(self.passed.total())} passed"))
        if number:
            self.took, self.cost = self.took + time.monotonic() - begin, self.cost + cost(problem)
        self.passed[output] += any(r.status == "passed" for r in results)

    def _ask(self, output: Output, problem: ConvProblem, *options: Any) -> Any:
        """Return the `answer` of the child, or of this process where there is none."""
        heard, passed = [""], self.passed.total()  # the last that is heard is the property being checked
        try:
            if not self.alone:
                patience = _PATIENCE if passed else _FIRST_PATIENCE
                answered = self.child.ask((output, problem, *options), patience, heard.append)
                if not any(_UNFIT in result.message for result in answered[0]):
                    return answered
                self.alone = "PyTorch cannot differentiate in a fork of this process"
        except NoChild as no:
            self.alone = str(no)
        except Lost as lost:
            raise CheckError(refusal.lost(self.backend.name, output, problem, passed, heard[-1], str(lost))) from None
        return self.answer((output, problem, *options))

    def answer(self, request: tuple[Output, ConvProblem, tuple[str, ...], int]) -> tuple[list[CheckResult], list[str]]:
        """Return the results of a problem, and what to change where it failed."""
        output, problem, names, threads = request
        # Closed pages would end a process that is not a child.
        names = [name for name in names if not (self.alone and name == "pages")]
        how: Any = {"device": self.device, "repeats": _REPEATS, "threads": threads, "progress": say}
        results = check_problem(self.backend, problem, output, properties=names, **how)
        torch.set_num_threads(1)  # not before a first call, with which numba sets it itself
        failures = [r for r in results if r.status == "failed"]
        return results, [*refusal.advice(self.backend, failures, _REPEATS)] if failures else []
