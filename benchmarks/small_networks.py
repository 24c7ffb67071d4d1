"""Training steps of small networks, of stock PyTorch, under `takeover` and accelerated, in alternation.

    python benchmarks/small_networks.py [NETWORK ...] [--threads 1] [--seconds 10]

Each figure is the speedup over stock in the same layout, with its interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import networks
import torch

import convgrad
from convgrad.engine.ab_timer import compare, conditions, keep_memory

NETWORKS = ("discriminator", "resnet20", "tcn", "lenet", "mobilenet_v2_small", "tower", "squeezenet")


def step_of(name: str, layout: torch.memory_format, kind: str) -> Callable[[], None]:
    """Return a training step of a network, which begins with the same weights each time."""
    torch.manual_seed(0)
    model, x = getattr(networks, name)()
    if x.dim() == 4:
        model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    if kind == "accelerate_":
        convgrad.accelerate_(model)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def taken_over() -> None:
        with convgrad.takeover():
            step()

    return taken_over if kind == "takeover" else step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="per network and layout")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    print("| network | layout | stock, ms | takeover() | accelerate_ |\n|---|---|---:|---:|---:|")
    for name in args.networks:
        for layout in (torch.contiguous_format, torch.channels_last):
            if name == "tcn" and layout == torch.channels_last:
                continue  # sequences
            kinds = {kind: step_of(name, layout, kind) for kind in ("takeover", "accelerate_", "stock")}
            seen = compare(kinds, "stock", seconds=args.seconds)
            ratios = [seen.speedup(kind) for kind in ("takeover", "accelerate_")]
            cells = [f"{r.value:.2f}x [{r.low:.2f}, {r.high:.2f}]" for r in ratios]
            layout_name = str(layout).removeprefix("torch.").removesuffix("_format")
            print(f"| {name} | {layout_name} | {seen.seconds('stock') * 1e3:.1f} | {' | '.join(cells)} |", flush=True)
    print(f"\n{conditions()}")


if __name__ == "__main__":
    main()
