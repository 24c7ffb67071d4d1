"""``convgrad check``: the conformance suite on a problem, on a file of problems, or on its own list."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..check.problems import default_problems
from ..check.properties import ASPECTS
from ..check.report import CheckResult
from ..check.suite import check_problem, outputs_of
from ..diagnostics import explain_problem
from ..engine.registry import backends, get
from ..problem import ConvProblem, Output
from ..problem_text import read_problem_file
from .app import app, device_here, fail, outputs_named
from .shrink import shrunk

__all__ = ["check"]

#: Of many problems these are checked unless --thorough asks for all: is every element right?
_QUICK = ("exact", "bound")
_MOST_FLOPS = 2_000_000


@dataclass
class Tally:
    """What a run of checks has found so far."""

    asked: int = 0
    done: int = 0
    reduced: int = 0
    passed: int = 0
    failures: list[CheckResult] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    unread: list[str] = field(default_factory=list)
    why_stopped: str = ""

    def add(self, results: Iterable[CheckResult]) -> list[CheckResult]:
        """Count results; return those that failed."""
        failed = []
        for r in results:
            if r.status == "passed":
                self.passed += 1
            elif r.status == "failed":
                failed.append(r)
            elif r.aspect == "usable":
                self.skipped[f"{r.backend} {r.output}: {r.message}"] += 1
        self.failures += failed
        return failed

    @property
    def status(self) -> int:
        """Exit status: nothing failed, and something was checked."""
        if self.why_stopped == "interrupted":
            return 130
        return 1 if self.failures or self.unread or not self.passed else 0

    def summary(self, aspects: Iterable[str], seconds: float) -> str:
        text = f"{self.done} of {self.asked} problems: {self.passed} checks passed, {len(self.failures)} failed"
        lines = [f"{text} ({', '.join(aspects)}; {seconds:.0f} s)"]
        if self.why_stopped:
            lines[0] = f"{self.why_stopped} after {lines[0]}"
        if self.reduced:
            lines.append(f"{self.reduced} problems were checked at a reduced size; --full checks them as they are")
        lines += [f"not checked: {reason} (x{n})" for reason, n in self.skipped.most_common(5)]
        lines += [f"not read: {error}" for error in self.unread]
        if not self.passed and not self.failures:
            lines.append("nothing could be checked")
        return "\n".join(lines)


@app.command()
def check(
    what: Annotated[
        str, typer.Argument(metavar="[PROBLEM|FILE]", help="A problem, or a file of them, benchdnn's as they are.")
    ] = "",
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Which; 'all'; else whichever would be chosen.")
    ] = None,
    output: Annotated[list[str] | None, typer.Option("--output", "-o", help="forward, grad_input, ...")] = None,
    transposed: Annotated[bool, typer.Option("--transposed", help="Read every problem as a transposed one.")] = False,
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the operands.", min=0, max=2**63 - 1)] = 0,
    aspect: Annotated[list[str] | None, typer.Option("--aspect", help=f"Some of: {', '.join(ASPECTS)}.")] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Every aspect of many problems too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Large problems as they are, not reduced.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Stop after this time.")] = None,
) -> None:
    """Is every output right? The conformance suite, on one problem, a file, or the suite's own list.

    One problem is checked in every aspect, as it is. Many are checked for exactness and the error bound, and a large
    one at a reduced size: the same kernel, stride, dilation, border and groups, fewer images, channels and rows.

    Ends with 0 if all is well, 1 if something failed, 2 if a request was not understood, 130 if interrupted (the
    summary so far is printed). Every failure prints the command that repeats it.

    Examples:

        convgrad check g32ic32ih14oc32kh3ph1 --backend im2col

        convgrad check tests/benchdnn/inputs/conv/shapes_resnet_50

        convgrad check --backend all --seconds 60
    """
    tally = Tally()
    problems = list(_problems(what, transposed, tally))
    single = len(problems) == 1 and not tally.unread
    aspects = _aspects(aspect, everything=thorough or single or not what)
    outputs = outputs_named(output)
    place = device_here(device)
    for name in backend or ():
        if name != "all":
            get(name)
    tally.asked = len(problems)
    start = time.monotonic()
    reduce = not (full or single)
    try:
        with _progress(tally) as progress:
            for problem in problems:
                if seconds is not None and time.monotonic() - start > seconds:
                    tally.why_stopped = "stopped: time was up"
                    break
                small = shrunk(problem, _MOST_FLOPS) if reduce else problem
                tally.reduced += small != problem
                _check_one(small, backend, outputs, place, seed, aspects, tally)
                tally.done += 1
                progress()
    except KeyboardInterrupt:
        tally.why_stopped = "interrupted"
    print(tally.summary(aspects, time.monotonic() - start))
    raise typer.Exit(tally.status)


def _check_one(
    problem: ConvProblem,
    names: list[str] | None,
    outputs: tuple[Output, ...] | None,
    device: torch.device,
    seed: int,
    aspects: tuple[str, ...],
    tally: Tally,
) -> None:
    """Every asked output of one problem, by every asked backend; failures are printed as they are found."""
    if problem.empty:
        tally.skipped["an empty problem is not given to any backend"] += 1
        return
    for name, output in _pairs(problem, names, outputs, device):
        results = check_problem(name, problem, output, device=device, seed=seed, aspects=aspects)
        for failure in tally.add(results):
            print(failure, flush=True)


def _pairs(
    problem: ConvProblem, names: list[str] | None, outputs: tuple[Output, ...] | None, device: torch.device
) -> Iterator[tuple[str, Output]]:
    if names:
        for name in backends() if "all" in names else names:
            for output in outputs or outputs_of(get(name)):
                yield name, output
        return
    for output, name in explain_problem(problem, outputs, device).chosen().items():
        if name != "engine" and (output != "grad_bias" or "grad_bias" in outputs_of(get(name))):
            yield name, output


def _problems(what: str, transposed: bool, tally: Tally) -> Iterator[ConvProblem]:
    if not what:
        yield from default_problems()
    elif Path(what).is_file():
        for _, found in read_problem_file(what, transposed=transposed):
            if isinstance(found, ValueError):
                tally.unread.append(str(found))
            else:
                yield found
    elif "/" in what or Path(what).exists():
        raise fail(f"{what!r} is no file", "a problem such as g32ic32ih14oc32kh3ph1, or a file of them")
    else:
        yield ConvProblem.parse(what, transposed=transposed)


def _aspects(names: list[str] | None, *, everything: bool) -> tuple[str, ...]:
    for name in names or ():
        if name not in ASPECTS:
            raise fail(f"unknown aspect {name!r}", f"one of {', '.join(ASPECTS)}")
    return tuple(names or (ASPECTS if everything else _QUICK))


def _progress(tally: Tally) -> AbstractContextManager[Callable[[], None]]:
    """A bar on a terminal's standard error, nothing elsewhere; gives a function to call after each problem."""
    if tally.asked < 2 or not sys.stderr.isatty():
        return nullcontext(lambda: None)
    return _Bar(tally)


class _Bar(AbstractContextManager[Callable[[], None]]):
    """The bar: how many problems are done, how many checks failed."""

    def __init__(self, tally: Tally) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self.progress = Progress(console=Console(stderr=True), transient=True)
        self.tally = tally

    def __enter__(self) -> Callable[[], None]:
        self.progress.start()
        task = self.progress.add_task("checking", total=self.tally.asked)
        return lambda: self.progress.update(
            task, completed=self.tally.done, description=f"{len(self.tally.failures)} failed"
        )

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
