"""What `takeover` adds to one call: a one-element convolution, stock and taken over in alternation.

    python benchmarks/takeover.py [--seconds 2]

PyTorch's own kernel computes in each case. The first column is stock, the second the same call inside
`takeover()`, the third inside `takeover()` with every call watched, as ``convgrad run`` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from convgrad.engine.timing import compare, conditions, keep_memory
from convgrad.models import Usage, takeover

#: name -> (whether gradients are wanted, whether they are computed)
CASES = {
    "forward, no grad": (False, False),
    "forward, with grad": (True, False),
    "forward + backward": (True, True),
}
CALLS = 200  # a block opens and closes around that many


def call(grad: bool, backward: bool) -> Callable[[], object]:
    x = torch.ones(1, 1, 1, 1, requires_grad=grad)
    weight = torch.ones(1, 1, 1, 1, requires_grad=grad)
    if not backward:
        return lambda: torch.conv2d(x, weight)
    one = torch.ones(1, 1, 1, 1)
    return lambda: torch.autograd.grad(torch.conv2d(x, weight), (x, weight), one)


def inside(block: Callable[[], AbstractContextManager[object]], one: Callable[[], object]) -> Callable[[], None]:
    def many() -> None:
        with block():
            for _ in range(CALLS):
                one()

    return many


def watched() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(Usage())
    stack.enter_context(takeover())
    return stack


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one element: a second thread could only wait
    keep_memory()
    print("| one-element convolution | stock, us | takeover, us | adds, us | watched, us | adds, us |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, case in CASES.items():
        one = call(*case)
        blocks = {"stock": nullcontext, "takeover": takeover, "watched": watched}
        seen = compare({n: inside(b, one) for n, b in blocks.items()}, "stock", seconds=args.seconds)
        stock, taken, watch = (seen.median(n) / CALLS * 1e6 for n in blocks)
        print(f"| {name} | {stock:.1f} | {taken:.1f} | {taken - stock:.1f} | {watch:.1f} | {watch - stock:.1f} |")
    print(f"\n{conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
