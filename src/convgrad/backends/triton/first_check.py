"""The first result of each compiled kernel, held to a computation in float64 on the CPU of a few of its elements, and
what computes in the place of one that fails.

A kernel that was right for one problem says nothing of another: other constants are another compiled kernel. So what is
looked at is what the caller gets: the first and the last image, where offsets are largest, of a few channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...problem import OPERANDS, RESULT, ConvProblem, Outputs, Pass
from ..aten import AtenBackend
from ..base import Arithmetic
from ..reference import ReferenceBackend

_REFERENCE = ReferenceBackend()
_bound = lru_cache(maxsize=256)(AtenBackend().bind)
#: Elements of one channel of the batch, at most, where a ``grad_weight`` is looked at: all of them are read.
_ELEMENTS = 1 << 22


def fault(
    problem: ConvProblem, outputs: Outputs, tensors: Mapping[str, Any], arithmetic: Arithmetic, silu: bool = False,
) -> str | None:  # fmt: skip
    """Return the error of a call's results as a sentence, or None; ``tensors`` are operands and results by their names.

    With ``silu`` the result is SiLU of ``forward``, or, with a grad_output, its derivative times that.
    """
    for output in outputs:
        result = tensors[output]
        if output == "grad_bias":
            terms = tensors["grad_output"][:, :1].double()
            wrong = _differs(result[:1].cpu(), terms.sum().cpu().view(1), terms.abs().sum().cpu(), "direct")
        else:
            wrong = _sampled(problem, output, tensors, arithmetic, silu)
        if wrong:
            return f"its {output} kernel is wrong on {result.device}: {wrong} for {problem}"
    return None


def _sampled(p: ConvProblem, pass_: Pass, given: Mapping[str, Any], arithmetic: Arithmetic, silu: bool) -> str | None:
    """A pass of some channels and images alone: each channel is a problem of its own."""
    multiplier = p.out_channels // p.in_channels
    inner = torch.tensor(sorted({0, p.in_channels // 2, p.in_channels - 1}))
    outer = (inner[:, None] * multiplier + torch.arange(multiplier)).flatten()
    images = torch.arange(p.batch) if pass_ == "grad_weight" else torch.tensor(sorted({0, p.batch - 1}))
    small = p.replace(
        **{"batch": len(images), "in_channels": len(inner), "groups": len(inner), "out_channels": len(outer)},
        **{"dtype": torch.float64, "memory_format": torch.contiguous_format},
    )
    if pass_ == "grad_weight" and max(prod(small.input_shape), prod(small.output_shape)) > len(inner) * _ELEMENTS:
        return None
    channels = {"input": inner, "grad_output": outer}

    def part(slot: str, t: Tensor) -> Tensor:
        if slot == "weight":
            return t[outer.to(t.device)].cpu().double()
        return t[:, channels[slot].to(t.device)][images.to(t.device)].cpu().double()

    first, second = (part(slot, given[slot]) for slot in OPERANDS[pass_])
    exact = _REFERENCE.bind(small, (pass_,))(first, second)
    size = _REFERENCE.bind(small, (pass_,))(first.abs(), second.abs())
    if given.get("bias") is not None:
        bias = given["bias"].cpu().double()[inner if pass_ == "grad_input" else outer].view(1, -1, *(1,) * p.ndim)
        exact, size = exact + bias, size + bias.abs()
    if silu:
        s, g = exact.sigmoid(), given.get("grad_output")
        factor = 1 if g is None else part("grad_output", g)
        exact = factor * (exact * s if g is None else s * (1 + exact * (1 - s)))
        size = abs(factor) * (size + 1) if g is not None else 2 * size  # by how much the argument may be off
    return _differs(part(RESULT[pass_], given[pass_]).to(p.dtype), exact, size, arithmetic)


def _differs(got: Tensor, exact: Tensor, size: Tensor, arithmetic: Arithmetic) -> str | None:
    """Return how many finite elements are further off than rounding explains; ``size`` are sums of magnitudes."""
    rounded = exact.to(got.dtype)
    # Tensor cores cut both operands to the 10 bits of TF32; float32 adds up to thousands of products.
    product = 2.0**-9 + 2.0**-16 if arithmetic == "tf32" else 2.0**-16
    allowed = size * product + rounded.abs().double() * torch.finfo(got.dtype).eps + torch.finfo(got.dtype).tiny
    finite = exact.isfinite() & rounded.isfinite() & size.isfinite()
    wrong = finite & ~((got.double() - exact).abs() <= allowed)
    count = int(wrong.sum())
    text = f"{count} of {wrong.numel()} elements looked at are further off than {arithmetic} sums are"
    return text if count else None


def instead(problem: ConvProblem, outputs: Outputs, *operands: Any) -> Any:
    """Compute these outputs by PyTorch's kernels, as the function that `Backend.bind` describes."""
    if len(outputs) > 1:  # PyTorch's backward of the plain problem
        return _bound(problem.replace(origin="plain"), outputs)(*operands)
    return _bound(problem, outputs)(*operands).contiguous(memory_format=problem.memory_format)
