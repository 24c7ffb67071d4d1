"""Training steps of small networks, of stock PyTorch, under `takeover` and accelerated, in alternation.

    python benchmarks/small_networks.py [NETWORK ...] [--threads 1] [--seconds 10]

Each figure is the speedup over stock in the same layout, with its interval. Each turn is some 50 ms of steps, as in a
program that does nothing else: a single step finds the caches full of the other programs'.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from time import perf_counter

import networks
import torch

import convgrad
from convgrad.engine.measure import compare, conditions, keep_memory

NETWORKS = ("discriminator", "resnet20", "tcn", "lenet", "mobilenet_v2_small", "tower", "squeezenet", "diffusion")


TURN = 0.05  # seconds


def steps_of(name: str, layout: torch.memory_format, kind: str, autocast: bool) -> Callable[[int], None]:
    """Return a function that trains a network for some steps; it begins with the same weights for each kind."""
    torch.manual_seed(0)
    model, x = getattr(networks, name)()
    if x.dim() == 4:
        model, x = model.to(memory_format=layout), x.contiguous(memory_format=layout)
    if kind == "accelerate_":
        convgrad.accelerate_(model)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)

    def train(steps: int) -> None:
        with convgrad.takeover() if kind == "takeover" else nullcontext():
            for _ in range(steps):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(x).float().square().mean()
                loss.backward()
                optimizer.step()

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0, help="per network and layout")
    parser.add_argument("--autocast", action="store_true", help="in bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    print("| network | layout | stock, ms | takeover() | accelerate_ |\n|---|---|---:|---:|---:|")
    for name in args.networks:
        for layout in (torch.contiguous_format, torch.channels_last):
            if name == "tcn" and layout == torch.channels_last:
                continue  # sequences
            programs = {
                kind: steps_of(name, layout, kind, args.autocast) for kind in ("takeover", "accelerate_", "stock")
            }
            programs["stock"](5)
            begin = perf_counter()
            programs["stock"](5)
            steps = max(1, round(TURN / ((perf_counter() - begin) / 5)))
            seen = compare({k: partial(train, steps) for k, train in programs.items()}, "stock", seconds=args.seconds)
            ratios = [seen.speedup(kind) for kind in ("takeover", "accelerate_")]
            cells = [f"{r.value:.2f}x [{r.low:.2f}, {r.high:.2f}]" for r in ratios]
            layout_name = str(layout).removeprefix("torch.").removesuffix("_format")
            print(
                f"| {name} | {layout_name} | {seen.seconds('stock') / steps * 1e3:.1f} | {' | '.join(cells)} |",
                flush=True,
            )
    print(f"\n{conditions()}")


if __name__ == "__main__":
    main()
