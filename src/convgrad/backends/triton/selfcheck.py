"""A tiny problem with an exact answer, run before a kernel is trusted on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...problem import ConvProblem, Output, Pass
from ..reference import ReferenceBackend

__all__ = ["first_fault", "tiny"]


def tiny(dtype: torch.dtype, channels_last: bool, strided: bool, kernel: tuple[int, int] = (3, 3)) -> ConvProblem:
    """Odd sizes, more rows and channels than one tile has, uneven padding."""
    size, stride = (19, 37), (2, 2) if strided else (1, 1)
    padding = ((1, 1), (2, 0))
    out = tuple((n + sum(pad) - k) // s + 1 for n, pad, k, s in zip(size, padding, kernel, stride, strict=True))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return ConvProblem(2, 5, 5, 5, size, kernel, stride, padding, (1, 1), out, dtype, layout)


def integers(problem: ConvProblem, slot: str, seed: int) -> Tensor:
    """Small integers: every sum of their products is exact in every dtype that accumulates in float32."""
    shape = problem.shape_of(slot)  # pyright: ignore[reportArgumentType]
    values = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    tensor = values.to(problem.dtype)
    return tensor if slot == "weight" else tensor.contiguous(memory_format=problem.memory_format)


def first_fault(
    what: str,
    dtype: torch.dtype,
    channels_last: bool,
    strided: bool,
    device: torch.device,
    kernel: tuple[int, int] = (3, 3),
    bound: Callable[[ConvProblem, Pass], Callable[..., Tensor]] | None = None,
) -> str | None:
    """What is wrong with the kernels behind a pass (or ``"sweep"``) on a device, or None.

    Args:
        kernel: of the tiny problem.
        bound: gives a pass as a function of (a, b, bias, workspace), if it is not that of the backend ``triton``.
    """
    from . import _bound, _bound_sweep

    problem = tiny(dtype, channels_last, strided, kernel)
    here = {slot: integers(problem, slot, seed) for seed, slot in enumerate(("input", "weight", "grad_output"))}
    there = {slot: tensor.to(device) for slot, tensor in here.items()}
    reference = ReferenceBackend()

    def expect(pass_: Pass) -> Tensor:
        first, second = _OPERANDS[pass_]
        return reference.run(problem, pass_, here[first], here[second])

    outputs: tuple[Output, ...] = ("grad_input", "grad_weight") if what == "sweep" else (cast(Output, what),)
    try:
        if what == "sweep":
            sweep = _bound_sweep(problem, outputs, fixed_tiles=True)
            got = sweep(there["grad_output"], there["input"], there["weight"], None)
        else:
            first, second = _OPERANDS[what]
            made = bound or partial(_bound, fixed_tiles=True)
            run = made(problem, cast(Pass, what))  # nothing is tuned for a tiny problem
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
