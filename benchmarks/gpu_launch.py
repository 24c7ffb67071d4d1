"""Host time of a call's launches on a machine without a GPU: Triton's launcher, and ours, onto a stand-in driver.

    python benchmarks/gpu_launch.py [PROBLEM]

The stand-in returns at once, so what is timed is all that comes before the driver. The first table is the launches
alone; the second one whole calls of `convgrad.conv2d` through the table of calls, on tensors of the CPU that nothing
reads, with torch.conv2d of one element beside them, in alternation. Needs a C++ compiler and Python's headers.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.standin_cuda import Driver, operand

import convgrad
from convgrad.backends.triton import TritonBackend, first_check
from convgrad.backends.triton.argument_block import SIZE, SLOTS, entry
from convgrad.engine.measure import keep_memory
from convgrad.problem import OPERANDS, ConvProblem, Outputs, Pass

PROBLEM = "g144ic144oc144mb32ih56kh3ph1"
WHAT: list[Outputs] = [("forward",), ("grad_weight",), ("grad_input", "grad_weight")]
_ROUNDS = 20000


def least(call: Callable[[], Any], rounds: int = 200) -> float:
    """Microseconds of a call, the least of many."""
    return min(timeit.repeat(call, number=1, repeat=rounds)) * 1e6


def row(driver: Driver, problem: ConvProblem, outputs: Outputs) -> list[Any]:
    """The outputs, their launches, and the microseconds of a whole call in Python and of ours."""
    backend, cpu = TritonBackend(), torch.device("cpu")
    names = OPERANDS[cast(Pass, outputs[0])] if len(outputs) == 1 else ("grad_output", "input", "weight")
    operands = {
        name: operand(
            problem.shape_of(name), problem.dtype,
            torch.contiguous_format if name == "weight" else problem.memory_format, True,
        )
        for name in names
    }  # fmt: skip
    size = backend.workspace(problem, outputs)
    scratch = torch.empty(size, dtype=torch.uint8) if size else None
    given = (*operands.values(), *([None] if len(operands) == 2 else []), scratch)
    run = backend.bind(problem, outputs)
    made = run(*given)
    results = dict(zip(outputs, made if isinstance(made, tuple) else (made,), strict=True))
    found = entry(backend._bound(problem, outputs, cpu), operands)
    assert found is not None
    tensors = [{**operands, **results}.get(name) for name in SLOTS] + [scratch]
    slots = (ctypes.c_void_p * len(tensors))(*[0 if t is None else t.data_ptr() for t in tensors])
    count = len(found.launches) // SIZE
    driver.reset(most=0)
    launch = ctypes.cast(driver.launcher.convgrad_cuda_launch, ctypes.c_void_p)

    def ours() -> float:
        return float(driver.library.standin_time(launch, found.launches, count, slots, _ROUNDS)) / 1e3

    return ["+".join(outputs), count, least(lambda: run(*given)), min(ours() for _ in range(20))]


def whole_calls(problem: ConvProblem) -> None:
    """Print the microseconds of a forward, and of a forward with both gradients, through the table of calls."""
    p = problem

    def calls(conv: Any, x: torch.Tensor, w: torch.Tensor, *rest: Any) -> dict[str, Callable[[], Any]]:
        g = conv(x, w, None, *rest).detach()
        return {
            "forward": lambda: conv(x.detach(), w.detach(), None, *rest),
            "forward and both gradients": lambda: torch.autograd.grad(conv(x, w, None, *rest), (x, w), g),
        }

    layout = p.memory_format
    x, w = (operand(p.shape_of(s), p.dtype, layout, True).requires_grad_() for s in ("input", "weight"))
    one = torch.ones(1, 1, 1, 1, requires_grad=True)
    padding = tuple(low for low, _ in p.padding)
    ours = calls(convgrad.conv2d, x, w, p.stride, padding, p.dilation, p.groups)
    stock = calls(torch.conv2d, one, one.detach().clone().requires_grad_())
    print(f"\n{'whole calls':<28} through the table, us   torch.conv2d of one element on the CPU, us")
    for name, call in ours.items():
        times = [(least(call, 50), least(stock[name], 50)) for _ in range(40)]
        print(f"{name:<28} {min(t for t, _ in times):>20.1f} {min(t for _, t in times):>42.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", default=PROBLEM)
    problem = ConvProblem.parse(parser.parse_args().problem)
    keep_memory()  # a GPU's allocator keeps what is freed, too
    torch.set_num_threads(1)
    first_check.fault = lambda *_: None  # nothing is computed
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(Path(folder))
        driver.take_calls()
        print(f"{'outputs':<24} launches   in Python, us   by cuda_launch.cpp, us")
        for outputs in WHAT:
            name, count, python, ours = row(driver, problem, outputs)
            print(f"{name:<24} {count:>8} {python:>15.1f} {ours:>24.3f}")
        whole_calls(problem)


if __name__ == "__main__":
    main()
