"""What one call costs beyond its arithmetic: tiny convolutions, ours and torch.conv2d in alternation, on one thread.

    python benchmarks/overhead.py [--seconds 2]

A bar is the largest ratio that is accepted; the exit status is 1 where the whole interval is above one. The last lines
are torch.conv2d itself, inside a `takeover` block and outside of it: the difference in microseconds, and the ratio.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.utils.benchmark
from torch import Tensor

import convgrad
from convgrad.engine.measure import Comparison, compare, conditions, keep_memory

Conv = Callable[..., Tensor]


class Case(NamedTuple):
    """A convolution, which of its operands require a gradient, and the bar."""

    channels: int
    image: int
    kernel: int
    wanted: str
    bar: float

    def call(self, conv: Conv) -> Callable[[], object]:
        """One step: the forward and, where a gradient is wanted, `Tensor.backward`."""
        x = torch.ones(1, self.channels, self.image, self.image, requires_grad="input" in self.wanted)
        weight = torch.ones(self.channels, 1, self.kernel, self.kernel, requires_grad="weight" in self.wanted)
        padding = self.kernel // 2
        if not self.wanted:
            return lambda: conv(x, weight, None, 1, padding, 1, self.channels)
        grad_output = torch.ones_like(x)

        def step() -> tuple[Tensor | None, Tensor | None]:
            x.grad = weight.grad = None
            conv(x, weight, None, 1, padding, 1, self.channels).backward(grad_output)
            return x.grad, weight.grad

        return step


CASES = {
    "dense, 1 element: forward": Case(1, 1, 1, "", 1.5),
    "dense, 1 element: forward and both gradients": Case(1, 1, 1, "input and weight", 1.2),
    "dense, 1 element: forward and the weight's gradient": Case(1, 1, 1, "weight", 1.2),
    "depthwise, 8 x 4x4: forward": Case(8, 4, 3, "", 0.15),
    "depthwise, 8 x 4x4: forward and both gradients": Case(8, 4, 3, "input and weight", 0.2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    args = parser.parse_args()
    torch.set_num_threads(1)  # a second thread could only wait
    keep_memory()
    print("| convolution | torch.conv2d, us | convgrad.conv2d, us | times as long | bar |  |")
    print("|---|---:|---:|---:|---:|---|")
    missed = False
    for name, case in CASES.items():
        calls = {"ours": case.call(convgrad.conv2d), "torch": case.call(torch.conv2d)}
        torch.testing.assert_close(*(call() for call in calls.values()), rtol=0, atol=0)
        seen = compare(calls, "torch", seconds=args.seconds)
        times = Comparison("ours", seen.samples).speedup("torch")
        verdict = "missed" if times.low > case.bar else "met" if times.high <= case.bar else "on the line"
        missed |= verdict == "missed"
        torch_us, ours_us = (f"{seen.seconds(n) * 1e6:.1f}" for n in ("torch", "ours"))
        ratio = f"{times.value:.2f} [{times.low:.2f}, {times.high:.2f}]"
        print(f"| {name} | {torch_us} | {ours_us} | {ratio} | {case.bar} | {verdict} |", flush=True)
    print("\n| torch.conv2d | alone, us | under takeover, us | difference | ratio |\n|---|---:|---:|---:|---:|")
    for name, case in CASES.items():
        alone, taken = _taken_over(case.call(torch.conv2d), args.seconds)
        print(f"| {name} | {alone:.1f} | {taken:.1f} | {taken - alone:+.1f} | {taken / alone:.2f} |", flush=True)
    print(f"\n{conditions()}")
    return int(missed)


def _taken_over(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Microseconds of a call alone and taken over: the least of many rounds."""
    timer = torch.utils.benchmark.Timer("call()", globals={"call": call})
    least = [float("inf")] * 2
    for _ in range(max(3, int(20 * seconds))):
        for i, block in enumerate((nullcontext, convgrad.takeover)):
            with block():
                timer.timeit(20)  # PyTorch looks every operator up again after a block was opened
                least[i] = min(least[i], timer.timeit(200).mean * 1e6)
    return least[0], least[1]


if __name__ == "__main__":
    sys.exit(main())
