"""A convolution whose input gradient is computed with another weight.

Feedback alignment (Lillicrap et al., "Random synaptic feedback weights support error backpropagation for deep
learning", 2016) computes grad_input with ``backward_weight``, which stays as it is. With a gradient equal to the
weight's, both weights converge to each other under weight decay (Kolen and Pollack, "Backpropagation without weight
transport", 1994; Akrout et al., "Deep learning without weight transport", 2019).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine import active, resume
from ..errors import ShapeError, UnsupportedError
from ..ops import cast_operands
from ..validation import check_operands
from ._arguments import require_bool, require_tensors
from ._call import run_nd
from ._gradients import grad_bias, grad_input, grad_weight

__all__ = ["convolution_with_backward_weight"]


class _NotDifferentiable(torch.autograd.Function):
    """The identity, with a reason instead of a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "a convolution with backward_weight was differentiated twice: its grad_input is computed with "
            "backward_weight instead of weight, so it is not the gradient of any function and has no derivative"
        )


class _Feedback(torch.autograd.Function):
    """The convolution; its backward with the other weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Any, _backward_weight: Tensor, _teaches: bool, form: Any
    ) -> Tensor:
        return run_nd(input, weight, bias, *form)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, _, backward_weight, teaches, ctx.form = inputs
        x, w, _, b, *_ = ctx.needs_input_grad
        ctx.sizes, ctx.weights, ctx.request = (input.shape, weight.shape), (w, b and teaches), active()
        ctx.save_for_backward(input if any(ctx.weights) else None, backward_weight if x else None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (g,) = grad_outputs
        input, backward_weight = ctx.saved_tensors
        of_input = of_weight = None
        with resume(ctx.request):
            if backward_weight is not None:
                of_input = _NotDifferentiable.apply(grad_input(ctx.sizes[0], backward_weight, g, *ctx.form))
            if input is not None:
                of_weight = _NotDifferentiable.apply(grad_weight(input, ctx.sizes[1], g, *ctx.form))
        one, other = (of_weight if needed else None for needed in ctx.weights)
        return of_input, one, grad_bias(g) if ctx.needs_input_grad[2] else None, other, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedError(
            "forward-mode derivative of a convolution with backward_weight, which takes part in backward passes only"
        )


@torch.compiler.allow_in_graph
def convolution_with_backward_weight(
    input: Tensor, weight: Tensor, bias: Tensor | None, backward_weight: Tensor, backward_weight_grad: bool, form: Any
) -> Tensor:
    """`convolution` with its two keywords.

    Args:
        form: the arguments of `convolution` behind bias, as the user wrote them.

    Raises:
        ShapeError, DtypeError: a backward_weight of another shape, dtype or device than weight's.
        UnsupportedError: when it is differentiated twice, or in forward mode.
    """
    require_tensors("convolution", backward_weight=backward_weight)
    require_bool("backward_weight_grad", backward_weight_grad)
    if backward_weight.shape != weight.shape:
        raise ShapeError(
            f"Expected backward_weight of the size of weight, {list(weight.shape)}, "
            f"but got {list(backward_weight.shape)}"
        )
    operands: Any = cast_operands(input, weight, bias, backward_weight)
    check_operands(("weight", operands[1]), ("backward_weight", operands[3]))
    return _Feedback.apply(*operands, backward_weight_grad, form)  # pyright: ignore[reportReturnType]
