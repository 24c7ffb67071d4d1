"""``convgrad check``: the conformance suite on a problem, on a file of problems, or on its own list."""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING, Annotated

import typer

from ..tables import counted
from . import options
from .app import Result, command, device_here, fail, progress, say
from .options import PROPERTIES, outputs_named

if TYPE_CHECKING:
    import torch

    from ..backends import Backend
    from ..check import CheckResult
    from ..problem import ConvProblem, Output, Outputs

#: Of many problems these are checked unless --thorough asks for all: is every element right?
_QUICK = ("exact", "bound")
_MOST_FLOPS = 2_000_000


@command("check")
def check(
    what: Annotated[
        str | None, options.what("[PROBLEM|FILE]", "A problem, or a file of them; files of benchdnn too.")
    ] = None,
    backend: options.Backends = None,
    output: options.Outputs = None,
    transposed: options.Transposed = False,
    device: options.Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the operands.", min=0, max=2**63 - 1)] = 0,
    property_name: options.Properties = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Check every property in a file, too.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Check large problems at full size.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Stop after this time.", min=0)] = None,
    aten: Annotated[bool, typer.Option("--aten", help="Search PyTorch's own kernels for wrong results.")] = False,
    as_json: options.AsJson = False,
) -> Result:
    """Is every output right? The conformance suite, on one problem, a file, or the suite's own list.

    One problem, as it is, and the suite's own list are checked for every property. Those of a file are checked for
    exactness and the error bound unless --thorough asks for all, and large ones at a reduced size: the same kernel,
    stride, dilation, border and groups, fewer images, channels and rows.

    If a kernel of PyTorch differs in what PyTorch does not promise, such as where infinities become NaN, that is
    reported but is no failure: it depends on the processor.

    With --aten, random problems are given to PyTorch's own CPU kernels for a minute, in another process whose memory is
    filled with large numbers. Wrong results are printed with a command that reproduces them, stored, and avoided from
    then on.

    Ends with 0 if all is well, 1 if something failed, 2 if a request was not understood, 130 if interrupted (the
    summary so far is printed). Every failure prints the command that repeats it. Kernels of --kernels are registered
    without a check, since they are checked here; the list for one of them is made for it.

    Examples:
        convgrad check g32ic32ih14oc32kh3ph1 --backend im2col
        convgrad check my_problems.txt
        convgrad check --backend all --seconds 60
        convgrad check --aten
    """  # fmt: skip
    from ..check import CheckReport, accepts, check_problem, default_problems, problems_for, shrunk
    from ..engine import backends, get_backend
    from .problem_arguments import read_problems

    if aten:
        findings, ended = search_and_record(60.0 if seconds is None else seconds, seed)
        return Result({"aten_findings": findings}, int(bool(findings)) if ended else 130)
    named = [get_backend(name) for name in (backends() if "all" in (backend or ()) else backend or ())]
    if what is not None:
        problems = read_problems([what], transposed)[0]
    elif transposed:
        raise fail("--transposed says how a problem or a file is read, and none is named", "check PROBLEM --transposed")
    else:
        problems = [*dict.fromkeys(p for one in named for p in problems_for(one))] or list(default_problems())
    single = len(problems) == 1
    properties = tuple(property_name or (PROPERTIES if thorough or single or what is None else _QUICK))
    outputs, place = outputs_named(output), device_here(device)

    def computed(problem: ConvProblem) -> bool:
        return not named or any(accepts(one, problem, place) for one in named)

    each: list[tuple[bool, list[CheckResult]]] = []  # of each problem: whether it is reduced, and its results
    stopped, start = "", time.monotonic()
    try:
        with progress("checking", len(problems)) as moved:
            for problem in problems:
                if seconds is not None and time.monotonic() - start > seconds:
                    stopped = "time was up"
                    break
                small = problem if full or single else shrunk(problem, _MOST_FLOPS, computed)
                found = [
                    result
                    for name, one in _pairs(small, named, outputs, place)
                    for result in check_problem(name, small, one, device=place, seed=seed, properties=properties)
                ]
                each.append((small != problem, found))
                for result in found:
                    if result.status in ("failed", "differs"):
                        say(result)
                moved(advance=1)
    except KeyboardInterrupt:
        stopped = "interrupted"
    report, took = CheckReport("", tuple(result for _, found in each for result in found)), time.monotonic() - start
    checked = [reduced for reduced, found in each if any(r.property_name != "usable" for r in found)]
    declined, reduced = len(each) - len(checked), sum(checked)
    before = {"": "", "interrupted": "interrupted after "}.get(stopped, f"stopped: {stopped} after ")
    say(f"{before}{len(checked)} of {len(problems)} problems{f', {declined} not checked' if declined else ''}: "
        f"{report.counts} ({', '.join(properties)}; {took:.0f} s)")  # fmt: skip
    if reduced:
        say(f"{counted(reduced)} checked at a reduced size; --full checks them as they are")
    for reason in report.reasons():
        say(reason)
    if not report.passed and not report.failures:
        say("nothing could be checked")
    data = {"problems": len(problems), "checked": len(checked), "not_checked": declined, "reduced": reduced,
            "stopped": stopped, "properties": list(properties), "took_seconds": took, "ok": report.ok,
            "results": [
                {**{name: value for name, value in vars(r).items() if name != "operands"}, "problem": str(r.problem),
                 **{name: None for name in ("worst", "bound") if not isfinite(getattr(r, name))},
                 **({"repeat": r.command} if r.status in ("failed", "differs") else {})}
                for r in report.results
            ]}  # fmt: skip
    return Result(data, 130 if stopped == "interrupted" else int(not report.ok))


def search_and_record(seconds: float, seed: int) -> tuple[list[dict[str, str]], bool]:
    """Search PyTorch's kernels for wrong results; print, record and return them, and whether the time was used up."""
    from ..check import search_aten
    from ..engine import record

    findings, done, ended = list[dict[str, str]](), 0, True
    with progress("searching", 100) as moved:

        def look(share: float, problems: int) -> None:
            nonlocal done
            done = problems
            moved(completed=100 * share)

        try:
            for found in search_aten(seconds, seed, look):
                record(found)
                findings.append(found._asdict() | {"problem": str(found.problem)})
                say(f"PyTorch's kernel is wrong here: {found.output} of {found.problem}: {found.what}")
                say(f"  to repeat: {found.repeat}")
        except KeyboardInterrupt:
            ended = False
    avoided = "; ATen is not chosen there from now on, whatever the batch and the channels" if findings else ""
    say(f"{'' if ended else 'interrupted after '}PyTorch's kernels on {counted(done)} with poisoned memory: "
        f"{len(findings)} found wrong beyond what is known (convgrad info --all){avoided}")  # fmt: skip
    return findings, ended


def _pairs(
    problem: ConvProblem, named: list[Backend], outputs: Outputs | None, device: torch.device
) -> list[tuple[str, Output]]:
    """Return backends and what to check of them: those named, else those that would be chosen."""
    from ..check import outputs_of
    from ..diagnostics import explain_problem
    from ..engine import get_backend

    if named:
        return [(backend.name, output) for backend in named for output in outputs or outputs_of(backend)]
    if problem.empty:
        return [("aten", problem.bias_pass)]  # which nobody computes: the result says why
    return [
        (name, output)
        for output, name in explain_problem(problem, outputs, device).chosen().items()
        if name != "engine" and (output != "grad_bias" or "grad_bias" in outputs_of(get_backend(name)))
    ]
