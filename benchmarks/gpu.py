"""Our GPU kernels in one call, under ten minutes: conformance on the device, then ours against PyTorch.

    python benchmarks/gpu.py [--stages card,verdicts,conformance,compiled,rows,graphs,...] [--only mobilenet,mamba]

1. card: the bandwidth of a copy, the peak, the time of a launch that does nothing.
2. verdicts: one call of each kind of problem for which a rule proposes another backend than PyTorch's, and what the
   timing of that call, which the library itself makes, decided on this card. The most valuable ones come first.
3. host: microseconds that the processor takes to issue a short call, by PyTorch and by convgrad.
4. conformance: the suite on the device, in worker processes; it compiles what it runs (some hundred kernels).
5. compiled: every kernel of the table, into Triton's cache on disk.
6. rows: every call of the table is compared with PyTorch's own kernels on small integers, which must give equal
   results, and then timed against PyTorch as given (NCHW) and in channels_last with cudnn.benchmark, alternately,
   behind a flushed cache; a sequence in channels_last has strides (L*C, 1, C). A row that fails, hangs or breaks the
   device says so, and the others go on in a new process.
7. graphs: CUDA graphs and torch.compile.
8. steps (only if named): training steps of whole models, stock and after `accelerate_`, each in eager mode, as a CUDA
   graph and compiled.
9. sanitized (only if named, and where compute-sanitizer is installed): a few problems under it.

What is found is judged by bars: bytes against the card's copy bandwidth, products against its float32 peak, speed
against PyTorch; a row hardly longer than a few launches is not judged by bandwidth. The table is written to gpu.md
and everything to gpu-state.json in DIR (default: benchmarks/results, in the repository), anew after every row: a run
that is cut off keeps what it has, and the next one on the same machine goes on from there (``--fresh``: from the
beginning). ``--dry-run`` tries the script itself on a CPU, on tiny problems.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_calls import (
    card,
    compiled_agrees,
    conform,
    graph_replays,
    host,
    measure,
    sanitize,
    short,
    taking,
    training_step,
    verdicts,
    warm,
)
from gpu_problems import (
    DTYPES,
    HOST,
    LAYOUTS,
    MODELS,
    MODES,
    NARROW,
    PROBLEMS,
    PROPOSED,
    SWEEP,
    TINY,
    WHAT,
    WIDE,
    layouts,
)
from gpu_report import failures, line, report
from gpu_workers import Task, Worker, in_parallel, run_once

from convgrad.backends._native_library import load
from convgrad.diagnostics import least_work
from convgrad.engine.measure import conditions
from convgrad.engine.registry import backends
from convgrad.problem import ConvProblem

STATE = "gpu-state.json"
_ROW_LIMIT = 60.0  # seconds for one row, compilation included
_WARNING = "A dry run on a CPU: no figure here says anything about a GPU."


class Run:
    """What is asked for, what was found so far, and where it is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begun = time.monotonic()
        self.table = table(args)
        self.state: dict[str, Any] = {
            "conditions": f"{conditions(args.device)}, triton {triton_version()}"
            + ", no compiled library" * (not load()),
            "warning": _WARNING * args.dry_run,
            "card": {},
            "wanted": len(self.table) * len(WHAT),
            "rows": [],
        }

    def at(self, share: float) -> float:
        """The moment when a share of the time is over."""
        return self.begun + share * self.args.seconds

    @property
    def left(self) -> float:
        return self.at(1) - time.monotonic()

    def resume(self) -> None:
        """Take over what an earlier run on the same machine and versions has found."""
        file = self.args.out / STATE
        if self.args.fresh or not file.exists():
            return
        try:
            before = json.loads(file.read_text())
            if before["conditions"] == self.state["conditions"] and before["warning"] == self.state["warning"]:
                self.state |= {key: before[key] for key in ("card", *STAGES) if key in before and key != "rows"}
                self.state["rows"] = [row for row in before["rows"] if row["times"]]
            else:
                self.set_aside()
        except (ValueError, KeyError, TypeError) as error:
            print(f"{file} cannot be read, and is begun anew: {short(error)}")
        print(f"{len(self.state['rows'])} rows are there already.", flush=True)

    def set_aside(self) -> None:
        """Rename what was found on another machine, or with other versions, which this run would overwrite."""
        for file in (self.args.out / STATE, self.args.out / "gpu.md"):
            if file.exists():
                kept = file.with_name(f"{file.stem}-{time.strftime('%Y%m%d-%H%M%S')}{file.suffix}")
                file.rename(kept)
                print(f"{file.name} is of another machine, or of other versions; it is now {kept.name}.")

    def save(self) -> None:
        self.args.out.mkdir(parents=True, exist_ok=True)
        for name, text in ((STATE, json.dumps(self.state, indent=1, default=str)), ("gpu.md", report(self.state))):
            new = self.args.out / f".{name}.new"
            new.write_text(text)
            new.replace(self.args.out / name)  # never half a file


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return triton.__version__


def table(args: argparse.Namespace) -> list[tuple[ConvProblem, str]]:
    """Problems, each with every backend that takes it."""
    words = [w for w in args.only.split(",") if w]
    wanted = [ConvProblem.parse(p) for p in (TINY if args.dry_run else PROBLEMS)]
    wanted = [p for p in wanted if not words or any(w in p.name for w in words)]
    # float16 takes about as long as bfloat16: it comes last.
    typed = [p.replace(dtype=d) for some in (DTYPES[:2], DTYPES[2:]) for p in wanted for d in some]
    return [(p, backend) for p in typed for backend in taking(p, args.backend, args.device)]


# ---- the stages ------------------------------------------------------------------------------------


def card_of(run: Run) -> None:
    """What the card can do at best."""
    answer = run_once(card, run.args.device, limit=min(60.0, run.left))
    run.state["card"] = answer if "error" not in answer else {"not measured": answer["error"]}


def decided(run: Run) -> None:
    """What the first calls decide about the proposals of rules."""
    found = run.state.setdefault("verdicts", {})
    with Worker() as worker:
        for text in TINY[:1] if run.args.dry_run else PROPOSED:
            if "error" in found.get(text, {"error": ""}) and run.left > 5:
                found[text] = worker.run(verdicts, text, run.args.device, limit=min(90.0, run.left))
                print(text, *(f"  {outputs}: {said}" for outputs, said in found[text].items()), sep="\n", flush=True)
                run.save()


def hosted(run: Run) -> None:
    """How long the processor takes to issue a call."""
    found = run.state.setdefault("host", {})
    with Worker() as worker:
        for text in HOST:
            if "error" in found.get(text, {"error": ""}) and run.left > 5:
                limit = min(60.0, run.left)
                found[text] = worker.run(host, text, run.args.device, 2 * run.args.row_seconds, limit=limit)
                print(text, found[text], flush=True)
                run.save()


def shared(run: Run, stage: str, task: Task, texts: list[str], share: float) -> None:
    """A task for every text, by several workers, until a share of the time is over; each answer is kept at once."""
    found = run.state.setdefault(stage, {})
    found |= {text: {} for text in texts}

    def keep(text: str, answer: dict[str, Any]) -> None:
        found[text] = answer
        run.save()

    in_parallel(task, texts, (run.args.backend, run.args.device), run.args.workers, run.at(share), keep)


def compiled(run: Run) -> None:
    """Every kernel of the rows that are still to be measured, into the cache on disk."""
    left = dict.fromkeys(problem for problem, backend in run.table if missing(run, problem, backend))
    texts = list(dict.fromkeys(str(p) for problem in left for p in layouts(problem).values()))
    shared(run, "compiled", warm, texts, 0.6)


def conformance(run: Run) -> None:
    """The suite on the device."""
    texts, found = NARROW[:1] if run.args.dry_run else [*NARROW, *WIDE], run.state.get("conformance", {})
    shared(run, "conformance", conform, [text for text in texts if "error" in (found.get(text) or {"error": ""})], 0.4)


def sanitized(run: Run) -> None:
    """A few problems under compute-sanitizer."""
    shared(run, "sanitized", sanitize, [*NARROW[:3], *WIDE[:2]], 1.0)


def graphs(run: Run) -> None:
    """CUDA graphs and torch.compile, which a GPU is needed for."""
    args = run.args
    if args.device != "cuda":
        return
    found = run.state.setdefault("graphs", {})
    tasks = (
        ("CUDA graph", graph_replays, ()),
        ("torch.compile", compiled_agrees, (None,)),
        ("torch.compile, CUDA graphs", compiled_agrees, ("reduce-overhead",)),
    )
    for (what, task, mode), backend in product(tasks, args.backend.split(",")):
        name = f"{what}, {backend}"
        if found.get(name) != "equal" and run.left > 5:
            answer = run_once(task, backend, args.device, *mode, limit=min(90.0, run.left))
            found[name] = answer.get("result") or answer["error"]
            print(f"{name}: {found[name]}", flush=True)
            run.save()


def steps(run: Run) -> None:
    """Training steps of whole models."""
    args, found = run.args, run.state.setdefault("steps", {})
    modes = MODES if args.device == "cuda" else MODES[:1]
    for mode, (name, batch), layout in product(modes, MODELS, LAYOUTS):  # compiling takes minutes
        key = f"{name} {batch}, {layout}, {mode}"
        sequence = name == "mamba" and layout == "channels_last"  # it has no memory format
        if "stock" not in found.get(key, {}) and run.left > 5 and not sequence:
            asked = name, 2 if args.dry_run else batch, layout, mode, args.device
            found[key] = run_once(training_step, *asked, limit=min(240.0, run.left))
            print(key, found[key], flush=True)
            run.save()


def missing(run: Run, problem: ConvProblem, backend: str) -> list[str]:
    """What has not been measured of a problem with a backend."""
    key = (str(problem), backend)
    there = {row["what"] for row in run.state["rows"] if (row["text"], row["backend"]) == key}
    return [what for what in WHAT if what not in there]


def rows(run: Run) -> None:
    """The table, row after row; some time is kept for the graphs."""
    args = run.args
    kept = 120.0 if args.device == "cuda" and "graphs" in args.stages else 0.0
    todo = [(*some, what) for some in run.table for what in missing(run, *some)]
    with Worker() as worker:
        for problem, backend, what in todo:
            limit = min(_ROW_LIMIT, run.left - kept)
            if limit < 3:
                print("The time is up; the rest was not measured.")
                return
            answer = worker.run(measure, str(problem), what, backend, args.device, args.row_seconds, limit=limit)
            flops, least = least_work(problem, SWEEP if what == "backward" else (what,))
            row = {
                "problem": problem.name, "text": str(problem), "what": what, "backend": backend, "times": {},
                "dtype": str(problem.dtype).removeprefix("torch."), "bytes": least, "flops": flops, **answer,
            }  # fmt: skip
            run.state["rows"].append(row)
            run.save()
            print(line(row, run.state["card"]), flush=True)


STAGES: dict[str, Callable[[Run], None]] = {
    "card": card_of, "verdicts": decided, "host": hosted, "conformance": conformance, "compiled": compiled,
    "rows": rows, "graphs": graphs, "steps": steps, "sanitized": sanitized,
}  # fmt: skip


def main() -> int:
    args = arguments()
    available = torch.accelerator.is_available() and torch.accelerator.device_count()
    if args.device != "cpu" and not available:
        print("There is no GPU here: nothing was measured.")
        return 2
    # Not in the results' folder, which is copied about; workers and their children inherit it.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "convgrad-triton-cache"))
    os.environ.setdefault("CONVGRAD_CACHE", "off")  # what an earlier run decided would not be timed again
    run = Run(args)
    print(run.state["conditions"], platform.platform(), sep="; ", flush=True)
    run.resume()
    for stage in (STAGES[name] for name in STAGES if name in args.stages.split(",")):
        begun = time.monotonic()
        try:
            stage(run)
        except Exception as error:  # what was found so far is worth more than a traceback
            run.state.setdefault("stages", {})[stage.__name__] = short(error)
            print(f"{stage.__name__}: {short(error)}", flush=True)
        run.save()
        print(f"[{stage.__name__}: {time.monotonic() - begun:.0f} s]", flush=True)
    print(report(run.state))
    return 1 if broken(run.state) else 0


def broken(state: dict[str, Any]) -> bool:
    """Whether anything failed; what was not reached in time did not."""
    stages = [failures(state.get(name, {})) for name in ("compiled", "conformance", "sanitized")]
    graphs_differ = any(result != "equal" for result in state.get("graphs", {}).values())
    steps_failed = any(
        "error" in call for stage in ("steps", "verdicts", "host") for call in state.get(stage, {}).values()
    )
    return bool(
        any(stages) or graphs_differ or steps_failed or state.get("stages") or any("error" in r for r in state["rows"])
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=570.0, help="for everything")
    parser.add_argument("--row-seconds", type=float, default=0.12, help="of timing, for one row")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--device", default="xpu" if hasattr(torch, "xpu") and torch.xpu.is_available() else "cuda")
    parser.add_argument("--backend", default="triton,triton:banded", help="names; each takes the problems that it can")
    parser.add_argument("--stages", default=",".join(list(STAGES)[:-2]), help="of " + ", ".join(STAGES))
    parser.add_argument("--only", default="", help="words, one of which a problem's name holds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--fresh", action="store_true", help="do not go on from what is in DIR")
    parser.add_argument("--dry-run", action="store_true", help="tiny problems on the CPU, by the reference")
    args = parser.parse_args()
    if args.dry_run:
        args.device, args.row_seconds = "cpu", 0.01
        if os.environ.get("TRITON_INTERPRET") != "1":
            args.backend = "reference"
    if strange := [name for name in args.stages.split(",") if name not in STAGES]:
        parser.error(f"no stage is called {strange[0]!r}; there are {', '.join(STAGES)}")
    unknown = [name for name in args.backend.split(",") if name not in backends()]
    if unknown:
        parser.error(f"no backend is called {unknown[0]!r}; there are {', '.join(backends())}")
    return args


if __name__ == "__main__":
    sys.exit(main())
