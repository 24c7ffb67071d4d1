"""How a step scales over processes: a model of three numbers that are measured here, beside what is measured.

    python benchmarks/parallel.py                    1, 2, 4 and 8 processes, about two minutes

With P processes on a machine of C cores, q = max(1, P / C) of them share one. A step takes

    t(P) = q * (k / P + o) + bytes / s + collectives * l

where o is what is not shared out, the Python of a step: its time in one process where there is almost nothing to
compute; k, that of the kernels, is what a step in one process with one thread takes beyond it; bytes and collectives
are counted; and speed s and latency l are those of gloo's all-to-all between neighbors, measured with as many
processes. Left out is what an exchange copies, and that processes wait for the slowest of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from convgrad.parallel import shard_
from convgrad.tables import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from examples.sharded_unet import UNet  # noqa: E402
from tests.parallel.counting import Received  # noqa: E402
from tests.parallel.processes import Processes  # noqa: E402

WORKLOADS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "depthwise 3x3x3, 32 channels": (lambda: nn.Conv3d(32, 32, 3, padding=1, groups=32), 32),
    "dense 3x3x3, 16 channels": (lambda: nn.Conv3d(16, 16, 3, padding=1), 16),
    "U-Net of the example": (UNet, 1),
}
SIZE = (64, 48, 48)
LEAST = (8, 2, 2)  # positions with which there is almost nothing to compute


class Measured(NamedTuple):
    """What one process saw of a step: the seconds of each repetition, and what it received in one."""

    seconds: list[float]
    bytes: int
    collectives: int


def step(name: str, size: tuple[int, int, int], repetitions: int) -> Measured:
    """Forward and backward on shards of the first spatial dimension."""
    make, channels = WORKLOADS[name]
    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    model = shard_(make(), mesh, Shard(2))
    local = torch.randn(1, channels, size[0] // count, *size[1:])
    x = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)

    def once() -> None:
        y = model(x)
        y.backward(torch.ones_like(y))

    with Received() as received:
        once()
    return Measured(timed(once, repetitions), received.total, received.calls)


def timed(call: Callable[[], object], repetitions: int) -> list[float]:
    found = []
    for _ in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def link(repetitions: int) -> tuple[list[float], list[float], int]:
    """Seconds of exchanges of almost nothing, and of large ones, with each neighbor; the bytes of a large one."""
    from torch.distributed._functional_collectives import all_to_all_single

    group, rank, count = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    found = []
    size = 1 << 20
    for rows in (1, size):
        sent = [rows * (abs(other - rank) == 1) for other in range(count)]
        data = torch.zeros(sum(sent))
        found.append(timed(lambda data=data, sent=sent: all_to_all_single(data, sent, sent, group).add(1), repetitions))
    return found[0], found[1], 4 * sum(sent)


def slowest(found: Sequence[Sequence[float]]) -> float:
    """The median over repetitions of the time of the slowest process."""
    return statistics.median(max(times) for times in zip(*found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    n, cores, processes = options.repetitions, len(os.sched_getaffinity(0)), Processes()
    rows: list[tuple[str, ...]] = [
        ("step", "processes", "kernels", "Python", "received", "collectives", "link", "model", "measured",
         "model/measured")
    ]  # fmt: skip
    try:
        one = {
            name: [slowest([processes(1, step, name, size, n)[0].seconds]) for size in (LEAST, SIZE)]
            for name in WORKLOADS
        }
        for count in options.processes:
            shared, speed, latency = max(1.0, count / cores), float("inf"), 0.0
            if count > 1:
                seen = processes(count, link, n)
                latency, large = (slowest([s[i] for s in seen]) for i in (0, 1))
                speed = max(s[2] for s in seen) / max(large - latency, 1e-9)
                print(f"{count} processes on {cores} cores: {speed / 1e9:.2f} GB/s, {latency * 1e6:.0f} us", flush=True)
            for name, (least, alone) in one.items():
                found = processes(count, step, name, SIZE, n, seconds=300)
                size, calls = max(f.bytes for f in found), found[0].collectives if count > 1 else 0
                parts = shared * (alone - least) / count, shared * least, size / speed + calls * latency
                measured = slowest([f.seconds for f in found])
                times = [f"{1e3 * t:.1f} ms" for t in (*parts, sum(parts), measured)]
                counts = f"{size / 1e6:.2f} MB", str(calls)
                rows.append((name, str(count), *times[:2], *counts, *times[2:], f"{sum(parts) / measured:.2f}"))
    finally:
        processes.close()
    print(Table(rows[1:], {title: (itemgetter(i), "") for i, title in enumerate(rows[0])}).text())


if __name__ == "__main__":
    main()
