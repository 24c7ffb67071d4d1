"""The first result of each compiled kernel, held to a computation in float64 on the CPU of a few of its elements.

A kernel that was right for one problem says nothing of another: other constants are another compiled kernel. So what is
looked at is what the caller gets: the first and the last image, where offsets are largest, of a few channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import OPERANDS, RESULT, ConvProblem, Output, Pass
from ..base import Arithmetic
from ..reference import ReferenceBackend

_REFERENCE = ReferenceBackend()
_ELEMENTS = 1 << 22  # of a sampled operand, at most: a larger problem is looked at in fewer images


def fault(
    problem: ConvProblem,
    outputs: tuple[Output, ...],
    operands: tuple[Tensor | None, ...],
    results: tuple[Tensor, ...],
    arithmetic: Arithmetic,
) -> str | None:
    """What is wrong with the results of a call, or None.

    Args:
        operands: (a, b, bias) of a pass, or (grad_output, input, weight) of several outputs.
    """
    for output, result in zip(outputs, results, strict=True):
        if output == "grad_bias":
            grad = operands[0]
            assert grad is not None
            exact = grad[:, :1].double().sum().cpu()
            wrong = _differs(result[:1].cpu(), exact.view(1), grad[:, :1].double().abs().sum().cpu(), "direct")
        else:
            if len(outputs) == 1:
                a, b, bias = operands
            else:
                given = dict(zip(("grad_output", "input", "weight"), operands, strict=True))
                a, b, bias = (*(given[slot] for slot in OPERANDS[output]), None)
            assert a is not None
            assert b is not None
            wrong = _sampled(problem, output, a, b, bias, result, arithmetic)
        if wrong:
            return f"its {output} kernel is wrong on {result.device}: {wrong} for {problem}"
    return None


def _sampled(
    p: ConvProblem, pass_: Pass, a: Tensor, b: Tensor, bias: Tensor | None, result: Tensor, arithmetic: Arithmetic
) -> str | None:
    """A pass of some channels and images alone: each channel is a problem of its own."""
    multiplier = p.out_channels // p.in_channels
    for channel in sorted({0, p.in_channels // 2, p.in_channels - 1}):
        inner = slice(channel, channel + 1)
        outer = slice(channel * multiplier, (channel + 1) * multiplier)
        images = torch.arange(p.batch) if pass_ == "grad_weight" else torch.tensor(sorted({0, p.batch - 1}))
        if pass_ == "grad_weight" and max(a[:, outer].numel(), b[:, inner].numel()) > _ELEMENTS:
            return None  # every image is part of each of its elements
        of = {"input": (images, inner), "grad_output": (images, outer), "weight": (slice(None), outer)}

        def part(slot: str, t: Tensor, of: dict[str, tuple[object, slice]] = of) -> Tensor:
            first, channels = of[slot]
            if slot == "weight":
                return t[channels].cpu().double()
            return t[:, channels][first.to(t.device)].cpu().double()  # pyright: ignore[reportAttributeAccessIssue]

        small = p.replace(
            **{"batch": len(images), "in_channels": 1, "groups": 1, "out_channels": multiplier},
            **{"dtype": torch.float64, "memory_format": torch.contiguous_format},
        )
        first, second = (part(slot, t) for slot, t in zip(OPERANDS[pass_], (a, b), strict=True))
        exact = _REFERENCE.bind(small, (pass_,))(first, second)
        size = _REFERENCE.bind(small, (pass_,))(first.abs(), second.abs())
        if bias is not None:
            added = bias[inner if pass_ == "grad_input" else outer].cpu().double().view(1, -1, *(1,) * p.ndim)
            exact, size = exact + added, size + added.abs()
        wrong = _differs(part(RESULT[pass_], result).to(result.dtype), exact, size, arithmetic)
        if wrong:
            return wrong
    return None


def _differs(got: Tensor, exact: Tensor, size: Tensor, arithmetic: Arithmetic) -> str | None:
    """How many elements are further off than rounding can explain; what is not finite is not looked at.

    Args:
        size: the sums of the products' magnitudes.
    """
    rounded = exact.to(got.dtype)
    product = 2.0**-10 if arithmetic == "tf32" else 2.0**-16  # TF32 has 10 bits; float32 adds up to thousands of them
    allowed = size * product + rounded.abs().double() * torch.finfo(got.dtype).eps + torch.finfo(got.dtype).tiny
    finite = exact.isfinite() & rounded.isfinite() & size.isfinite()
    wrong = finite & ~((got.double() - exact).abs() <= allowed)
    count = int(wrong.sum())
    return (
        f"{count} of {wrong.numel()} elements looked at are further off than {arithmetic} sums are" if count else None
    )
