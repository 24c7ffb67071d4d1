"""Our GPU kernels in one call, under eight minutes: conformance on the device, then ours against PyTorch.

    python benchmarks/gpu.py [--seconds 450] [--workers 12] [--out DIR] [--only mobilenet,mamba]

1. Worker processes run the conformance suite on the device, and then every kernel of the table once: each compiles
   what it runs into Triton's cache on disk.
2. Every call of the table is compared with PyTorch's float32 result on small integers, which must be equal, and then
   timed against PyTorch as given (NCHW) and in channels_last with cudnn.benchmark, alternately, behind a flushed cache.
3. The bars: bytes against the card's copy bandwidth, products against its float32 peak, speed against PyTorch.

Everything goes to gpu.md and gpu.json in DIR (--out, default: benchmarks/results), written anew after every row, so
that a run that is cut off keeps what it has. ``--device cpu --backend reference`` tries the script itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convgrad.backends.base import Backend
from convgrad.engine.check import check_backend
from convgrad.engine.problems import default_problems
from convgrad.engine.registry import get
from convgrad.engine.timing import compare, conditions
from convgrad.problem import OPERANDS, ConvProblem

#: Where the depthwise layers of these models are, with batches that a training step on one card has.
PROBLEMS = """
g32ic32oc32mb32ih112kh3ph1n"mobilenet 112"
g96ic96oc96mb32ih112kh3sh2ph1n"mobilenet 112 s2"
g144ic144oc144mb32ih56kh3ph1n"mobilenet 56"
g192ic192oc192mb32ih28kh3ph1n"mobilenet 28"
g576ic576oc576mb32ih14kh3ph1n"mobilenet 14"
g960ic960oc960mb32ih7kh3ph1n"mobilenet 7"
g144ic144oc144mb32ih56kh5sh2ph2n"efficientnet 56 k5 s2"
g240ic240oc240mb32ih28kh5ph2n"efficientnet 28 k5"
g672ic672oc672mb32ih14kh5ph2n"efficientnet 14 k5"
g96ic96oc96mb64ih56kh7ph3n"convnext 56"
g192ic192oc192mb64ih28kh7ph3n"convnext 28"
g384ic384oc384mb64ih14kh7ph3n"convnext 14"
g768ic768oc768mb64ih7kh7ph3n"convnext 7"
g1024ic1024oc1024mb32ih7kh13ph6n"replknet 7 k13"
g384ic384oc384mb32ih32kh31ph15n"replknet 32 k31"
g1536ic1536oc1536mb1iw8192ow8192kw4pw3n"mamba N1 long"
g1536ic1536oc1536mb8iw2048ow2048kw4pw3n"mamba N8"
g54ic54oc54mb8id16ih56iw56kd3kh3kw3pd1ph1pw1n"x3d 56"
g108ic108oc108mb8id16ih28iw28kd3kh3kw3pd1ph1pw1n"x3d 28"
g108ic108oc108mb8id16ih56iw56kd3kh3kw3pd1ph1pw1sd1sh2sw2n"x3d 56 s2"
""".strip().splitlines()
DTYPES = (torch.float32, torch.bfloat16)
WHAT = ("forward", "grad_input", "grad_weight", "backward")
SWEEP = ("grad_input", "grad_weight")


# ---- what is called --------------------------------------------------------------------------------


def channels_last(problem: ConvProblem) -> ConvProblem:
    return problem.replace(memory_format=torch.channels_last if problem.ndim == 2 else torch.channels_last_3d)


def operands(problem: ConvProblem, device: torch.device, integers: bool) -> dict[str, Tensor]:
    """A tensor for each slot, in the problem's layout."""
    made: dict[str, Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    for slot in ("input", "weight", "grad_output"):
        shape = problem.shape_of(slot)
        if integers:
            values = torch.randint(-1, 2, shape, generator=generator, device=device).to(problem.dtype)
        else:
            values = torch.randn(shape, generator=generator, device=device).to(problem.dtype)
        made[slot] = values if slot == "weight" else values.contiguous(memory_format=problem.memory_format)
    return made


def ours(
    backend: Backend, problem: ConvProblem, what: str, given: dict[str, Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    """Our call; ``backward`` is one sweep where there is one, else both passes."""
    device = given["input"].device
    if what == "backward":
        if SWEEP in backend.sweeps and not backend.reasons_against(problem, SWEEP, device):
            sweep = backend.bind_sweep(problem, SWEEP)
            return lambda: sweep(given["grad_output"], given["input"], given["weight"], None)
        calls = [ours(backend, problem, one, given) for one in SWEEP]
        return lambda: (*calls[0](), *calls[1]())
    run = backend.bind(problem, what)  # type: ignore[arg-type]
    first, second = (given[slot] for slot in OPERANDS[what])  # type: ignore[index]
    return lambda: (run(first, second, None, None),)


def pytorch(problem: ConvProblem, what: str, given: dict[str, Tensor]) -> Callable[[], tuple[Tensor | None, ...]]:
    """PyTorch's call. A causal convolution is padded on both sides, as models write it, and cut for nothing."""
    padding = [max(low, high) for low, high in problem.padding]
    extra = [p - high for p, (_, high) in zip(padding, problem.padding, strict=True)]
    x, weight = given["input"], given["weight"]
    grad = (
        F.pad(given["grad_output"], [e for n in reversed(extra) for e in (0, n)])
        if any(extra)
        else given["grad_output"]
    )
    stride, dilation, groups = list(problem.stride), list(problem.dilation), problem.groups
    if what == "forward":
        conv = (F.conv1d, F.conv2d, F.conv3d)[problem.ndim - 1]
        cut = tuple(slice(0, n) for n in problem.output_size)
        return lambda: (conv(x, weight, None, stride, padding, dilation, groups)[(..., *cut)],)  # type: ignore[operator]
    mask = [what in ("grad_input", "backward"), what in ("grad_weight", "backward"), False]

    def run() -> tuple[Tensor | None, ...]:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            results = torch.ops.aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, [0] * problem.ndim, groups, mask
            )
        return tuple(r for r, wanted in zip(results, mask, strict=True) if wanted)

    return run


def layouts(problem: ConvProblem) -> dict[str, ConvProblem]:
    return {"NCHW": problem} if problem.ndim == 1 else {"NCHW": problem, "channels_last": channels_last(problem)}


# ---- in the workers --------------------------------------------------------------------------------


def conform(backend: str, text: str, device: str) -> tuple[str, int, list[str]]:
    """The conformance suite on one problem: checks passed, and what failed."""
    report = check_backend(get(backend), [text], device=device, repeats=5)
    return text, report.passed, [str(failure) for failure in report.failures]


def warm(backend: str, text: str, device: str) -> tuple[str, int, list[str]]:
    """Run every pass of one row of the table once, so that it is compiled."""
    problem = ConvProblem.parse(text)
    failures: list[str] = []
    given = operands(problem, torch.device(device), integers=True)
    for what in WHAT:
        try:
            ours(get(backend), problem, what, given)()
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {error}")
    return text, len(WHAT) - len(failures), failures


def in_parallel(
    task: Callable[..., tuple[str, int, list[str]]], texts: list[str], args: argparse.Namespace, until: float
) -> dict[str, Any]:
    """Run a task for every text in worker processes, and stop waiting when the time is up."""
    found: dict[str, Any] = {"passed": 0, "failures": [], "done": 0, "of": len(texts)}
    pool = concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn"))
    waiting = [pool.submit(task, args.backend, text, args.device) for text in texts]
    try:
        for future in concurrent.futures.as_completed(waiting, timeout=max(1.0, until - time.monotonic())):
            try:
                text, passed, failures = future.result()
                found["passed"] += passed
                found["failures"] += [f"{text}: {failure}" for failure in failures]
            except Exception as error:  # a worker that died says so, and the others go on
                found["failures"].append(f"a worker: {type(error).__name__}: {error}")
            found["done"] += 1
    except concurrent.futures.TimeoutError:
        pass
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
    return found


# ---- the card --------------------------------------------------------------------------------------


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read and written."""
    size = (1 << 30) if device.type != "cpu" else (1 << 26)
    a = torch.empty(size, dtype=torch.uint8, device=device).random_()
    b = torch.empty_like(a)
    return 2 * size / compare({"copy": lambda: b.copy_(a)}, device=device, seconds=0.5).median("copy")


def float32_peak(device: torch.device) -> float | None:
    """Products and sums per second of the CUDA cores at the highest clock; None where it is not known."""
    if device.type != "cuda" or torch.version.hip is not None or shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    if not answer or not answer[0].isdigit():
        return None
    return torch.cuda.get_device_properties(device).multi_processor_count * 128 * 2 * float(answer[0]) * 1e6


def moved(problem: ConvProblem, what: str) -> int:
    """Bytes that must be read and written."""
    n = {slot: math.prod(problem.shape_of(slot)) for slot in ("input", "weight", "grad_output")}
    both = n["input"] + n["weight"] if what == "backward" else 0
    return problem.dtype.itemsize * (sum(n.values()) + both)


# ---- one row ---------------------------------------------------------------------------------------


def measure(backend: Backend, problem: ConvProblem, what: str, seconds: float, device: torch.device) -> dict[str, Any]:
    """Check and time one call in every layout."""
    name = str(problem.dtype).removeprefix("torch.")
    row: dict[str, Any] = {"problem": problem.name, "text": str(problem), "dtype": name, "what": what, "times": {}}
    wide = operands(problem.replace(dtype=torch.float32), device, integers=True)
    expected = [r for r in pytorch(problem.replace(dtype=torch.float32), what, wide)() if r is not None]
    del wide
    calls: dict[str, Callable[[], object]] = {}
    slow = 0.0
    for layout, p in layouts(problem).items():
        given = operands(p, device, integers=True)
        got = ours(backend, p, what, given)()
        row["wrong"] = sum(int((g != e.to(p.dtype)).sum()) for g, e in zip(got, expected, strict=True))
        if row["wrong"]:
            return row
        given = operands(p, device, integers=False)
        calls[f"ours {layout}"] = ours(backend, p, what, given)
        calls[f"pytorch {layout}"] = pytorch(p, what, given)
        for key in (f"ours {layout}", f"pytorch {layout}"):
            calls[key]()
            slow = max(slow, once(calls[key], device))
    few = {"least_rounds": 2} if slow > 0.02 else {}
    seen = compare(calls, "pytorch NCHW", device=device, seconds=seconds, **few)
    row["times"] = {key: seen.median(key) for key in calls}
    row["speedup"] = str(seen.speedup("ours NCHW"))
    return row


def once(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def graph_replays(backend: Backend, device: torch.device) -> str:
    """Capture both gradients into a CUDA graph, replay it on other operands, compare."""
    problem = ConvProblem.parse("g32ic32oc32mb4ih28kh3ph1")
    given = operands(problem, device, integers=True)
    call = ours(backend, problem, "backward", given)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    given["input"].neg_()
    graph.replay()
    torch.cuda.synchronize()
    return "equal" if all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True)) else "WRONG"


# ---- the report ------------------------------------------------------------------------------------


def best(row: dict[str, Any], whose: str) -> float:
    return min(t for key, t in row["times"].items() if key.startswith(whose))


def mean(ratios: list[float]) -> str:
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x of {len(ratios)}" if ratios else "not measured"


def bars(rows: list[dict[str, Any]], card: dict[str, Any]) -> list[str]:
    """The bars, each with the figure that was measured for it."""
    timed = [r for r in rows if r["times"]]
    backward = [r["times"]["pytorch NCHW"] / r["times"]["ours NCHW"] for r in timed if r["what"] == "backward"]
    over_best = [best(r, "pytorch") / best(r, "ours") for r in timed]
    lines = [
        f"- backward over PyTorch's NCHW, geometric mean (bar 5x): {mean(backward)}",
        f"- over PyTorch's best layout, geometric mean (bar 1.3x): {mean(over_best)}",
        f"- over PyTorch's best layout, worst: {min(over_best, default=math.nan):.2f}x",
    ]
    large = [r["times"]["pytorch NCHW"] / r["times"]["ours NCHW"] for r in timed if "k31" in r["problem"]]
    lines.append(f"- 31x31 over nn.Conv2d, worst pass (bar 14x): {min(large, default=math.nan):.2f}x")
    for label, share, chosen in (
        ("up to 7x7: of 85 % of the copy bandwidth or 50 % of the float32 peak", 0.85,
         [r for r in timed if not any(w in r["problem"] for w in ("k13", "k31", "mamba"))]),
        ("conv1d: of 90 % of the copy bandwidth", 0.90, [r for r in timed if "mamba" in r["problem"]]),
    ):  # fmt: skip
        reached = [allowed(r, card, share) / best(r, "ours") for r in chosen]
        below = sum(x < 1 for x in reached)
        worst = min(reached, default=math.nan)
        lines.append(f"- {label}: geometric mean {mean(reached)}, worst {worst:.2f}, {below} below the bar")
    return lines


def allowed(row: dict[str, Any], card: dict[str, Any], share: float) -> float:
    """Seconds that the bar allows."""
    seconds = row["bytes"] / (share * card["copy bytes/s"])
    peak = card["float32 peak"]
    return max(seconds, row["flops"] / (0.5 * peak)) if peak else seconds


def report(state: dict[str, Any]) -> str:
    """The whole run as Markdown."""
    card, rows = state["card"], state["rows"]
    lines = ["# GPU", "", state["conditions"], ""]
    lines += [f"- {key}: {value}" for key, value in card.items()]
    for stage in ("conformance", "compiled"):
        found = state.get(stage)
        if found:
            lines.append(f"- {stage}: {found['passed']} passed, {len(found['failures'])} failed, "
                         f"{found['done']} of {found['of']} problems reached")  # fmt: skip
            lines += [f"  - {failure}" for failure in found["failures"][:20]]
    lines += ["", *bars(rows, card), ""]
    heads = ("problem", "dtype", "what", "ours NCHW us", "ours c.l. us", "PyTorch NCHW us", "PyTorch c.l. us")
    lines.append("| " + " | ".join((*heads, "GB/s", "of copy", "over best")) + " |")
    lines.append("|---" * 10 + "|")
    for row in rows:
        t = row["times"]
        if not t:
            lines.append(f"| {row['problem']} | {row['dtype']} | {row['what']} | {row.get('error', 'WRONG')} |||||||")
            continue
        cells = [f"{t[k] * 1e6:.1f}" if k in t else "-" for k in
                 ("ours NCHW", "ours channels_last", "pytorch NCHW", "pytorch channels_last")]  # fmt: skip
        rate = row["bytes"] / best(row, "ours")
        cells += [
            f"{rate * 1e-9:.0f}",
            f"{rate / card['copy bytes/s']:.2f}",
            f"{best(row, 'pytorch') / best(row, 'ours'):.2f}x",
        ]
        lines.append(f"| {row['problem']} | {row['dtype']} | {row['what']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=450.0, help="for everything")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "xpu")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--only", default="", help="words, one of which a problem's name holds")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cpu" and not (torch.accelerator.is_available() and torch.accelerator.device_count()):
        print("There is no GPU here: nothing was measured.")
        return 2
    begun = time.monotonic()
    words = [w for w in args.only.split(",") if w]
    wanted = [ConvProblem.parse(p) for p in PROBLEMS]
    wanted = [p for p in wanted if not words or any(w in p.name for w in words)]
    table = [p.replace(dtype=dtype) for dtype in DTYPES for p in wanted]

    state: dict[str, Any] = {"conditions": conditions(device), "rows": []}
    state["card"] = {"copy bytes/s": copy_bandwidth(device), "float32 peak": float32_peak(device)}

    def save() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gpu.json").write_text(json.dumps(state, indent=1, default=str))
        (args.out / "gpu.md").write_text(report(state))

    save()
    texts = [str(p) for problem in table for p in layouts(problem).values()]
    state["compiled"] = in_parallel(warm, texts, args, begun + 0.35 * args.seconds)
    save()
    small = [str(p) for p in default_problems() if p.in_channels == p.groups]
    state["conformance"] = in_parallel(conform, small, args, begun + 0.65 * args.seconds)
    save()
    backend = get(args.backend)
    if device.type == "cuda" and torch.version.hip is None:
        try:
            state["card"]["graph replay"] = graph_replays(backend, device)
        except Exception as error:
            state["card"]["graph replay"] = f"FAILED: {type(error).__name__}: {error}"
    for problem in table:
        for what in WHAT:
            if time.monotonic() - begun > args.seconds:
                print("The time is up; the rest was not measured.")
                break
            try:
                row = measure(backend, problem, what, 0.12, device)
            except Exception as error:
                row = {"problem": problem.name, "dtype": str(problem.dtype), "what": what, "times": {},
                       "error": f"{type(error).__name__}: {str(error)[:200]}"}  # fmt: skip
            row["bytes"], row["flops"] = moved(problem, what), problem.flops * (2 if what == "backward" else 1)
            state["rows"].append(row)
        save()
    print(report(state))
    broken = (
        state["conformance"]["failures"] or state["compiled"]["failures"] or any(not r["times"] for r in state["rows"])
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
