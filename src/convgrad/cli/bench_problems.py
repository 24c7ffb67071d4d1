"""Each backend of a problem timed alternately with the best that PyTorch does, once it is checked."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ..backends import COPY
from ..check import check_problem, shrunk
from ..diagnostics import BEYOND, TOO_LOW, Load, Machine, compared, limits_of, requested
from ..engine import Step, backends, choose, get_backend, reasons_against
from ..engine.measure import Ratio, conditions
from ..problem import PASSES, ConvProblem, Pass, passes_of
from ..tables import Columns, Table, csv_text
from .app import Result, fail, say

_CHECKED_FLOPS = 2_000_000  # the definition is slow: a large problem is checked at a reduced size
_HOW_TO_READ = (
    "PyTorch's time is its median over all rounds; speed is the median of the ratios inside a round, with its 95 % "
    "interval; the backend's time is PyTorch's divided by it. Of the limit: the part of what this machine can do at "
    "best, by its memory and its arithmetic (convgrad explain shows both); above 100 % the operands came from a "
    "cache, or the kernel multiplies less (Winograd's)."
)

#: One output of a problem computed by one backend: the columns of the CSV; None and "" where it was not timed.
Line = dict[str, Any]
_UNTIMED: Line = {
    "problem": "", "output": "", "backend": "", "note": "", "milliseconds": None, "gflops_per_second": None,
    "of_limit": None, "pytorch_milliseconds": None, "pytorch_layout": "", "speed": None, "speed_low": None,
    "speed_high": None, "wrong": False,
}  # fmt: skip


_COLUMNS: Columns[Line] = {
    "output": (itemgetter("output"), ""),
    "backend": (itemgetter("backend"), ""),
    "ms": (itemgetter("milliseconds"), ".4g"),
    "PyTorch ms": (itemgetter("pytorch_milliseconds"), ".4g"),
    "speed": (lambda x: str(Ratio(x["speed"], x["speed_low"], x["speed_high"])) if x["speed"] else "not timed", ""),
    "in": (itemgetter("pytorch_layout"), ""),
    "GFLOP/s": (itemgetter("gflops_per_second"), ".4g"),
    "of limit": (lambda line: line["of_limit"] and f"{100 * line['of_limit']:.3g} %", ">"),
    "note": (itemgetter("note"), ""),
}


def run_problems(
    problems: Sequence[ConvProblem], directions: Mapping[ConvProblem, Collection[Pass]], names: list[str],
    outputs: Collection[str], place: torch.device, seconds: float, limit: bool, as_csv: Path | None,
) -> Result:  # fmt: skip
    """Time and print every problem."""
    for problem in problems:
        if problem.empty:
            raise fail(f"{problem} is empty: there is nothing to time")
    lines: list[Line] = []
    warnings: dict[str, list[str]] = {}
    interrupted = False
    try:
        for problem in problems:
            before, load = len(lines), Load()
            known = limits_of(Machine.here(place.type), problem.dtype, measured=limit)
            least = known and known.seconds(problem)
            try:
                for pass_ in passes_of(outputs or directions.get(problem, PASSES)):
                    chosen = names or [choose(problem, (pass_,), place)[0].backend.name]
                    if "all" in names:
                        chosen = [n for n, b in backends().items() if not reasons_against(b, problem, (pass_,), place)]
                    for name in chosen:
                        line = {**_UNTIMED, "problem": str(problem), "output": pass_, "backend": name}
                        lines.append(line | _timed(problem, pass_, name, place, seconds, least))
            finally:
                if lines[before:]:
                    if said := load.warnings(place, problem.dtype):
                        warnings[str(problem)] = [*said]
                    say("\n".join([*said, str(problem)]))
                    say(Table(lines[before:], _COLUMNS))
    except KeyboardInterrupt:
        interrupted = True
        say("convgrad: interrupted", sys.stderr)
    say(_HOW_TO_READ if lines else "nothing could be timed")
    if any((line["of_limit"] or 0) > BEYOND for line in lines):
        say(TOO_LOW)
    say(conditions(str(place)))
    if as_csv is not None:
        as_csv.write_text(csv_text([[*_UNTIMED], *(line.values() for line in lines)]), encoding="utf-8")
    bad = any(line["wrong"] for line in lines) or all(line["speed"] is None for line in lines)
    rows = [{"fraction_of_limit" if name == "of_limit" else name: v for name, v in line.items()} for line in lines]
    data = {"conditions": conditions(str(place)), "problems": rows, "warnings": warnings}
    return Result(data, 130 if interrupted else int(bad))


def _timed(
    problem: ConvProblem, pass_: Pass, name: str, device: torch.device, seconds: float, least: float | None
) -> Line:
    """The columns of a line that are found by running it."""
    backend, copy = get_backend(name), COPY * (problem.padding_mode != "zeros")
    given, last = f"aten{copy}", f"aten:channels_last{copy}"  # a sequence in channels_last is an image of one row
    stock = requested([given, last], problem, (pass_,), device)
    against = reasons_against(backend, problem, (pass_,), device)
    if not against and given not in stock:
        against = ["PyTorch does not compute it: there is nothing to compare with"]
    if against:
        return {"note": "; ".join(against)}
    small = shrunk(problem, _CHECKED_FLOPS, lambda p: not reasons_against(backend, p, (pass_,), device))
    for result in check_problem(name, small, pass_, device=device, properties=("exact", "bound")):
        if result.status == "failed":
            return {"note": f"wrong: {result.message}", "wrong": True}
    candidates = {"mine": (problem, (Step(backend, (pass_,), "requested by name"),)), **stock}
    seen = compared(candidates, (pass_,), device, baselines=[*stock], seconds=seconds)
    if seen is None:
        return {"note": "no memory for it"}
    best, took = seen.baseline, seen.seconds("mine")
    return {
        "note": "" if small == problem else "checked at a reduced size",
        "milliseconds": took * 1e3,
        "gflops_per_second": problem.flops / took * 1e-9,
        "of_limit": least and least / took,
        "pytorch_milliseconds": seen.seconds(best) * 1e3,
        "pytorch_layout": "as given" if best == given else "channels_last",
        **dict(zip(("speed", "speed_low", "speed_high"), seen.speedup("mine"), strict=True)),
    }
