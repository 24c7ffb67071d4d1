"""Other ways to PyTorch's results on the CPU, against PyTorch's call as given.

`aten:float32`, `aten:channels_last`, `aten:mkldnn` (oneDNN by name) and `im2col` compute what `aten` computes. Each is
checked against it, and then all are timed alternately in one process, conversions and workspaces included, freed memory
kept (`keep_memory`). A speed-up is the median over rounds, with its interval; `chosen` is what the rules take.

    python benchmarks/routes.py                                the table, one thread and all threads
    python benchmarks/routes.py --random 50 --seed 1           random problems instead
    python benchmarks/routes.py --threads 1 --problem "mb4ic64ih28oc64kh3ph1 float16"
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/routes.py

With one thread the time is that of the processor, which does not count what other programs take; with more it is that
of the clock. ``--csv FILE`` appends one line a measurement, ``--markdown FILE.csv`` prints such a file as tables.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convgrad import settings
from convgrad.engine import choose
from convgrad.engine.ab_timer import Comparison, conditions, keep_memory
from convgrad.engine.registry import get_backend
from convgrad.problem import OPERANDS, ConvProblem, Output
from convgrad.sizes import output_length

ROUTES = ("aten:float32", "aten:channels_last", "aten:mkldnn", "im2col", "native")
OUTPUTS: tuple[tuple[Output, ...], ...] = (
    ("forward",), ("grad_input",), ("grad_weight",), ("grad_input", "grad_weight"),
)  # fmt: skip
CPU = torch.device("cpu")

# What a route is for, and beside it what looks alike and is not.
TABLE = {
    "16 bits": """
        mb4ic64ih28oc64kh3ph1 float16
        mb4ic64ih28oc64kh3ph1 float16 channels_last
        mb4ic256ih14oc256kh1 float16
        mb2ic3ih112oc64kh7sh2ph3 float16
        mb4ic64iw500oc64kw3pw1 float16
        mb1ic16id8ih28iw28oc16kd3kh3kw3pd1ph1pw1 float16
        mb4g32ic1024ih14oc1024kh3ph1 float16
        mb4ic64ih28oc64kh3ph1 bfloat16
        mb4ic64ih28oc64kh3ph1 bfloat16 channels_last
        mb4ic256ih14oc256kh1 bfloat16
        mb2ic3ih112oc64kh7sh2ph3 bfloat16
        mb4ic64iw500oc64kw3pw1 bfloat16
        mb4g32ic1024ih14oc1024kh3ph1 bfloat16
    """,
    "few output channels": """
        mb2ic64ih64oc3kh9ph4
        mb4ic64ih56oc3kh3ph1
        mb4ic32ih64oc1kh5ph2
        mb4ic64ih56oc21kh1
        mb2ic48ih40oc8kh3ph1
        mb2g4ic256ih28oc12kh5ph2
        mb2ic64iw4000oc1kw7pw3
        mb1ic32id8ih28iw28oc2kd3kh3kw3pd1ph1pw1
    """,
    "long kernels": """
        mb2g16ic768iw250oc768kw128pw64
        mb2g8ic192iw400oc192kw81pw40
        mb2ic64iw400oc64kw81pw40
        mb2ic32iw2000oc64kw64pw32
        mb2g16ic768iw400oc768kw9pw4
        mb4ic80iw1500oc384kw3pw1
    """,
    "no element read twice": """
        mb8ic256ih56oc512kh1sh2
        mb8ic256ih28oc128kh1sh2
        mb8ic512ih28oc1024kh1sh2
        mb8ic1024ih14oc2048kh1sh2
        mb8ic48ih28oc96kh1sh2
        mb8g8ic512ih28oc512kh1sh2
        mb4ic3ih112oc96kh4sh4
        mb4ic3ih112oc192kh16sh16
        mb4ic96ih28oc192kh2sh2
        mb8ic256ih28oc128kh1sh2 channels_last
        mb4ic3ih112oc96kh4sh4 channels_last
    """,
    "one small volume": """
        mb1ic32id8ih28iw28oc32kd3kh3kw3pd1ph1pw1
        mb1ic32id8ih28iw28oc32kd3kh3kw3pd1ph1pw1 channels_last
        mb1ic16id16ih32iw32oc32kd3kh3kw3pd1ph1pw1
        mb1ic128id4ih14iw14oc128kd3kh3kw3pd1ph1pw1
        mb1ic256id4ih8iw8oc256kd3kh3kw3pd1ph1pw1
        mb1ic3id8ih56iw56oc24kd3kh3kw3pd1ph1pw1
        mb1ic64id4ih14iw14oc64kd3kh3kw3pd1ph1pw1sd2sh2sw2
        mb2ic32id8ih28iw28oc32kd3kh3kw3pd1ph1pw1
    """,
    "float64": """
        mb8ic64ih28oc64kh3ph1 float64
        mb8ic16ih64oc16kh3ph1 float64
        mb2ic32id8ih14iw14oc32kd3kh3kw3pd1ph1pw1 float64
        mb8ic64iw512oc64kw3pw1 float64
        mb8ic64ih28oc128kh1 float64
        mb8g4ic128ih28oc128kh3ph1 float64
        mb4ic64ih28oc64kh3ph2dh1 float64
    """,
    "the usual": """
        mb4ic3ih112oc64kh7sh2ph3
        mb4ic64ih56oc64kh3ph1
        mb4ic64ih28oc128kh3sh2ph1
        mb8ic64ih28oc256kh1
        mb8ic512ih7oc2048kh1
        mb4g32ic1024ih14oc1024kh3ph1
        mb1ic64ih14oc64kh3ph1
    """,
}


def random_problem(rng: random.Random) -> ConvProblem:
    """Dense and grouped problems of every kind but depthwise ones, 10 million to a billion operations a pass."""
    while True:
        ndim = rng.choice([1, 2, 2, 2, 3])
        longest = {1: 4000, 2: 112, 3: 32}[ndim]
        size = tuple(round(math.exp(rng.uniform(math.log(5), math.log(longest)))) for _ in range(ndim))
        kernel = (rng.choice([1, 1, 2, 3, 3, 3, 3, 4, 5, 7, 9]),) * ndim
        stride = (rng.choice([1, 1, 1, 2, 2, 4]),) * ndim
        dilation = (rng.choice([1, 1, 1, 1, 2]),) * ndim
        padding = tuple((k // 2 * d, k // 2 * d) for k, d in zip(kernel, dilation, strict=True))
        axes = zip(size, kernel, stride, padding, dilation, strict=True)
        output = tuple(output_length(n, k, s, *p, d) for n, k, s, p, d in axes)
        groups, some = rng.choice([1, 1, 1, 1, 2, 4, 8, 16]), (1, 2, 3, 8, 16, 20, 24, 32, 48, 64, 96, 128, 256)
        inputs, outputs = groups * rng.choice(some), groups * rng.choice(some)
        if min(output) < 1 or max(inputs, outputs) > 1024 or groups == inputs > 1:
            continue
        formats = [torch.contiguous_format, {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim)]
        p = ConvProblem(
            rng.choice([1, 2, 4, 8, 16]), inputs, outputs, groups, size, kernel, stride, padding, dilation, output,
            memory_format=rng.choice(formats) or torch.contiguous_format,
        )  # fmt: skip
        if 1e7 < p.flops < 1e9 and p.least_bytes < 2e8:
            return p


# ---- timing ----------------------------------------------------------------------------------------


def calls(p: ConvProblem, outputs: tuple[Output, ...]) -> dict[str, Callable[[], object]]:
    """PyTorch's call, and every route that can, checked against it."""
    tensors = {
        slot: torch.randn(p.shape_of(slot)).to(p.dtype).contiguous(memory_format=p.memory_format)
        for slot in ("grad_output", "input", "weight")
    }
    found = {name: call for name in ("aten", *ROUTES) if (call := _call(name, p, outputs, tensors)) is not None}
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4}.get(p.dtype, 3e-2)
    expected = found["aten"]()
    for name, call in found.items():
        for mine, theirs in zip(call(), expected, strict=True):
            error = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30)
            if not error < tolerance:
                raise AssertionError(f"{name}: {outputs} of {p}: relative difference {error:.2g} from PyTorch")
    return found  # pyright: ignore[reportReturnType]


def _call(
    name: str, p: ConvProblem, outputs: tuple[Output, ...], tensors: dict[str, Tensor]
) -> Callable[[], tuple[Tensor, ...]] | None:
    """One call for all outputs, or one for each where there is no such sweep; None where the backend cannot."""
    backend = get_backend(name)
    if len(outputs) > 1 and outputs not in backend.sweeps:
        each = [_call(name, p, (output,), tensors) for output in outputs]
        return None if None in each else lambda: tuple(one()[0] for one in each if one)
    if not set(outputs) <= set(backend.passes) or backend.reasons_against(p, outputs, CPU):
        return None
    kernel, size = backend.bind(p, outputs), backend.workspace(p, outputs)
    slots = OPERANDS[outputs[0]] if len(outputs) == 1 else ("grad_output", "input", "weight")  # pyright: ignore
    operands = [tensors[slot] for slot in slots]

    def call() -> tuple[Tensor, ...]:
        scratch = torch.empty(size, dtype=torch.uint8) if size else None
        if len(outputs) > 1:
            return kernel(*operands, scratch)
        return (kernel(*operands, None, scratch),)

    return call


def measured(sides: dict[str, Callable[[], object]], seconds: float) -> Comparison:
    """Each called once a round, in alternating order."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for call in sides.values():
        for _ in range(2):
            call()
    stop, rounds = clock() + seconds * len(sides), 0
    while clock() < stop or rounds < 7:
        for name in list(sides) if rounds % 2 else reversed(list(sides)):
            start = clock()
            sides[name]()
            samples[name].append(clock() - start)
        rounds += 1
    return Comparison("aten", {name: tuple(times) for name, times in samples.items()})


def chosen(p: ConvProblem, outputs: tuple[Output, ...]) -> str:
    return "+".join(step.backend.name for step in choose(p, outputs, CPU, settings.current(), None))


# ---- output ----------------------------------------------------------------------------------------

COLUMNS: tuple[str, ...] = (
    "kind",
    "problem",
    "outputs",
    "threads",
    "route",
    "ms",
    "speedup",
    "low",
    "high",
    "chosen",
    "conditions",
)


def where() -> str:
    """Machine, versions, memory setting, instruction sets that were forbidden, commit."""
    isa = {k: v for k, v in os.environ.items() if k in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    parts = [conditions(), *(f"{k}={v}" for k, v in isa.items()), f"commit {commit.stdout.strip()}"]
    return ", ".join(part for part in parts if part)


def rows(kind: str, p: ConvProblem, seconds: float) -> Iterator[dict[str, Any]]:
    for outputs in OUTPUTS:
        if len(outputs) > 1 and p.transposed:
            continue
        seen = measured(calls(p, outputs), seconds)
        taken, place = chosen(p, outputs), where()
        for name in seen.samples:
            ratio = seen.speedup(name)
            numbers = (f"{seen.seconds(name) * 1e3:.4g}", *(f"{v:.3g}" for v in (ratio.value, ratio.low, ratio.high)))
            what = (kind, str(p), "+".join(outputs), torch.get_num_threads(), name)
            yield dict(zip(COLUMNS, (*what, *numbers, taken, place), strict=True))


def markdown(lines: list[dict[str, Any]]) -> Iterator[str]:
    """For each machine and number of threads one table: PyTorch's time, and how many times faster each route is."""

    def machine(r: dict[str, Any]) -> tuple[str, int]:
        return r["conditions"].split(", commit")[0], int(r["threads"])

    for (place, _), some in groupby(sorted(lines, key=machine), key=machine):
        yield f"\n## {place}\n\n| problem | | aten ms | {' | '.join(ROUTES)} |\n|---|---|---|{'---|' * len(ROUTES)}"
        kind = ""
        for (what, problem, outputs), of_one in groupby(some, key=lambda r: (r["kind"], r["problem"], r["outputs"])):
            found = {r["route"]: r for r in of_one}
            if what != kind:
                kind = what
                yield f"| **{kind}** |{' |' * (2 + len(ROUTES))}"
            cells = []
            for route in ROUTES:
                r = found.get(route)
                differs = r is not None and (float(r["low"]) > 1 or float(r["high"]) < 1)
                star = " *" if r and route in r["chosen"].split("+") else ""
                cells.append("" if r is None else f"{float(r['speedup']):.2f}x{'' if differs else ' ~'}{star}")
            name = outputs.replace("grad_input+grad_weight", "both")
            yield f"| `{problem}` | {name} | {found['aten']['ms']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--seconds", type=float, default=0.2, help="for each side")
    parser.add_argument("--random", type=int, default=0, help="so many random problems instead of the table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problem", action="append", help="only this one")
    parser.add_argument("--kind", choices=TABLE, help="only this part of the table")
    parser.add_argument("--csv", type=Path, help="append the measurements to this file")
    parser.add_argument("--markdown", type=Path, help="print this file of measurements, and measure nothing")
    arguments = parser.parse_args()
    if arguments.markdown:
        with arguments.markdown.open(encoding="utf-8") as file:
            print("\n".join(markdown(list(csv.DictReader(file)))))
        return
    keep_memory()
    rng = random.Random(arguments.seed)
    problems = [
        (k, ConvProblem.parse(line)) for k, lines in TABLE.items() for line in lines.split("\n") if line.strip()
    ]
    problems = [(k, p) for k, p in problems if arguments.kind in (None, k)]
    if arguments.random:
        problems = [("random", random_problem(rng)) for _ in range(arguments.random)]
    if arguments.problem:
        problems = [("", ConvProblem.parse(text)) for text in arguments.problem]
    found: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for kind, problem in problems:
            for row in rows(kind, problem, arguments.seconds):
                found.append(row)
                if arguments.csv:
                    new = not arguments.csv.exists()
                    with arguments.csv.open("a", encoding="utf-8", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS)
                        if new:
                            writer.writeheader()
                        writer.writerow(row)
    print("\n".join(markdown(found)))


if __name__ == "__main__":
    main()
