"""``convgrad bench``: a backend against the best that PyTorch does, checked first, timed alternately."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch import Tensor
from typer.core import TyperGroup

from ..check import check_problem, shrunk
from ..diagnostics import Machine, limits_of, plan_of, random_operands
from ..engine import backends, choose, get_backend, reasons_against
from ..engine.ab_timer import Ratio, compare, conditions, keep_memory
from ..problem import PASSES, ConvProblem, Pass
from ..settings import current
from .app import app, device_here, fail, say, say_table
from .bench_layers import layers, pytorchs
from .bench_steps import steps
from .problem_arguments import read_problems

__all__ = ["bench"]

_CHECKED_FLOPS = 2_000_000  # the definition is slow: a large problem is checked at a reduced size
_HOW_TO_READ = (
    "PyTorch's time is its median over all rounds; speed is the median of the ratios inside a round, with its 95 % "
    "interval; the backend's time is PyTorch's divided by it. Of the limit: the part of what this machine can do at "
    "best, by its memory and its arithmetic (convgrad explain shows both)."
)


@dataclass(frozen=True)
class Line:
    """One output of a problem computed by one backend; None and "" where it was not timed."""

    problem: str
    output: Pass
    backend: str
    note: str = ""
    milliseconds: float | None = None
    gflops_per_second: float | None = None
    of_limit: float | None = None
    pytorch_milliseconds: float | None = None
    pytorch_layout: str = ""
    speed: float | None = None
    speed_low: float | None = None
    speed_high: float | None = None
    wrong: bool = False

    HEAD: ClassVar[tuple[str, ...]] = (
        "output", "backend", "ms", "PyTorch ms", "speed", "in", "GFLOP/s", "of limit", "note"
    )  # fmt: skip

    @property
    def cells(self) -> tuple[str, ...]:
        """A line of the table under `HEAD`."""
        if self.milliseconds is None or self.speed is None:
            return (self.output, self.backend, "", "", "not timed", "", "", "", self.note)
        ratio = Ratio(self.speed, self.speed_low or 0.0, self.speed_high or 0.0)
        limit = "" if self.of_limit is None else f"{100 * self.of_limit:.2g} %"
        return (
            self.output, self.backend, f"{self.milliseconds:.4g}", f"{self.pytorch_milliseconds:.4g}", str(ratio),
            self.pytorch_layout, f"{self.gflops_per_second:.4g}", limit, self.note,
        )  # fmt: skip


class _Bench(TyperGroup):
    """`layers`, `steps`, or what is not named by a word: problems."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["problems", *args])


bench = typer.Typer(
    cls=_Bench, help="How fast? Against the best that PyTorch does: problems, real layers, whole models."
)
app.add_typer(bench, name="bench")
bench.command()(layers)
bench.command()(steps)


@bench.command("problems")
def bench_problems(
    what: Annotated[list[str], typer.Argument(metavar="PROBLEM|FILE...", help="Problems, or files of them.")],
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Which; 'all'; else whichever would be chosen.")
    ] = None,
    output: Annotated[list[str] | None, typer.Option("--output", "-o", help="forward, grad_input, grad_weight")] = None,
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    seconds: Annotated[float, typer.Option(help="For each line of the table.")] = 1.0,
    keep: Annotated[bool, typer.Option("--keep-memory/--return-memory", help="Freed memory, for both sides.")] = True,
    limit: Annotated[bool, typer.Option("--limit/--no-limit", help="Measure the machine's limit if unknown.")] = True,
    transposed: Annotated[bool, typer.Option("--transposed", help="Read every problem as a transposed one.")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Also write the lines to this file.")] = None,
    as_csv: Annotated[Path | None, typer.Option("--csv", help="Also write the lines to this file.")] = None,
) -> None:
    """How fast is a backend? Against the better of PyTorch as given and PyTorch through channels_last and back.

    Each backend is checked first (exactly on integers, and against the error bound); a wrong one gets no time and the
    exit status 1, as does a command that could time nothing. Both sides are timed alternately in this process; the
    interval is that of the ratio, at 95 %. Interrupted, it prints the lines that it has and ends with 130.

    Examples:

        convgrad bench g32mb8ic32ih56oc32oh56kh3ph1

        convgrad bench shapes_mobilenet --json times.json --csv times.csv

        convgrad --kernels my_kernels.py bench g32mb8ic32ih56oc32oh56kh3ph1 --backend mine -o forward
    """
    problems, unread = read_problems(what, transposed)
    passes = _passes(output)
    if not 0 < seconds < float("inf"):
        raise fail(f"--seconds must be positive and finite, got {seconds}")
    place = device_here(device)
    for problem in problems:
        if problem.empty:
            raise fail(f"{problem} is empty: there is nothing to time")
    for name in backend or ():
        if name != "all":
            get_backend(name)
    _check_writable(as_json, as_csv)
    if keep:
        keep_memory()
    lines: list[Line] = []
    interrupted = False
    try:
        for problem in problems:
            lines += _timed(problem, passes, backend or [], place, seconds, limit)
    except _Interrupted as stopped:
        lines, interrupted = [*lines, *stopped.lines], True
        say("convgrad: interrupted", sys.stderr)
    say(_HOW_TO_READ)
    say(conditions(device))
    for error in unread:
        say(f"not read: {error}")
    _write(lines, conditions(device), as_json, as_csv)
    bad = bool(unread) or any(line.wrong for line in lines) or all(line.speed is None for line in lines)
    raise typer.Exit(130 if interrupted else int(bad))


def _check_writable(*files: Path | None) -> None:
    for file in filter(None, files):
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise fail(f"{str(file)!r} cannot be written", "--json and --csv take a file")


def _write(lines: list[Line], where: str, as_json: Path | None, as_csv: Path | None) -> None:
    rows = [asdict(line) for line in lines]
    if as_json is not None:
        as_json.write_text(json.dumps({"conditions": where, "lines": rows}, indent=1) + "\n", encoding="utf-8")
    if as_csv is not None:
        with as_csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Line)])
            writer.writeheader()
            writer.writerows(rows)


class _Interrupted(Exception):  # noqa: N818 (an outcome)
    """By the user; with the lines so far."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__()
        self.lines = lines


def _passes(names: list[str] | None) -> tuple[Pass, ...]:
    unknown = [n for n in names or () if n not in PASSES]
    if unknown:
        raise fail(f"there is no output {unknown[0]!r}", f"one of {', '.join(PASSES)}")
    return tuple(p for p in PASSES if not names or p in names)


def _timed(
    problem: ConvProblem, passes: Iterable[Pass], names: list[str], device: torch.device, seconds: float, limit: bool
) -> list[Line]:
    """One problem's lines, printed as a table.

    Raises:
        _Interrupted: by the user; what is there is printed.
    """
    lines: list[Line] = []
    try:
        for line in _lines(problem, passes, names, device, seconds, limit):
            lines.append(line)
    except KeyboardInterrupt:
        raise _Interrupted(lines) from None
    finally:
        if lines:
            say(problem)
            say_table([Line.HEAD, *(line.cells for line in lines)], right=("ms", "GFLOP/s", "of limit", "PyTorch ms"))
    return lines


def _lines(
    problem: ConvProblem, passes: Iterable[Pass], names: list[str], device: torch.device, seconds: float, limit: bool
) -> Iterator[Line]:
    known = limits_of(Machine.here(device.type), problem.dtype, measured=limit)
    least = None if known is None else known.seconds(problem)
    for pass_ in passes:
        operands = _operands(problem, pass_, device)
        for name in _backends(problem, pass_, names, device):
            yield _line(problem, pass_, name, operands, device, seconds, least)


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
    problem: ConvProblem,
    pass_: Pass,
    name: str,
    operands: list[Tensor],
    device: torch.device,
    seconds: float,
    least: float | None,
) -> Line:
    against = reasons_against(get_backend(name), problem, (pass_,), device, current())
    if not against and reasons_against(get_backend("aten"), problem, (pass_,), device, current()):
        against = ["PyTorch does not compute it: there is nothing to compare with"]
    if against:
        return Line(str(problem), pass_, name, "; ".join(against))
    small = shrunk(problem, _CHECKED_FLOPS)
    results = check_problem(name, small, pass_, device=device, properties=("exact", "bound"))
    failed = [r for r in results if r.status == "failed"]
    if failed:
        return Line(str(problem), pass_, name, f"wrong: {failed[0].message}", wrong=True)
    pytorch = _pytorch(problem, pass_, *operands)
    mine = partial(plan_of(problem, pass_, name, device).contract, *operands)
    as_given = next(iter(pytorch))
    first = compare({"mine": mine, **pytorch}, as_given, seconds=seconds / 2, device=device, least_rounds=5)
    best = min(pytorch, key=first.median)
    seen = compare({"mine": mine, best: pytorch[best]}, best, seconds=seconds / 2, device=device)
    took, speed = seen.seconds("mine"), seen.speedup("mine")
    return Line(
        str(problem), pass_, name, "" if small == problem else "checked at a reduced size",
        took * 1e3, problem.flops / took * 1e-9, None if least is None else least / took,
        seen.seconds(best) * 1e3, best, speed.value, speed.low, speed.high,
    )  # fmt: skip


def _pytorch(problem: ConvProblem, pass_: Pass, a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch as given, and through channels_last with the conversions there and back."""
    return {
        name.removeprefix("aten:").replace("aten", "as given"): partial(
            plan_of(problem, pass_, name, a.device).contract, a, b
        )
        for name in pytorchs(problem, (pass_,), a.device)
    }
