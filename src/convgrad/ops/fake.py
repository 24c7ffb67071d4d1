"""Shapes, strides and errors of the operators without data: the same validation, with symbolic sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..shapes import conv_geometry, convolution_shape
from ..validation import check_backward, check_grad_input, check_grad_weight, check_operands
from .kernels import layout_like, layout_of

__all__ = ["convolution", "convolution_backward", "grad_input", "grad_weight"]


def _empty(shape: Sequence[int], like: Tensor, memory_format: torch.memory_format) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format)


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """The output, without data."""
    g = conv_geometry(weight.shape, *arguments)
    shape = convolution_shape(input.shape, weight.shape, None if bias is None else bias.shape, g)
    check_operands(("input", input), ("weight", weight), ("bias", bias))
    return _empty(shape, input, layout_of(input, weight, g))


def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *arguments: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients that the mask asks for, without data."""
    *form, output_mask = arguments
    g = conv_geometry(weight.shape, *form)
    check_backward(grad_output.shape, input.shape, weight.shape, bias_sizes, g, output_mask)
    check_operands(("grad_output", grad_output), ("input", input), ("weight", weight))
    layout = layout_of(input, weight, g)
    channels = weight.shape[1] * g.groups if g.transposed else weight.shape[0]
    return (
        _empty(input.shape, input, layout) if output_mask[0] else None,
        _empty(weight.shape, weight, layout) if output_mask[1] else None,
        input.new_empty(channels) if output_mask[2] else None,
    )


def grad_input(
    grad_output: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    *arguments: Any,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The gradient of the input, without data."""
    g = conv_geometry(weight.shape, *arguments)
    check_grad_input(grad_output.shape, weight.shape, input_size, g)
    check_operands(("grad_output", grad_output), ("weight", weight))
    layout = memory_format or layout_of(layout_like(input_size, grad_output), weight, g)
    return _empty(input_size, grad_output, layout)


def grad_weight(
    grad_output: Tensor,
    input: Tensor,
    weight_size: Sequence[int],
    *arguments: Any,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """The gradient of the weight, without data."""
    g = conv_geometry(weight_size, *arguments)
    check_grad_weight(grad_output.shape, input.shape, weight_size, g)
    check_operands(("grad_output", grad_output), ("input", input))
    weight = _empty(weight_size, input, torch.contiguous_format)
    return _empty(weight_size, input, memory_format or layout_of(input, weight, g))
