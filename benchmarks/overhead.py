"""What one call costs beyond its arithmetic: a one-element convolution, ours and torch.conv2d in alternation.

    python benchmarks/overhead.py [--seconds 2]

A bar is the largest ratio that we accept; the exit status is 1 where the whole interval lies above one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import convgrad
from convgrad.engine.ab_timer import compare, conditions, keep_memory

#: name -> (whether gradients are wanted, whether they are computed, bar)
CASES = {
    "forward, no grad": (False, False, 1.8),
    "forward, with grad": (True, False, 2.8),
    "forward + backward": (True, True, 2.0),
}


def call(conv: Callable[[Tensor, Tensor], Tensor], grad: bool, backward: bool) -> Callable[[], object]:
    x = torch.ones(1, 1, 1, 1, requires_grad=grad)
    weight = torch.ones(1, 1, 1, 1, requires_grad=grad)
    if not backward:
        return lambda: conv(x, weight)
    one = torch.ones(1, 1, 1, 1)
    return lambda: torch.autograd.grad(conv(x, weight), (x, weight), one)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one element: a second thread could only wait
    keep_memory()
    print("| one-element convolution | torch.conv2d, us | convgrad.conv2d, us | times as long | bar |  |")
    print("|---|---:|---:|---:|---:|---|")
    missed = False
    for name, (grad, backward, bar) in CASES.items():
        calls = {"ours": call(convgrad.conv2d, grad, backward), "torch": call(torch.conv2d, grad, backward)}
        assert all(
            torch.equal(*map(torch.as_tensor, pair)) for pair in zip(*(_flat(c()) for c in calls.values()), strict=True)
        )
        seen = compare(calls, "torch", seconds=args.seconds)
        times = seen.speedup("ours").inverse()
        verdict = "missed" if times.low > bar else "met" if times.high <= bar else "on the line"
        missed |= verdict == "missed"
        torch_us, ours_us = (f"{seen.seconds(n) * 1e6:.1f}" for n in ("torch", "ours"))
        ratio = f"{times.value:.2f} [{times.low:.2f}, {times.high:.2f}]"
        print(f"| {name} | {torch_us} | {ours_us} | {ratio} | {bar} | {verdict} |")
    print(f"\n{conditions()}")
    return int(missed)


def _flat(result: object) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # pyright: ignore


if __name__ == "__main__":
    sys.exit(main())
