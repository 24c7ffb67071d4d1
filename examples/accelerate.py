"""A whole model through convgrad in three ways: in place, for a block, and as an unmodified script.

python examples/accelerate.py [--steps 5] [--size 64]
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import nn

import convgrad


def block(channels: int, out: int, stride: int) -> nn.Sequential:
    """An inverted residual as in MobileNetV2: widen, filter each channel, narrow."""
    wide = 4 * channels
    return nn.Sequential(
        nn.Conv2d(channels, wide, 1),
        nn.ReLU6(),
        nn.Conv2d(wide, wide, 7, stride=stride, padding=3, groups=wide),
        nn.ReLU6(),
        nn.Conv2d(wide, out, 1),
    )


def model() -> nn.Sequential:
    stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(stem, block(16, 24, 2), block(24, 32, 2), *head)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    """The loss after some steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return nn.functional.cross_entropy(net(x), y).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", type=int, default=64, help="height and width of the images")
    args = parser.parse_args()
    torch.manual_seed(0)
    stock = model()
    x, y = torch.randn(8, 3, args.size, args.size), torch.randint(0, 10, (8,))

    print("1. In place. What is replaced, what is not, and why:\n")
    net = copy.deepcopy(stock)
    report = convgrad.accelerate_(net, memory_format="channels_last", example_inputs=x)
    print(report, "\n")
    ours = train(net, x, y, args.steps)
    report.restore()
    assert type(net[0]) is nn.Conv2d

    print("2. For a block, whatever the code calls; and which kernels ran:\n")
    with convgrad.trace() as seen, convgrad.takeover():
        block_ours = train(copy.deepcopy(stock), x, y, 1)
    print("\n".join(sorted({f"{r.outputs:40} {r.backend}" for r in seen})), "\n")

    print("3. A script that knows nothing of it: convgrad run [--stock] train.py\n")
    print(f"loss after {args.steps} steps: {ours:.6f}, stock {train(copy.deepcopy(stock), x, y, args.steps):.6f}")
    print(f"loss after 1 step: {block_ours:.6f}, stock {train(copy.deepcopy(stock), x, y, 1):.6f}")


if __name__ == "__main__":
    main()
