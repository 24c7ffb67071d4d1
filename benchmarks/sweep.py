"""Random problems of the kinds that networks have, each computed in every way there is: the rules' source.

    python benchmarks/sweep.py benchmarks/results/sweep.csv --threads 1 2 4 --minutes 12

Each problem is measured as `convgrad tune` does it: every way is checked against the reference, then all are timed
alternately with their conversions, twice. A row holds the times of one pass relative to PyTorch's call as given, by how
much they may be wrong, and the commit that they are of. The numbers of threads take turns, each with problems of its
own, always the same ones but for --skip; what the file holds is not measured again.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from result_rows import CONDITIONS, Results, conditions_here, deadline, prepare

from convgrad._compat import channels_last_of, cpu_lacks
from convgrad.engine import backends, get_backend, measure_now, measurements, register
from convgrad.problem import PASSES, ConvProblem
from convgrad.problem.sizes import Dimension, fields_of, output_length

CPU = torch.device("cpu")
#: What is measured.
WAYS = (
    "aten", "native", "native:avx2", "native:amx", "native:winograd", "im2col", "aten:float32", "aten:channels_last",
    "aten:mkldnn",
)  # fmt: skip
#: ``noise`` is how far two measurements of a way are from their mean, in the logarithm; of the way where it is most.
COLUMNS = ("problem", "lacking", "pass", *WAYS, "noise", *CONDITIONS)
KEY = ("problem", "pass", "threads")
_LEAST_FLOPS, _MOST_FLOPS, _MOST_BYTES = 1e4, 2.5e8, 4e7
_VOLUME_FLOPS = 1e7, 1e9

# ---- problems ----------------------------------------------------------------------------------------

_CHANNELS = (16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 240, 256, 320, 384, 480, 512, 576, 672, 768, 960)
_IMAGES = (4, 5, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224)


def _size(rng: random.Random, ndim: int) -> int:
    if ndim == 1:
        return round(math.exp(rng.uniform(math.log(16), math.log(16384))))
    if ndim == 3:
        return rng.choice((4, 5, 7, 8, 14, 16, 20, 28, 32, 56))
    return rng.choice(_IMAGES) if rng.random() < 0.8 else rng.randint(3, 200)


def _wide(rng: random.Random) -> int:
    return rng.choice(_CHANNELS) if rng.random() < 0.8 else rng.randint(2, 500)


def _depthwise(rng: random.Random) -> dict[str, Any]:
    ndim = rng.choice((1, 2, 2, 2, 2, 2, 2, 3))
    kernels = {1: (3, 4, 4, 5, 7, 9, 31), 2: (3, 3, 3, 3, 5, 5, 7, 7, 9, 13, 31), 3: (3, 3, 3, 5)}[ndim]
    channels, multiplier = _wide(rng), rng.choice((1,) * 12 + (2, 3))
    stride, dilation = rng.choice((1, 1, 1, 2)), rng.choice((1,) * 9 + (2,))
    return {"ndim": ndim, "channels": (channels, channels * multiplier, channels), "kernel": rng.choice(kernels),
            "stride": stride, "dilation": dilation}  # fmt: skip


def _grouped(rng: random.Random) -> dict[str, Any]:
    ndim = rng.choice((1, 2, 2, 2, 2, 3))
    inputs = rng.choice((2, 3, 4, 4, 6, 8, 8, 12, 16, 16, 24, 32, 48, 64))
    outputs = inputs if rng.random() < 0.8 else rng.choice((1, 2, 4, 8, 12, 16, 32))
    groups = rng.choice((2, 4, 8, 16, 28, 32, 64))
    kernel = rng.choice((3, 5, 9, 64, 81, 128) if ndim == 1 else (3, 3, 3, 5, 1))
    return {"ndim": ndim, "channels": (groups * inputs, groups * outputs, groups), "kernel": kernel,
            "stride": rng.choice((1, 1, 1, 2)), "dilation": rng.choice((1,) * 9 + (2,))}  # fmt: skip


def _few(rng: random.Random) -> dict[str, Any]:
    """Dense, of few channels on one side at least: stems, heads, small networks."""
    few, other = rng.randint(1, 16), rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 16, 24, 32, 64))
    inputs, outputs = (few, other) if rng.random() < 0.6 else (other, few)
    kernel = rng.choice((1, 2, 3, 3, 3, 3, 4, 5, 7, 9))
    stride = rng.choice((1, 1, 1, 2, kernel))
    return {"ndim": rng.choice((1, 2, 2, 2, 2, 3)), "channels": (inputs, outputs, 1), "kernel": kernel,
            "stride": stride, "dilation": rng.choice((1,) * 9 + (2,)), "transposed": rng.random() < 0.1}  # fmt: skip


def _stem(rng: random.Random) -> dict[str, Any]:
    """The first layer of a network, whose images have few channels."""
    ndim = rng.choice((1, 2, 2, 2, 2, 2, 3))
    inputs, outputs = rng.choice((1, 1, 2, 3, 3, 3, 3, 4)), rng.choice((16, 24, 32, 32, 48, 64, 64, 96, 128))
    kernel, stride = rng.choice(((2, 2), (3, 1), (3, 1), (3, 2), (3, 2), (4, 4), (5, 1), (7, 2), (7, 4), (16, 16)))
    size = {1: 0, 2: rng.choice((28, 32, 56, 64, 96, 112, 128, 160, 224)), 3: rng.choice((16, 28, 32, 48))}[ndim]
    return {"ndim": ndim, "channels": (inputs, outputs, 1), "kernel": kernel, "stride": stride, "dilation": 1,
            "size": size}  # fmt: skip


def _dense(rng: random.Random) -> dict[str, Any]:
    ndim = rng.choice((1, 2, 2, 2, 2, 2, 3))
    kernel = rng.choice((1, 1, 1, 2, 3, 3, 3, 4, 5, 16))
    stride = rng.choice((1, 1, 1, 2, kernel))
    return {"ndim": ndim, "channels": (_wide(rng), _wide(rng), 1), "kernel": kernel, "stride": stride,
            "dilation": rng.choice((1,) * 9 + (2,)), "transposed": rng.random() < 0.1}  # fmt: skip


def _pointwise(rng: random.Random) -> dict[str, Any]:
    """The ends of a bottleneck: of its channels one has several times as many as the other."""
    narrow, ratio = rng.choice(_CHANNELS[:14]), rng.choice((1, 2, 4, 4, 6, 6))
    channels = (narrow, narrow * ratio, 1) if rng.random() < 0.5 else (narrow * ratio, narrow, 1)
    return {"ndim": rng.choice((1, 2, 2, 2, 2, 2, 3)), "channels": channels, "kernel": 1,
            "stride": rng.choice((1,) * 7 + (2,)), "dilation": 1}  # fmt: skip


def _shortcut(rng: random.Random) -> dict[str, Any]:
    """Beside a block of a residual network that halves the image."""
    channels, ratio, groups = rng.choice(_CHANNELS), rng.choice((1, 2, 2, 2, 4)), rng.choice((1, 1, 1, 1, 1, 2, 4))
    return {"ndim": rng.choice((1, 2, 2, 2, 2, 3)), "channels": (channels * groups, channels * ratio * groups, groups),
            "kernel": 1, "stride": rng.choice((2, 2, 2, 3)), "dilation": 1,
            "transposed": rng.random() < 0.1}  # fmt: skip


def _line(rng: random.Random) -> dict[str, Any]:
    """Kernels of one dimension: of sequences, of time, of images in turn along both."""
    ndim, channels = rng.choice((1, 1, 2, 2, 3)), rng.choice(_CHANNELS[:18])
    outputs = channels if rng.random() < 0.6 else rng.choice(_CHANNELS[:18])
    return {"ndim": ndim, "channels": (channels, outputs, 1), "kernel": rng.choice((3, 3, 3, 3, 5)), "stride": 1,
            "dilation": rng.choice((1,) * 5 + (2,)), "along": rng.randrange(ndim)}  # fmt: skip


def _volume(rng: random.Random) -> dict[str, Any]:
    """Of 3-D networks, one image: stems, small stages and ways up, which PyTorch computes without oneDNN."""
    kernel, stride = rng.choice(((3, 1), (3, 1), (3, 1), (3, 2), (2, 2), (4, 4), (5, 2)))
    one = rng.choice((1, 2, 3, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320))
    other = rng.choice((one, 2 * one, max(1, one // 2), 16, 32, 64))
    transposed = stride > 1 and rng.random() < 0.5
    most = 40 if transposed else math.isqrt(20480 // one)
    size = rng.choice([n for n in (4, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64) if n <= most])
    return {"ndim": 3, "channels": (one, other, 1), "kernel": kernel, "stride": stride, "dilation": 1,
            "transposed": transposed, "batch": 1, "size": size}  # fmt: skip


_KINDS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    *(_depthwise,) * 2, *(_grouped,) * 5, *(_few,) * 4, *(_dense,) * 3, *(_pointwise,) * 2,
    _volume, _stem, _shortcut, _line,
)  # fmt: skip
_DTYPES = (torch.float32,) * 6 + (torch.float16, torch.bfloat16, torch.float64)


def random_problem(number: int, threads: int = 1) -> ConvProblem:
    """The problem of a number: a kind in turn, the rest at random, of a size that takes little time."""
    rng, kind = random.Random(f"{threads} {number}"), _KINDS[number % len(_KINDS)]
    least, most = _VOLUME_FLOPS if kind is _volume else (_LEAST_FLOPS, _MOST_FLOPS)
    while True:
        p = _problem(rng, **kind(rng))
        if p and least <= p.flops <= most and p.least_bytes <= _MOST_BYTES:
            return p


def _problem(
    rng: random.Random,
    ndim: int,
    channels: tuple[int, int, int],
    kernel: int,
    stride: int,
    dilation: int,
    transposed: bool = False,
    batch: int = 0,
    size: int = 0,
    along: int | None = None,
) -> ConvProblem | None:
    size, extent = size or _size(rng, ndim), (kernel - 1) * dilation
    low = high = 0 if stride >= kernel else extent // 2
    if ndim == 1 and kernel <= 4:  # causal
        low, high = extent, 0
    output = output_length(size, kernel, stride, low, high, dilation)
    if output < 1:
        return None
    dims = [Dimension(size, output, kernel, stride, low, high, dilation)] * ndim
    if along is not None:
        dims = [dim if d == along else Dimension(size, size, 1, 1, 0, 0, 1) for d, dim in enumerate(dims)]
    layout = channels_last_of(ndim) if ndim > 1 and rng.random() < 0.5 else torch.contiguous_format
    return ConvProblem(
        batch or rng.choice((1, 1, 2, 4, 8, 8, 16, 32)), *channels,
        **fields_of(dims),
        dtype=rng.choice(_DTYPES), memory_format=layout, origin="transposed" if transposed else "plain",
    )  # fmt: skip


def rows(problem: ConvProblem) -> Iterator[dict[str, Any]]:
    """Each pass."""
    for pass_ in PASSES:
        found = [measure_now(problem, (pass_,), CPU, force=True) for _ in range(2)][-1]
        if found is not None and "aten" in found.times:
            pairs = [(t[0], t[-1]) for t in found.times.values()]
            noise = max(abs(math.log(a / b)) / 2 for a, b in pairs)
            times = {way: math.sqrt(a * b) for way, (a, b) in zip(found.times, pairs, strict=True) if way in WAYS}
            yield {"pass": pass_, **times, "noise": noise}


def keep_candidates() -> None:
    """In this process, measure these ways and nothing else."""
    for name, backend in backends().items():
        register(backend, candidate=name in WAYS, source="")


def main() -> int:
    names = {kind.__name__[1:]: number for number, kind in enumerate(_KINDS)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="where the rows go; what it holds already is not measured again")
    parser.add_argument("--threads", type=int, default=[1], nargs="+", help="in turn; one named twice gets more time")
    parser.add_argument("--minutes", type=float, default=5.0, help="then stop; 0 for no end")
    parser.add_argument("--only", choices=sorted(names), help="problems of one kind")
    parser.add_argument("--by", choices=WAYS, help="problems that this way computes")
    parser.add_argument("--skip", type=int, default=0, help="begin behind so many problems")
    parser.add_argument("--problems", type=int, default=0, help="stop after so many; 0 for no end")
    options = parser.parse_args()
    prepare(options.threads[0])
    results, end = Results(options.csv, COLUMNS, KEY, resume=True), deadline(options.minutes)
    keep_candidates()
    first, step = (names[options.only], len(_KINDS)) if options.only else (0, 1)
    where, numbers = conditions_here(), {t: count(first + options.skip * step, step) for t in options.threads}
    with tempfile.TemporaryDirectory() as folder:  # nothing that was measured before, and nothing stays
        os.environ["CONVGRAD_CACHE"] = folder
        measurements.reload()
        for done, threads in enumerate(cycle(options.threads)):
            if time.perf_counter() >= end or (options.problems and done >= options.problems):
                break
            torch.set_num_threads(threads)
            problem = random_problem(next(numbers[threads]), threads)
            missing = [p for p in PASSES if not results.done(problem=problem, threads=threads, **{"pass": p})]
            if not missing or (options.by and get_backend(options.by).reasons_against(problem, PASSES[:1], CPU)):
                continue
            fixed = {"problem": str(problem), "lacking": cpu_lacks(problem.dtype)}
            for row in rows(problem):
                if row["pass"] in missing:  # of a problem that was interrupted
                    results.add({**fixed, **row, **where, "threads": threads})
            print(f"\r{done + 1} problems", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
