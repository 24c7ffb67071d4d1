"""MIOpen's depthwise convolution by its old names, arguments in PyTorch 1.10's order, the flags last.

The forward is forced onto MIOpen's depthwise function; its gradient of the input is MIOpen's grouped backward-data.
What the head of `convgrad.direct.cudnn` says of the flags holds here too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import functional
from ..errors import ShapeError
from ._forced import Grads, Ints, backward, forced, miopen

__all__ = [
    "miopen_depthwise_convolution",
    "miopen_depthwise_convolution_backward",
    "miopen_depthwise_convolution_backward_input",
    "miopen_depthwise_convolution_backward_weight",
]


def miopen_depthwise_convolution(
    self: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """A depthwise convolution by MIOpen.

    Shape:
        - self: (N, C_in, *in), weight: (C_out, C_in/groups, *k), bias: (C_out,), result: (N, C_out, *out)

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
        ShapeError: not depthwise: groups that are not the input's channels.
    """
    _check_depthwise("miopen_depthwise_convolution", weight.shape, groups)
    with forced("miopen_depthwise_convolution", miopen(benchmark, deterministic), self):
        return functional.convolution(self, weight, bias, stride, padding, dilation, False, 0, groups)


def miopen_depthwise_convolution_backward(
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Grads:
    """The gradients of `miopen_depthwise_convolution`, by MIOpen; that of the bias is a sum.

    Shape:
        - self: (N, C_in, *in), grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k)
        - result: like self, like weight, and (C_out,); None where the mask does not ask

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
        ShapeError: not depthwise: groups that are not the input's channels.
    """
    _check_depthwise("miopen_depthwise_convolution_backward", weight.shape, groups)
    with forced("miopen_depthwise_convolution_backward", miopen(benchmark, deterministic), self):
        return backward(grad_output, self, weight, (stride, padding, dilation, groups), output_mask)


def miopen_depthwise_convolution_backward_input(
    self_size: Sequence[int],
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """The gradient of the input of `miopen_depthwise_convolution`, by MIOpen.

    Shape:
        - self_size: N, C_in and the spatial sizes of the input
        - grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k), result: ``self_size``

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
        ShapeError: not depthwise: groups that are not the input's channels.
    """
    _check_depthwise("miopen_depthwise_convolution_backward_input", weight.shape, groups)
    with forced("miopen_depthwise_convolution_backward_input", miopen(benchmark, deterministic), grad_output):
        return functional.grad_input(self_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def miopen_depthwise_convolution_backward_weight(
    weight_size: Sequence[int],
    grad_output: Tensor,
    self: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """The gradient of the weight of `miopen_depthwise_convolution`, by MIOpen.

    Shape:
        - weight_size: C_out, C_in/groups and the kernel sizes
        - grad_output: (N, C_out, *out), self: (N, C_in, *in), result: ``weight_size``

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
        ShapeError: not depthwise: groups that are not the input's channels.
    """
    _check_depthwise("miopen_depthwise_convolution_backward_weight", weight_size, groups)
    with forced("miopen_depthwise_convolution_backward_weight", miopen(benchmark, deterministic), self):
        return functional.grad_weight(self, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def _check_depthwise(name: str, weight_size: Sequence[int], groups: int) -> None:
    if len(weight_size) < 2 or weight_size[1] != 1 or groups < 2:
        raise ShapeError(
            f"{name}: expected a depthwise convolution, a weight (groups * multiplier, 1, *k) with more than one "
            f"group, but got weight of size {list(weight_size)} and groups={groups}"
        )
