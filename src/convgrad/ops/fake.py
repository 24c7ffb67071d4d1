"""Shapes, strides and errors of the operators without data: the same validation, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine import checked_backward, checked_convolution, checked_grad_input, checked_grad_weight
from ..shapes import channels_of_output


def _empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def _alone(checked: Callable[..., Any], size: str) -> Callable[..., Tensor]:
    def fake(first: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The output, or one gradient, without data."""
        call = checked(first, *arguments, **options)
        return _empty(getattr(call, size), first, call.layout)

    return fake


convolution = _alone(checked_convolution, "output_size")
grad_input, grad_weight = _alone(checked_grad_input, "input_size"), _alone(checked_grad_weight, "weight_size")


def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that the mask selects, without data."""
    call = checked_backward(grad_output, input, weight, *arguments)
    g = call.geometry
    return (
        _empty(input.shape, input, call.layout) if call.mask[0] else None,
        _empty(weight.shape, weight, call.layout) if call.mask[1] else None,
        input.new_empty(channels_of_output(weight.shape, g.transposed, g.groups)) if call.mask[2] else None,
    )
