"""A tiny problem with an exact answer, run before a kernel is trusted on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...problem import ConvProblem, Output, Pass
from ..base import Kernel
from ..reference import ReferenceBackend
from .ways import Way, tiny

__all__ = ["first_fault"]


def integers(problem: ConvProblem, slot: str, seed: int) -> Tensor:
    """Small integers: every sum of their products is exact in every dtype that accumulates in float32."""
    shape = problem.shape_of(slot)  # pyright: ignore[reportArgumentType]
    values = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    tensor = values.to(problem.dtype)
    return tensor if slot == "weight" else tensor.contiguous(memory_format=problem.memory_format)


def first_fault(
    what: str,
    dtype: torch.dtype,
    way: Way,
    device: torch.device,
    problem: ConvProblem | None = None,
    bound: Callable[[ConvProblem, tuple[Output, ...]], Kernel] | None = None,
) -> str | None:
    """What is wrong with the kernels behind a pass (or ``"sweep"``) on a device, or None.

    Args:
        problem: with an exact answer, if it is not the tiny one of the way.
        bound: gives the kernel of a pass, if it is not that of the backend ``triton``.
    """
    from . import _bound

    problem = problem or tiny(what, dtype, way)
    here = {slot: integers(problem, slot, seed) for seed, slot in enumerate(("input", "weight", "grad_output"))}
    if way.sequence:
        here = {slot: t if slot == "weight" else t.mT.contiguous().mT for slot, t in here.items()}
    there = {slot: tensor.to(device) for slot, tensor in here.items()}
    reference = ReferenceBackend()

    def expect(pass_: Pass) -> Tensor:
        first, second = _OPERANDS[pass_]
        return reference.bind(problem, (pass_,))(here[first], here[second])

    outputs: tuple[Output, ...] = ("grad_input", "grad_weight") if what == "sweep" else (cast(Output, what),)
    try:
        if what == "sweep":
            sweep = _bound(problem, outputs, fixed_tiles=True, wide=way.wide)
            got = sweep(there["grad_output"], there["input"], there["weight"], None)
        else:
            first, second = _OPERANDS[what]
            made = bound or partial(_bound, fixed_tiles=True, wide=way.wide)
            run = made(problem, outputs)  # nothing is tuned for a tiny problem
            got = (run(there[first], there[second], None, None),)
        answers = [tensor.cpu() for tensor in got]
    except Exception as error:  # whatever the compiler or the driver raises: this backend must not be used
        return f"its {what} kernel failed on {device}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for output, answer in zip(outputs, answers, strict=True):
        expected = expect(cast(Pass, output))
        wrong = int((answer != expected).sum())
        if wrong:
            return (
                f"its {what} kernel is wrong on {device}: {wrong} of {expected.numel()} elements of {output} differ "
                f"for {problem}"
            )
    return None


_OPERANDS: dict[str, tuple[str, str]] = {
    "forward": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
