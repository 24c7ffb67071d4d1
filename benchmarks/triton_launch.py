"""Host time of a call of the Triton kernels, with a driver that starts nothing: no GPU is needed, and none is measured.

    python benchmarks/triton_launch.py [--seconds 1]

Alternately: a call that goes to the compiled kernel it has kept, and the same call by way of Triton's own look-up of
the kernel, which inspects every argument. The driver's own work (some microseconds) is in neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from convgrad.backends.triton import TritonBackend, start
from convgrad.engine.ab_timer import compare, conditions
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output, Slot

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "backends" / "triton"))
from stubbed import install

_SWEEPS: dict[str, tuple[Output, ...]] = {
    "sweep": ("grad_input", "grad_weight"),
    "sweep+bias": ("grad_input", "grad_weight", "grad_bias"),
}


def bound(problem: ConvProblem, what: str) -> Callable[[], object]:
    """One call of the backend, as a plan makes it."""
    backend = TritonBackend()
    slots: tuple[Slot, ...] = ("input", "weight", "grad_output")
    given = {slot: torch.zeros(problem.shape_of(slot)) for slot in slots}
    for slot in ("input", "grad_output"):
        given[slot] = given[slot].contiguous(memory_format=problem.memory_format)
    outputs = _SWEEPS.get(what) or (cast(Output, what),)
    size = backend.workspace(problem, outputs)
    scratch = torch.empty(size, dtype=torch.uint8) if size else None
    kernel = backend.bind(problem, outputs)
    if what in PASSES:
        first, second = (given[slot] for slot in OPERANDS[what])
        return lambda: kernel(first, second, None, scratch)
    return lambda: kernel(given["grad_output"], given["input"], given["weight"], scratch)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    args = parser.parse_args()
    torch.set_num_threads(1)
    install(pytest.MonkeyPatch(), keeps=False)
    direct = start.Launch.again
    print("| call | layout | by way of Triton, us | kept kernel, us | |")
    print("|---|---|---:|---:|---|")
    for layout in ("", " channels_last"):
        problem = ConvProblem.parse("g8ic8oc8mb1ih8kh3ph1" + layout)
        for what in (*PASSES, *_SWEEPS):
            run = bound(problem, what)

            def kept(run: Callable[[], object] = run) -> None:
                type.__setattr__(start.Launch, "again", direct)
                run()

            def looked_up(run: Callable[[], object] = run) -> None:
                type.__setattr__(start.Launch, "again", lambda *_: False)
                run()

            seen = compare({"kept": kept, "looked up": looked_up}, "looked up", seconds=args.seconds)
            times = (f"{seen.median(name) * 1e6:.1f}" for name in ("looked up", "kept"))
            print("|", " | ".join((what, layout.strip() or "contiguous", *times, str(seen.speedup("kept")))), "|")
    print(f"\n{conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
