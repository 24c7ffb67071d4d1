"""``convgrad bench PROBLEM...``: a backend against the best that PyTorch does, checked first, timed alternately."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..check import check_problem, shrunk
from ..diagnostics import Machine, limits_of, plan_of, random_operands
from ..engine import backends, choose, get_backend, reasons_against
from ..engine.ab_timer import Ratio, compare, conditions, keep_memory
from ..problem import PASSES, ConvProblem, Pass, passes_of
from ..settings import current
from .app import fail, say, say_table
from .bench_layers import pytorchs
from .problem_arguments import read_problems

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


def run_problems(
    what: list[str],
    backend: list[str],
    outputs: Collection[str],
    place: torch.device,
    seconds: float,
    keep: bool,
    limit: bool,
    transposed: bool,
    as_csv: Path | None,
) -> tuple[int, dict[str, Any]]:
    """Time and print every problem; the exit status, and all as plain data."""
    problems, unread, directions = read_problems(what, transposed)
    for problem in problems:
        if problem.empty:
            raise fail(f"{problem} is empty: there is nothing to time")
    if keep:
        keep_memory()
    lines: list[Line] = []
    interrupted = False
    try:
        for problem in problems:
            some = passes_of(outputs or directions.get(problem, PASSES))
            lines += _timed(problem, some, backend, place, seconds, limit)
    except _Interrupted as stopped:
        lines, interrupted = [*lines, *stopped.lines], True
        say("convgrad: interrupted", sys.stderr)
    say(_HOW_TO_READ)
    say(conditions(str(place)))
    for error in unread:
        say(f"not read: {error}")
    rows = [asdict(line) for line in lines]
    if as_csv is not None:
        with as_csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Line)])
            writer.writeheader()
            writer.writerows(rows)
    for row in rows:
        row["fraction_of_limit"] = row.pop("of_limit")
    bad = bool(unread) or any(line.wrong for line in lines) or all(line.speed is None for line in lines)
    data = {"conditions": conditions(str(place)), "problems": rows, "not_read": [str(error) for error in unread]}
    return 130 if interrupted else int(bad), data


class _Interrupted(Exception):  # noqa: N818 (an outcome)
    """By the user; with the lines so far."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__()
        self.lines = lines


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
