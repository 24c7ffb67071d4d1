"""The operators below autograd: resolve the call, run its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import profiler_enabled
from ..backends import aten_backward
from ..engine import checked_convolution, observers, resolve

Ints = Sequence[int]


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """The operator itself, on real tensors."""
    if input.dim() > 1 and input.shape[1] == 0 and not arguments[3]:  # as in PyTorch, the output has no channels then
        return input.new_empty(checked_convolution(input, weight, bias, *arguments).output_size)
    return resolve("convolution", arguments, input, weight, bias).contract(input, weight, bias)


def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Ints | None, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Up to three gradients at once; None for those that the mask leaves out."""
    plan = resolve("convolution_backward", (bias_sizes, *arguments), grad_output, input, weight)
    mask = arguments[-1]
    if plan.aten and (bias_sizes is not None or not mask[2]) and not observers and not profiler_enabled():
        found = aten_backward(grad_output, input, weight, bias_sizes, *plan.arguments, mask)
        # oneDNN computes, and returns, what the mask leaves out too.
        return tuple([t if wanted else None for t, wanted in zip(found, mask, strict=True)])  # pyright: ignore[reportReturnType]
    return plan.gradients(grad_output, input, weight)


def grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Ints,
    *arguments: Any,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The gradient of the input alone, for which no input is needed."""
    plan = resolve("grad_input", (input_size, *arguments), grad_output, weight, None, memory_format)
    return plan.contract(grad_output, weight)


def grad_weight(
    grad_output: Tensor,
    input: Tensor,
    weight_size: Ints,
    *arguments: Any,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The gradient of the weight alone, for which no weight is needed."""
    plan = resolve("grad_weight", (weight_size, *arguments), grad_output, input, None, memory_format)
    return plan.contract(input, grad_output) if arguments[3] else plan.contract(grad_output, input)
