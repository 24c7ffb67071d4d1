"""Every distinct convolution of real models: PyTorch as given, its best layout, convgrad by rules, and measured.

    python benchmarks/time_layers.py layers.csv --threads 2 --minutes 5 --resume
    python benchmarks/time_layers.py layers.csv benchmarks/layers/* --threads 2 --minutes 5 --resume

A layer that was never measured here is measured first, as `convgrad tune` does it, and remembered. Results are
compared with PyTorch's before they are timed; all sides alternate. After an interruption, or --minutes, it goes on
with --resume.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from result_rows import CONDITIONS, Row, models_named, options_of, run_rows, shape_of, takes_images
from torch import Tensor

from convgrad._compat import channels_last_of
from convgrad.backends import COPY
from convgrad.cli.models import explained
from convgrad.cli.options import LAYOUTS, OfModel
from convgrad.cli.problem_arguments import read_problems
from convgrad.cli.tune import Job, jobs_of
from convgrad.diagnostics import Limits, Machine, limits_of
from convgrad.engine import Step, choose, get_backend, measure_now, reasons_against, trials
from convgrad.engine.measure import compare
from convgrad.problem import ConvProblem, Outputs
from convgrad.tables import Table

CPU = torch.device("cpu")
_SAME = 1e-3  # relative difference of results that are the same; a wrong one is thousands of times above
COLUMNS = (
    "problem", "models", "layout", "output", "pytorch_ms", "pytorch_best", "pytorch_best_ms", "rules", "rules_speed",
    "rules_low", "rules_high", "measured", "measured_speed", "measured_low", "measured_high", "of_limit", "note",
    *CONDITIONS,
)  # fmt: skip
_OUTPUTS = ("forward", "backward")
_KEY = ("problem", "output", "threads", "busy")
#: A layer is counted as slower below this ratio, where it is more than a call in Python costs.
_SLOWER, _CALL_MS = 0.97, 0.01
_HOW_TO_READ = (
    "Times as fast as PyTorch's best (as given, or through channels_last with conversions), as geometric mean / worst "
    "layer; backward is both gradients. Slower: measured below 0.97x, with the whole interval. Limit: the median part "
    "of what this machine can do at best, by its memory and its arithmetic."
)

Steps = tuple[Step, ...]


def main(args: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__, seconds=0.5)
    parser.add_argument("--batch", type=int, default=4, help="of the models of transformers")
    parser.add_argument("--size", type=int, default=224, help="height and width of their images")
    options = parser.parse_args(args)
    wanted, layouts = models_named(options.models), [options.layout] if options.layout else LAYOUTS

    def all_rows() -> list[Row]:
        of: dict[ConvProblem, set[str]] = {}
        for name, problem in _in_turn(wanted, options.batch, options.size, layouts):
            of.setdefault(problem, set()).add(name if ":" in name else Path(name).name)
        limits = {dtype: limits_of(Machine.here(), dtype, measured=True) for dtype in {p.dtype for p in of}}
        found: list[Row] = []
        for p, names in of.items():
            for output, job in zip(_OUTPUTS, jobs_of([p]), strict=True):
                about = {"problem": str(p), "layout": p.layout, "output": output}
                about["models"] = " ".join(sorted(names))
                found.append((about, partial(_timed, job, options.seconds, limits[p.dtype])))
        return found

    return run_rows(options, COLUMNS, _KEY, all_rows, _show)


# ---- what to time ------------------------------------------------------------------------------------


def _in_turn(names: Sequence[str], batch: int, size: int, layouts: Sequence[str]) -> Iterator[tuple[str, ConvProblem]]:
    """A layer of each model in turn, each model's in a fixed random order: a run that is cut off is a fair sample."""
    each = [
        [(name, p.replace(name="")) for p in layers_of(name, batch, size, layout == "channels_last")]
        for name in names
        for layout in layouts
    ]
    for some in each:
        some.sort(key=lambda found: crc32(str(found[1]).encode()))
    for some in zip_longest(*each):
        yield from filter(None, some)


def layers_of(name: str, batch: int, size: int, channels_last: bool) -> list[ConvProblem]:
    """Return each distinct convolution of a model or a file once, in order; none where the layout is no other one."""
    if Path(name).is_file():
        result = read_problems([name])[0]
        return [p.replace(memory_format=channels_last_of(p.ndim)) for p in result] if channels_last else result
    images, shape = takes_images(name), "" if ":" in name else shape_of(name, batch, size)
    if channels_last and not images:
        return []
    result = explained(name, Machine.here(), OfModel(shape, last=channels_last))
    return [layer.problem for layer in result if layer.kind != "Linear"]


# ---- timing ------------------------------------------------------------------------------------------


def stock_steps(problem: ConvProblem, outputs: Outputs, device: torch.device) -> dict[str, tuple[Step, ...]]:
    """Return the steps of PyTorch as given, and through channels_last and back, where it can.

    A sequence in channels_last is an image of one row.
    """
    found: dict[str, tuple[Step, ...]] = {}
    for name in ("aten", "aten:channels_last"):
        backend = get_backend(name + COPY * (problem.padding_mode != "zeros"))
        each: tuple[Outputs, ...] = tuple((o,) for o in outputs)
        for sets in ((outputs,), each):
            if not any(reasons_against(backend, problem, o, device, requested=True) for o in sets):
                found[name] = tuple(Step(backend, o, "requested by name") for o in sets)
                break
    return found


def _named(steps: Steps) -> str:
    return ", ".join(dict.fromkeys(step.backend.name for step in steps))


def _timed(job: Job, seconds: float, limits: Limits | None) -> dict[str, Any]:
    """The columns of a row that are found by running it."""
    p, outputs = job
    if not job.count(CPU):
        measure_now(p, outputs, CPU, force=True)
    candidates = stock_steps(p, outputs, CPU)
    stock = [*candidates]
    chosen: dict[str, str] = {}
    for who, stored in (("rules", False), ("measured", True)):
        steps = choose(p, outputs, CPU, stored=stored)
        # One sweep and the same backend's single passes are two ways.
        chosen[who] = _named(steps) + (" apart" if len(steps) > 1 and len({s.backend.name for s in steps}) == 1 else "")
        candidates.setdefault(chosen[who], steps)
    try:
        calls = trials({candidate: (p, steps) for candidate, steps in candidates.items()}, outputs, CPU)
    except (RuntimeError, MemoryError):
        return {**chosen, "note": "no memory for it"}
    with torch.no_grad():
        expected = _results(calls[stock[0]])
        for candidate, call in calls.items():
            if not all(map(_same, _results(call), expected)):
                return {**chosen, "note": f"wrong: {candidate} differs from PyTorch"}
        best, enough = stock[0], seconds
        if len(stock) > 1:
            best = min(stock, key=compare(calls, best, seconds=seconds / 2, least_rounds=3).median)
        elif len(calls) == 1:
            enough = seconds / 5  # there is nothing to compare
        seen = compare(calls, best, seconds=enough, least_rounds=6)
    found: dict[str, Any] = {
        **chosen,
        "pytorch_ms": seen.seconds(stock[0]) * 1e3,
        "pytorch_best": "as given" if best == "aten" else best.removeprefix("aten:"),
        "pytorch_best_ms": seen.seconds(best) * 1e3,
        "of_limit": limits and limits.seconds(p, outputs) / seen.seconds(chosen["measured"]),
    }
    for who, candidate in chosen.items():
        found |= zip((f"{who}_speed", f"{who}_low", f"{who}_high"), seen.speedup(candidate), strict=True)
    return found


def _results(call: Callable[[], Any]) -> list[Tensor]:
    result = call()
    return [result] if isinstance(result, Tensor) else [t for t in result if t is not None]


def _same(mine: Tensor, theirs: Tensor) -> bool:
    norm = torch.linalg.vector_norm
    tolerance = _SAME if mine.dtype.itemsize > 2 else 30 * _SAME
    return bool(norm((mine - theirs).float()) <= tolerance * norm(theirs.float()))


# ---- showing -----------------------------------------------------------------------------------------


def _show(rows: Sequence[dict[str, str]]) -> None:
    """For each layout a table: a line for each model and output."""
    timed = [row for row in rows if row["measured_speed"]]
    for layout in LAYOUTS:
        in_it = [r for r in timed if r["layout"] == layout]
        names = dict.fromkeys(name for row in in_it for name in row["models"].split())
        each = [*((n, [r for r in in_it if n in r["models"].split()]) for n in names), ("all", in_it)]
        groups = [(n, o, [r for r in of_model if r["output"] == o]) for n, of_model in each for o in _OUTPUTS]
        if in_it:
            print(Table([group for group in groups if group[2]], {
                layout: (lambda g: g[0], ""),
                "output": (lambda g: g[1], ""),
                "layers": (lambda g: len(g[2]), "d"),
                "by rules": (lambda g: _summary(g[2], "rules"), ">"),
                "measured": (lambda g: _summary(g[2], "measured"), ">"),
                "slower": (lambda g: sum(map(_is_slower, g[2])), "d"),
                "limit": (lambda g: _limit(g[2]), ".0%"),
            }).text())  # fmt: skip
    if timed:
        print(_HOW_TO_READ)
    for row in rows:
        if row["note"]:
            print(f"not timed: {row['output']} of {row['problem']}: {row['note']}")


def _is_slower(row: dict[str, str]) -> bool:
    """Whether ours loses by more than noise and the price of a call."""
    high = float(row["measured_high"])
    return high < _SLOWER and float(row["pytorch_best_ms"]) * (1 / high - 1) > _CALL_MS


def _summary(rows: Sequence[dict[str, str]], who: str) -> str:
    speeds = [float(row[f"{who}_speed"]) for row in rows]
    return f"{statistics.geometric_mean(speeds):.2f} / {min(speeds):.2f}"


def _limit(rows: Sequence[dict[str, str]]) -> float | None:
    return statistics.median(parts) if (parts := [float(r["of_limit"]) for r in rows if r["of_limit"]]) else None


if __name__ == "__main__":
    sys.exit(main())
