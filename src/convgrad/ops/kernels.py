"""The operators below autograd: resolve the call, run its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine import Plan, checked_convolution, resolve


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """Compute the operator on tensors with data."""
    if input.dim() > 1 and input.shape[1] == 0:  # as in PyTorch, the output has no channels then
        return input.new_empty(checked_convolution(input, weight, bias, *arguments).output_size)
    return resolve("convolution", arguments, input, weight, bias).contract(input, weight, bias)


def run(op: str, plan: Plan, raw: tuple[Any, ...], *operands: Tensor) -> Any:
    """A gradient operator's call by its plan: one gradient, or three with None for those that the mask leaves out."""
    if op != "convolution_backward":
        exchanged = op == "grad_weight" and raw[4]  # of a transposed convolution
        return plan.contract(*(operands[::-1] if exchanged else operands))
    return plan.gradients(*operands)


def _gradient(op: str, count: int) -> Callable[..., Any]:
    """The operator itself, on real tensors; the first ``count`` of its arguments."""

    def kernel(*args: Any, memory_format: torch.memory_format | None = None) -> Any:
        operands, raw = args[:count], args[count:]
        result = run(op, resolve(op, raw, *operands, memory_format=memory_format), raw, *operands)
        # ATen goes by the layout of the operands.
        return result if memory_format is None else result.contiguous(memory_format=memory_format)

    return kernel


convolution_backward = _gradient("convolution_backward", 3)
grad_input, grad_weight = _gradient("grad_input", 2), _gradient("grad_weight", 2)
