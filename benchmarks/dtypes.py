"""Depthwise convolutions on the CPU: our kernels for bfloat16, float16 and float64 against our own for float32.

The problems are those of the table in ``cpu.py``. All dtypes are timed alternately in one process, each call after a
rest, and keep freed memory; the fastest calls are compared.

    OMP_PROC_BIND=true OMP_PLACES=cores nice -n -10 python benchmarks/dtypes.py --threads 4 --layout channels_last
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from cpu import ASKED, TABLE, layouts
from torch import Tensor

from convgrad.backends.native import NativeBackend
from convgrad.engine.ab_timer import conditions, keep_memory
from convgrad.problem import ConvProblem, Output

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Ours:
    """One call of the compiled kernels, on operands of its own."""

    def __init__(self, problem: ConvProblem, asked: tuple[Output, ...]) -> None:
        self.asked, self.kernel = asked, NativeBackend().bind(problem, asked)

        def operand(shape: tuple[int, ...]) -> Tensor:
            return torch.randn(shape).to(problem.dtype).contiguous(memory_format=problem.memory_format)

        shapes = {"input": problem.input_shape, "weight": problem.weight_shape, "grad_output": problem.output_shape}
        self.tensors = {slot: operand(shape) for slot, shape in shapes.items()}

    def __call__(self) -> None:
        x, w, g = self.tensors.values()
        if len(self.asked) > 1:
            self.kernel(g, x, w)
            return
        a, b = {"forward": (x, w), "grad_input": (g, w), "grad_weight": (g, x)}[self.asked[0]]
        self.kernel(a, b)


def ratios(problem: ConvProblem, asked: tuple[Output, ...], rounds: int) -> dict[str, float]:
    """Each dtype's fastest call over float32's."""
    calls = {name: Ours(problem.replace(dtype=getattr(torch, name)), asked) for name in DTYPES}
    samples: dict[str, list[float]] = {name: [] for name in DTYPES}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(0.002)
            start = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - start)
    fastest = {name: min(took[1:]) for name, took in samples.items()}
    return {name: took / fastest["float32"] for name, took in fastest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], help="only this one")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_memory()
    print(f"{conditions()}. Times as long as our own float32, the smaller the better.")
    for layout, problems in layouts([ConvProblem.parse(text) for text in TABLE], arguments.layout or "both"):
        seen: dict[str, list[float]] = {name: [] for name in DTYPES[1:]}
        print(f"\n## {layout}\n\n| problem | | " + " | ".join(seen) + " |\n|---|---|" + "---|" * len(seen))
        for problem in problems:
            for name, asked in ASKED.items():
                found = ratios(problem, asked, max(2, arguments.rounds))
                cells = [f"{found[dtype]:.2f}" for dtype in seen]
                print(f"| `{problem}` | {name} | " + " | ".join(cells) + " |", flush=True)
                for dtype, values in seen.items():
                    values.append(found[dtype])
        means = [f"{statistics.geometric_mean(values):.2f} / {max(values):.2f}" for values in seen.values()]
        print("| geometric mean / worst | | " + " | ".join(means) + " |")


if __name__ == "__main__":
    main()
