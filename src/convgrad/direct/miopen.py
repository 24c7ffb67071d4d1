"""MIOpen by its old names, arguments in PyTorch 1.10's order, the flags last.

What the head of `convgrad.direct.cudnn` says of the flags holds here too.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import functional
from ._forced import Grads, Ints, backward, forced, grad_input_of_transposed, grad_weight_of_transposed, miopen

__all__ = [
    "miopen_convolution",
    "miopen_convolution_backward",
    "miopen_convolution_backward_input",
    "miopen_convolution_backward_weight",
    "miopen_convolution_transpose",
    "miopen_convolution_transpose_backward",
    "miopen_convolution_transpose_backward_input",
    "miopen_convolution_transpose_backward_weight",
]


def miopen_convolution(
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
    """A convolution by MIOpen.

    Shape:
        - self: (N, C_in, *in), weight: (C_out, C_in/groups, *k), bias: (C_out,), result: (N, C_out, *out)

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution", miopen(benchmark, deterministic), self):
        return functional.convolution(self, weight, bias, stride, padding, dilation, False, 0, groups)


def miopen_convolution_backward(
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
    """The gradients of `miopen_convolution`, by MIOpen; that of the bias is a sum.

    Shape:
        - self: (N, C_in, *in), grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k)
        - result: like self, like weight, and (C_out,); None where the mask does not ask

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_backward", miopen(benchmark, deterministic), self):
        return backward(grad_output, self, weight, (stride, padding, dilation, groups), output_mask)


def miopen_convolution_backward_input(
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
    """The gradient of the input of `miopen_convolution`, by MIOpen.

    Shape:
        - self_size: N, C_in and the spatial sizes of the input
        - grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k), result: ``self_size``

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_backward_input", miopen(benchmark, deterministic), grad_output):
        return functional.grad_input(self_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def miopen_convolution_backward_weight(
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
    """The gradient of the weight of `miopen_convolution`, by MIOpen.

    Shape:
        - weight_size: C_out, C_in/groups and the kernel sizes
        - grad_output: (N, C_out, *out), self: (N, C_in, *in), result: ``weight_size``

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_backward_weight", miopen(benchmark, deterministic), self):
        return functional.grad_weight(self, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def miopen_convolution_transpose(
    self: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: Ints,
    output_padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """A transposed convolution by MIOpen (its backward-data).

    Shape:
        - self: (N, C_in, *in), weight: (C_in, C_out/groups, *k), bias: (C_out,), result: (N, C_out, *out)

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_transpose", miopen(benchmark, deterministic), self):
        return functional.convolution(self, weight, bias, stride, padding, dilation, True, output_padding, groups)


def miopen_convolution_transpose_backward(
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    output_padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Grads:
    """The gradients of `miopen_convolution_transpose`, by MIOpen; that of the bias is a sum.

    Shape:
        - self: (N, C_in, *in), grad_output: (N, C_out, *out), weight: (C_in, C_out/groups, *k)
        - result: like self, like weight, and (C_out,); None where the mask does not ask

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_transpose_backward", miopen(benchmark, deterministic), self):
        arguments = (stride, padding, dilation, groups)
        return backward(grad_output, self, weight, arguments, output_mask, True, output_padding)


def miopen_convolution_transpose_backward_input(
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """The gradient of the input of `miopen_convolution_transpose`, by MIOpen (its forward).

    Shape:
        - grad_output: (N, C_out, *out), weight: (C_in, C_out/groups, *k), result: (N, C_in, *in)

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_transpose_backward_input", miopen(benchmark, deterministic), grad_output):
        return grad_input_of_transposed(grad_output, weight, (stride, padding, dilation, groups))


def miopen_convolution_transpose_backward_weight(
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
    """The gradient of the weight of `miopen_convolution_transpose`, by MIOpen.

    Shape:
        - weight_size: C_in, C_out/groups and the kernel sizes
        - grad_output: (N, C_out, *out), self: (N, C_in, *in), result: ``weight_size``

    Raises:
        BackendError: MIOpen is not here, or cannot compute this.
    """
    with forced("miopen_convolution_transpose_backward_weight", miopen(benchmark, deterministic), self):
        return grad_weight_of_transposed(weight_size, grad_output, self, (stride, padding, dilation, groups))
