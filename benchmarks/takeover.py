"""What `takeover` and `accelerate_` add to one call: a one-element convolution, stock and ours in alternation.

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

from convgrad.engine.ab_timer import Comparison, compare, conditions, keep_memory
from convgrad.models import Usage, accelerate_, takeover

#: name -> (whether gradients are wanted, whether they are computed)
CASES = {
    "forward, no grad": (False, False),
    "forward, with grad": (True, False),
    "forward + backward": (True, True),
}
CALLS = 500  # a block opens and closes around that many


def call(grad: bool, backward: bool) -> Callable[[], object]:
    x = torch.ones(1, 1, 1, 1, requires_grad=grad)
    weight = torch.ones(1, 1, 1, 1, requires_grad=grad)
    if not backward:
        return lambda: torch.conv2d(x, weight)
    one = torch.ones(1, 1, 1, 1)
    return lambda: torch.autograd.grad(torch.conv2d(x, weight), (x, weight), one)


def layer(accelerated: bool, backward: bool) -> Callable[[], object]:
    module = torch.nn.Conv2d(1, 1, 1, bias=False)
    if accelerated:
        accelerate_(module, only_gains=False)
    x = torch.ones(1, 1, 1, 1, requires_grad=True)
    if not backward:
        return lambda: module(x)
    one = torch.ones(1, 1, 1, 1)
    return lambda: torch.autograd.grad(module(x), (x, module.weight), one)


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


def cells(seen: Comparison, count: int) -> str:
    """The baseline in microseconds and what the others add to it: medians, then the fastest rounds.

    A busy machine makes a round slower, never faster: the fastest ones say what the code costs, medians what was felt.
    """
    found = []
    for us in (seen.median, lambda n: min(seen.samples[n])):
        stock = us(seen.baseline) / count * 1e6
        found += [f"{stock:.1f}", *(f"+{us(n) / count * 1e6 - stock:.1f}" for n in seen.samples if n != seen.baseline)]
    return " | ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one element: a second thread could only wait
    keep_memory()
    print(
        "| one-element convolution | stock, us | takeover | watched | fastest round: stock, us | takeover | watched |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, case in CASES.items():
        one = call(*case)
        blocks = {"stock": nullcontext, "takeover": takeover, "watched": watched}
        seen = compare({n: inside(b, one) for n, b in blocks.items()}, "stock", seconds=args.seconds)
        print(f"| {name} | {cells(seen, CALLS)} |")
    print("\n| one-element nn.Conv2d | stock, us | accelerated | fastest round: stock, us | accelerated |")
    print("|---|---:|---:|---:|---:|")
    for name, backward in {"forward, with grad": False, "forward + backward": True}.items():
        calls = {"stock": layer(False, backward), "accelerated": layer(True, backward)}
        seen = compare(calls, "stock", seconds=args.seconds)
        print(f"| {name} | {cells(seen, 1)} |")
    print(f"\n{conditions()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
