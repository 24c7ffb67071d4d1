"""Weight gradients of each sample and their norms: time, and memory beyond the operands, of every way there is.

    python benchmarks/per_sample.py --threads 1

The ways are timed alternately in one process, after a check that all give the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from torch.profiler import ProfilerActivity, profile

import convgrad
from convgrad.engine.ab_timer import compare, conditions, keep_memory

# samples, channels in and out, groups, height and width, kernel
PROBLEMS = (
    (32, 64, 64, 64, 28, 3),
    (32, 128, 128, 128, 14, 5),
    (32, 16, 32, 1, 28, 3),
    (32, 64, 64, 1, 14, 3),
    (16, 256, 256, 1, 7, 3),
)


def ways(n: int, c_in: int, c_out: int, groups: int, size: int, kernel: int) -> dict[str, Callable[[], Tensor]]:
    x, g = torch.randn(n, c_in, size, size), torch.randn(n, c_out, size, size)
    w = torch.randn(c_out, c_in // groups, kernel, kernel)
    form: dict[str, Any] = {"padding": kernel // 2, "groups": groups}

    def loss(weight: Tensor, image: Tensor, grad_output: Tensor, conv: Callable[..., Tensor]) -> Tensor:
        return (conv(image[None], weight, **form)[0] * grad_output).sum()

    def unfold() -> Tensor:
        rows = F.unfold(x, kernel, padding=kernel // 2).unflatten(1, (groups, -1))  # [N, g, ci * k * k, T]
        return (g.flatten(2).unflatten(1, (groups, -1)) @ rows.mT).view(n, *w.shape)

    one = lambda image, g: convgrad.grad_weight(image[None], w.shape, g[None], **form)  # noqa: E731
    return {
        "grad_weight(per_sample=True)": lambda: convgrad.grad_weight(x, w.shape, g, **form, per_sample=True),
        "vmap(grad_weight)": lambda: vmap(one)(x, g),
        "vmap(grad(loss)), convgrad": lambda: vmap(grad(loss), (None, 0, 0, None))(w, x, g, convgrad.conv2d),
        "vmap(grad(loss)), PyTorch": lambda: vmap(grad(loss), (None, 0, 0, None))(w, x, g, F.conv2d),
        "unfold and a matrix product": unfold,
        "per_sample_norms": lambda: convgrad.per_sample_norms(x, w.shape, g, **form),
    }


def peak(call: Callable[[], object]) -> float:
    """The most megabytes that a call holds at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    every: list[Any] = profiled.profiler.kineto_results.events()
    events = [e for e in every if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    names = ("samples", "in", "out", "groups", "size", "kernel")
    for problem in PROBLEMS:
        calls = ways(*problem)
        *gradients, norms = calls.values()
        first = gradients[0]()
        for other in gradients[1:]:
            torch.testing.assert_close(other(), first, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(norms(), first.flatten(1).norm(dim=1), rtol=1e-3, atol=1e-3)
        times = compare(calls, baseline="vmap(grad(loss)), PyTorch", seconds=options.seconds)
        print(", ".join(f"{name} {value}" for name, value in zip(names, problem, strict=True)))
        for name, call in calls.items():
            ratio = "" if name == times.baseline else f"{times.speedup(name)!s:>22}"
            print(f"  {name:30} {1000 * times.median(name):8.2f} ms {peak(call):8.2f} MB {ratio}")
    print(conditions())


if __name__ == "__main__":
    main()
