"""The autograd function of `feedback_convolution`; a module of its own, for its decorator loads the compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._compat import forward_ad_active, functorch_active, outer_tangents, primal, without_autocast
from ..engine import active, resume
from ..ops import requesting
from ..problem import add_bias
from ._call import run
from ._gradients import convolution_backward, grad_bias, grad_input, grad_weight


class _Feedback(torch.autograd.Function):
    """A convolution that saves another weight for its backward pass."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Any, feedback_weight: Tensor, form: Any, request: str) -> Tensor:
        with requesting(request):
            return run("convolution", input, weight, bias, form)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, _, feedback_weight, ctx.form, request = inputs
        x, w, _, b, *_ = ctx.needs_input_grad
        with requesting(request):
            ctx.sizes, ctx.request = (input.shape, weight.shape), active()
        ctx.save_for_backward(input if w or b else None, feedback_weight if x else None)
        if functorch_active() or forward_ad_active():
            ctx.output_shape = output.shape
            ctx.save_for_forward(input, weight)
            ctx.set_materialize_grads(False)  # a zero in place of a tangent would be convolved like any other

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
        """Fold the dimension of vmap into N where the input alone has it, else into the groups."""
        *operands, (*form, groups), request = arguments
        n, dims = info.batch_size, in_dims[:4]
        if dims[1:] == (None, None, None):
            input = operands[0].movedim(dims[0], 0)  # [n, N, C_in, *in]
            output = apply(input.flatten(0, 1), *operands[1:], (*form, groups), request)
            return output.unflatten(0, input.shape[:2]), 0
        each: list[Any] = [
            t if t is None else t.expand(n, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(operands, dims, strict=True)
        ]
        if n == 0:  # a convolution has at least one group: compute one of zeros, and take nothing of it
            n, each = 1, [t if t is None else t.sum(0, keepdim=True, dtype=t.dtype) for t in each]
        input, *folded = each[0], *(t if t is None else t.flatten(0, 1) for t in each[1:])
        output = apply(input.movedim(0, 1).flatten(1, 2), *folded, (*form, n * groups), request)
        output = output.unflatten(1, (n, output.shape[1] // n))  # [N, n, C_out, *out]
        return output[:, : info.batch_size], 1

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Public functions only, which are differentiable to any order: so is this."""
        (g,) = grad_outputs
        if g is None:
            return (None,) * 6
        input, feedback_weight = ctx.saved_tensors
        (input_size, weight_size), (_, w, bias, b, *_) = ctx.sizes, ctx.needs_input_grad
        of_input = of_weight = of_bias = None
        with resume(ctx.request), without_autocast():
            if input is not None and feedback_weight is not None:  # one sweep may serve both
                sizes, mask = [g.shape[1]] if bias else None, (True, True, bias)
                operands = (g, input, feedback_weight, sizes)
                of_input, of_weight, of_bias = convolution_backward(*operands, *ctx.form, output_mask=mask)
            elif feedback_weight is not None:
                of_input = grad_input(input_size, feedback_weight, g, *ctx.form)
            elif input is not None:
                of_weight = grad_weight(input, weight_size, g, *ctx.form)
        if bias and of_bias is None:
            of_bias = grad_bias(g)
        return of_input, of_weight if w else None, of_bias, of_weight if b else None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """The derivative of what is computed: forward mode transposes nothing, so feedback has no part in it."""
        x, w, bias, *_ = tangents
        with outer_tangents():
            input, weight = map(primal, ctx.saved_tensors)
            terms = []
            if x is not None:
                terms.append(run("convolution", x, weight, None, ctx.form))
            if w is not None:
                terms.append(run("convolution", input, w, None, ctx.form))
            return add_bias(sum(terms[1:], terms[0]) if terms else input.new_zeros(ctx.output_shape), bias)


@torch.compiler.allow_in_graph
def apply(*operands: Any) -> Tensor:
    """Apply the function to (input, weight, bias, feedback_weight, form, `ops.traced_request`)."""
    return _Feedback.apply(*operands)  # pyright: ignore[reportReturnType]
