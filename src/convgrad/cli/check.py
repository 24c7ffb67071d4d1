"""``convgrad check``: the conformance suite on a problem, on a file of problems, or on its own list."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..check import PROPERTIES, CheckReport, CheckResult, check_problem, default_problems, outputs_of, shrunk
from ..diagnostics import explain_problem
from ..engine import backends, get_backend
from ..problem import ConvProblem, Output
from .app import app, device_here, fail, outputs_named, say
from .aten import search
from .problem_arguments import read_problems

__all__ = ["check"]

#: Of many problems these are checked unless --thorough asks for all: is every element right?
_QUICK = ("exact", "bound")
_MOST_FLOPS = 2_000_000


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
    property_name: Annotated[
        list[str] | None, typer.Option("--property", "--aspect", help=f"Some of: {', '.join(PROPERTIES)}.")
    ] = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Every property of many problems too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Large problems as they are, not reduced.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Stop after this time.", min=0)] = None,
    aten: Annotated[bool, typer.Option("--aten", help="Search PyTorch's own kernels for wrong results.")] = False,
) -> None:
    """Is every output right? The conformance suite, on one problem, a file, or the suite's own list.

    One problem, as it is, and the suite's own list are checked for every property. Those of a file are checked for
    exactness and the error bound unless --thorough asks for all, and large ones at a reduced size: the same kernel,
    stride, dilation, border and groups, fewer images, channels and rows.

    A kernel of PyTorch's that differs in what PyTorch does not promise, such as where infinities become NaN, is told
    and no failure: that depends on the processor.

    With --aten, random problems are given to PyTorch's own CPU kernels for a minute, in another process whose memory is
    filled with large numbers. What they get wrong is printed with a command for a report, kept, and avoided from then
    on.

    Ends with 0 if all is well, 1 if something failed, 2 if a request was not understood, 130 if interrupted (the
    summary so far is printed). Every failure prints the command that repeats it. Kernels of --kernels are registered
    unseen, since they are checked here.

    Examples:

        convgrad check g32ic32ih14oc32kh3ph1 --backend im2col

        convgrad check my_problems.txt

        convgrad check --backend all --seconds 60

        convgrad check --aten
    """
    if aten:
        raise typer.Exit(search(60.0 if seconds is None else seconds, seed))
    problems, unread = read_problems([what], transposed) if what else (list(default_problems()), [])
    single = len(problems) == 1 and not unread
    properties = _properties(property_name, everything=thorough or single or not what)
    outputs, place = outputs_named(output), device_here(device)
    for name in backend or ():
        if name != "all":
            get_backend(name)
    results: list[CheckResult] = []
    checked, declined, reduced, stopped, start = 0, 0, 0, "", time.monotonic()
    try:
        for problem in _with_progress(problems):
            if seconds is not None and time.monotonic() - start > seconds:
                stopped = "stopped: time was up after "
                break
            small = problem if full or single else shrunk(problem, _MOST_FLOPS)
            any_checked = False
            for name, result in _pairs(small, backend, outputs, place):
                found = check_problem(name, small, result, device=place, seed=seed, properties=properties)
                results += found
                any_checked |= any(r.property_name != "usable" for r in found)
                for r in found:
                    if r.status in ("failed", "differs"):
                        say(r)
            reduced += small != problem and any_checked
            checked, declined = checked + any_checked, declined + (not any_checked)
    except KeyboardInterrupt:
        stopped = "interrupted after "
    report = CheckReport("", tuple(results))
    how = f"{', '.join(properties)}; {time.monotonic() - start:.0f} s"
    unusable = f", {declined} not checked" if declined else ""
    lines = [f"{stopped}{checked} of {len(problems)} problems{unusable}: {report.counts} ({how})"]
    if reduced:
        lines.append(f"{reduced} problems were checked at a reduced size; --full checks them as they are")
    lines += [*report.reasons(), *(f"not read: {error}" for error in unread)]
    if not report.passed and not report.failures:
        lines.append("nothing could be checked")
    say("\n".join(lines))
    raise typer.Exit(130 if stopped.startswith("interrupted") else int(bool(unread) or not report.ok))


def _pairs(
    problem: ConvProblem, names: list[str] | None, outputs: tuple[Output, ...] | None, device: torch.device
) -> Iterator[tuple[str, Output]]:
    """Backends and what to check of them: those named, else those that would be chosen."""
    if names:
        for name in backends() if "all" in names else names:
            for output in outputs or outputs_of(get_backend(name)):
                yield name, output
    elif not problem.empty:
        for output, name in explain_problem(problem, outputs, device).chosen().items():
            if name != "engine" and (output != "grad_bias" or "grad_bias" in outputs_of(get_backend(name))):
                yield name, output


def _properties(names: list[str] | None, *, everything: bool) -> tuple[str, ...]:
    for name in names or ():
        if name not in PROPERTIES:
            raise fail(f"unknown property {name!r}", f"one of {', '.join(PROPERTIES)}")
    return tuple(names or (PROPERTIES if everything else _QUICK))


def _with_progress(problems: list[ConvProblem]) -> Iterable[ConvProblem]:
    """The problems, with a bar on a terminal's standard error."""
    if len(problems) < 2 or not sys.stderr.isatty():
        return problems
    from rich.progress import track

    return track(problems, "checking", console=Console(stderr=True), transient=True)
