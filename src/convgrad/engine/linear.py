"""A linear layer as a pointwise convolution: the rows of its input are the pixels of an image in channels_last."""

from __future__ import annotations

from torch import Tensor

from .plan import Plan

#: Stride, padding, dilation, transposed, output_padding and groups of the operator.
POINTWISE = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)


def as_pointwise(rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., in_features] as an image [1, in_features, 1, rows], and the weight as a kernel of one element."""
    return rows.view(1, 1, -1, rows.shape[-1]).permute(0, 3, 1, 2), weight.view(*weight.shape, 1, 1)


def beats_matmul(plan: Plan) -> bool:
    """Whether a linear layer's plan leaves any part to a faster backend than torch's matrix product, or is unsettled.

    What it leaves to PyTorch must be that product: not a convolution of PyTorch's, nor what replaces a wrong one.
    """
    steps = (*plan.steps, *plan.backward((True, True, plan.problem.has_bias)).steps)
    others = [step for step in steps if step.backend.name != "aten:matmul"]
    for step in others:
        known = plan.request is not None or step.backend.preferred or step.reason.startswith("measured")
        if step.backend.from_pytorch or not (known or step.backend.name.startswith("native")):
            return False
    return bool(others) or any(step.unsettled for step in steps)
