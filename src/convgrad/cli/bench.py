"""``convgrad bench``: a backend against the best that PyTorch does, checked first, timed alternately."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from .._compat import channels_last_of
from ..check import check_problem, shrunk
from ..diagnostics import plan_of, random_operands
from ..engine import backends, choose, get_backend, reasons_against
from ..engine.ab_timer import compare, conditions, keep_memory
from ..problem import PASSES, ConvProblem, Pass
from ..settings import current
from .app import app, device_here, fail, out

__all__ = ["bench"]

_CHECKED_FLOPS = 2_000_000  # the definition is slow: a large problem is checked at a reduced size
_HOW_TO_READ = (
    "PyTorch's time is its median over all rounds; speed is the median of the ratios inside a round, with its 95 % "
    "interval; the backend's time is PyTorch's divided by it."
)


class _Line(NamedTuple):
    """One output computed by one backend."""

    output: Pass
    backend: str
    note: str
    milliseconds: str = ""
    pytorch: str = ""
    layout: str = ""
    speed: str = ""
    wrong: bool = False


@app.command()
def bench(
    problems: Annotated[list[str], typer.Argument(metavar="PROBLEM...", help="One or more problems.")],
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Which; 'all'; else whichever would be chosen.")
    ] = None,
    output: Annotated[list[str] | None, typer.Option("--output", "-o", help="forward, grad_input, grad_weight")] = None,
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="For each line of the table.")] = 1.0,
    keep: Annotated[bool, typer.Option("--keep-memory/--return-memory", help="Freed memory, for both sides.")] = True,
) -> None:
    """How fast is a backend? Against the better of PyTorch as given and PyTorch through channels_last and back.

    Each backend is checked first (exactly on integers, and against the error bound); a wrong one gets no time and the
    exit status 1. Both sides are timed alternately in this process; the interval is that of the ratio, at 95 %.
    Interrupted, it prints the lines that it has and ends with 130.

    Examples:

        convgrad bench g32mb8ic32ih56oc32oh56kh3ph1

        convgrad --kernels my_kernels.py bench g32mb8ic32ih56oc32oh56kh3ph1 --backend mine -o forward
    """
    parsed = [ConvProblem.parse(p) for p in problems]
    passes = _passes(output)
    if not 0 < seconds < float("inf"):
        raise fail(f"--seconds must be positive and finite, got {seconds}")
    place = device_here(device)
    for problem in parsed:
        if problem.empty:
            raise fail(f"{problem} is empty: there is nothing to time")
    if keep:
        keep_memory()
    status = 0
    try:
        for problem in parsed:
            status |= _table(problem, passes, backend or [], place, seconds)
    except KeyboardInterrupt:
        print("convgrad: interrupted", file=sys.stderr)
        status = 130
    out().print(_HOW_TO_READ)
    out().print(conditions(device))
    raise typer.Exit(status)


def _passes(names: list[str] | None) -> tuple[Pass, ...]:
    unknown = [n for n in names or () if n not in PASSES]
    if unknown:
        raise fail(f"there is no output {unknown[0]!r}", f"one of {', '.join(PASSES)}")
    return tuple(p for p in PASSES if not names or p in names)


def _table(problem: ConvProblem, passes: Iterable[Pass], names: list[str], device: torch.device, seconds: float) -> int:
    """Print one problem's table, also where it is interrupted; 1 if a backend was wrong."""
    table = Table(title=str(problem), title_justify="left")
    for column in ("output", "backend", "ms", "PyTorch's best, ms", "in", "speed", ""):
        table.add_column(column, justify="right" if "ms" in column else "left", overflow="fold")
    wrong = False
    try:
        for pass_ in passes:
            operands = _operands(problem, pass_, device)
            for name in _backends(problem, pass_, names, device):
                x = _line(problem, pass_, name, operands, device, seconds)
                wrong |= x.wrong
                table.add_row(x.output, x.backend, x.milliseconds, x.pytorch, x.layout, x.speed, x.note)
    finally:
        if table.row_count:
            out().print(table)
    return int(wrong)


def _operands(problem: ConvProblem, pass_: Pass, device: torch.device) -> list[Tensor]:
    try:
        return random_operands(problem, pass_, device)
    except (RuntimeError, MemoryError) as error:
        raise fail(f"there is no memory for {problem}: {str(error).splitlines()[0]}", "a smaller problem") from None


def _backends(problem: ConvProblem, pass_: Pass, names: list[str], device: torch.device) -> list[str]:
    if names == ["all"]:
        return [n for n, b in backends().items() if not reasons_against(b, problem, (pass_,), device, current())]
    return names or [choose(problem, (pass_,), device, current(), None)[0].backend.name]


def _line(
    problem: ConvProblem, pass_: Pass, name: str, operands: list[Tensor], device: torch.device, seconds: float
) -> _Line:
    against = reasons_against(get_backend(name), problem, (pass_,), device, current())
    if not against and reasons_against(get_backend("aten"), problem, (pass_,), device, current()):
        against = ["PyTorch does not compute it: there is nothing to compare with"]
    if against:
        return _Line(pass_, name, "; ".join(against))
    small = shrunk(problem, _CHECKED_FLOPS)
    results = check_problem(name, small, pass_, device=device, properties=("exact", "bound"))
    failed = [r for r in results if r.status == "failed"]
    if failed:
        return _Line(pass_, name, f"wrong: {failed[0].message}", speed="not timed", wrong=True)
    pytorch = _pytorch(problem, pass_, *operands)
    mine = partial(plan_of(problem, pass_, name, device).contract, *operands)
    as_given = next(iter(pytorch))
    first = compare({"mine": mine, **pytorch}, as_given, seconds=seconds / 2, device=device, least_rounds=5)
    best = min(pytorch, key=first.median)
    seen = compare({"mine": mine, best: pytorch[best]}, best, seconds=seconds / 2, device=device)
    ours, theirs = (f"{seen.seconds(who) * 1e3:.4g}" for who in ("mine", best))
    note = "" if small == problem else "checked at a reduced size"
    return _Line(pass_, name, note, ours, theirs, best, str(seen.speedup("mine")))


def _pytorch(problem: ConvProblem, pass_: Pass, a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch as given, and through channels_last with the conversions there and back."""
    given = plan_of(problem, pass_, "aten", a.device)
    calls: dict[str, Callable[[], object]] = {"as given": lambda: given.contract(a, b)}
    last = channels_last_of(problem.ndim)
    if problem.ndim > 1 and not problem.channels_last:
        other = plan_of(problem.replace(memory_format=last), pass_, "aten", a.device)
        calls["channels_last"] = lambda: other.contract(
            a.contiguous(memory_format=last), b.contiguous(memory_format=last)
        ).contiguous()
    return calls
