"""A convolution whose input gradient goes back through other weights.

Feedback alignment (Lillicrap et al., "Random synaptic feedback weights support error backpropagation for deep
learning", 2016): grad_input is computed with ``backward_weight``, which stays as it is. With a gradient equal to the
weight's, both weights converge to each other under weight decay (Kolen and Pollack, "Backpropagation without weight
transport", 1994; Akrout et al., "Deep learning without weight transport", 2019).

What this computes is no gradient of any function, so it has no second derivative.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import ops
from ..calculus import sum_of_bias
from ..engine.request import active, resume
from ..errors import ShapeError, UnsupportedError

__all__ = ["through_other_weights"]

_REASON = (
    "a convolution with backward_weight was differentiated twice: its grad_input is computed with backward_weight "
    "instead of weight, so it is not the gradient of any function and has no derivative that means anything"
)
_FORWARD_REASON = (
    "forward-mode derivative of a convolution with backward_weight: backward_weight only takes part in a backward pass"
)


class _Once(torch.autograd.Function):
    """``grad_input`` or ``grad_weight``, with a reason instead of a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(op: Any, grad_output: Tensor, other: Tensor, rest: tuple[Any, ...]) -> Tensor:
        other = other.conj() if other.is_complex() else other
        return op(grad_output, other, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(_REASON)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(_FORWARD_REASON)


class _Feedback(torch.autograd.Function):
    """The convolution; its backward with the other weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        backward_weight: Tensor,
        arguments: tuple[Any, ...],
        backward_weight_grad: bool,
    ) -> Tensor:
        return ops.convolution(input, weight, bias, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep only what the gradients asked for will read."""
        input, weight, _, backward_weight, ctx.arguments, ctx.teaches = inputs
        ctx.input_size, ctx.weight_size, ctx.request = input.shape, weight.shape, active()
        x, w, _, b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if w or (b and ctx.teaches) else None, backward_weight if x else None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """grad_input through the other weight; the weight's own gradient, and for the other weight the same."""
        (grad_output,) = grad_outputs
        input, backward_weight = ctx.saved_tensors
        x, w, c, b, *_ = ctx.needs_input_grad
        grad_input = grad_weight = None
        with resume(ctx.request):
            if x:
                grad_input = _Once.apply(ops.grad_input, grad_output, backward_weight, (ctx.input_size, *ctx.arguments))
            if w or (b and ctx.teaches):
                grad_weight = _Once.apply(ops.grad_weight, grad_output, input, (ctx.weight_size, *ctx.arguments))
        grad_bias = sum_of_bias(grad_output) if c else None
        return grad_input, grad_weight if w else None, grad_bias, grad_weight if b and ctx.teaches else None, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(_FORWARD_REASON)


@torch.compiler.allow_in_graph
def through_other_weights(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    backward_weight: Tensor,
    backward_weight_grad: bool,
    arguments: tuple[Any, ...],
) -> Tensor:
    """The convolution of ``input`` and ``weight`` whose grad_input is computed with ``backward_weight``.

    Args:
        arguments: stride, padding, dilation, transposed, output_padding, groups, as the operator takes them.

    Raises:
        ShapeError: a backward_weight of another shape than weight's.
        UnsupportedError: when it is differentiated twice, or in forward mode.
    """
    if backward_weight.shape != weight.shape:
        raise ShapeError(
            f"Expected backward_weight of the size of weight, {list(weight.shape)}, "
            f"but got {list(backward_weight.shape)}"
        )
    if (backward_weight.dtype, backward_weight.device) != (weight.dtype, weight.device):
        raise ShapeError(
            f"Expected backward_weight like weight, {weight.dtype} on {weight.device}, "
            f"but got {backward_weight.dtype} on {backward_weight.device}"
        )
    return _Feedback.apply(input, weight, bias, backward_weight, arguments, backward_weight_grad)  # pyright: ignore[reportReturnType]
