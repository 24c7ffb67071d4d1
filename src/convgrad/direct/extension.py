"""The small extension that many copied to reach cuDNN from Python: three functions, here with their transposed twins.

Unlike cuDNN's own names, stride stands before padding, and the sizes stand where the missing tensor would: the input's
size first, the weight's size second. For the flags see the head of `convgrad.direct.cudnn`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import functional
from ..errors import ShapeError
from ._forced import (
    Ints,
    also_with_bias,
    cudnn,
    forced,
    grad_input_of_transposed,
    grad_weight_of_transposed,
)

__all__ = [
    "convolution",
    "convolution_backward_input",
    "convolution_backward_weight",
    "convolution_transpose",
    "convolution_transpose_backward_input",
    "convolution_transpose_backward_weight",
]


@also_with_bias
def convolution(
    input: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """A convolution by cuDNN; a bias or None may stand third.

    Shape:
        - input: (N, C_in, *in), weight: (C_out, C_in/groups, *k), result: (N, C_out, *out)

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("convolution", cudnn(benchmark, deterministic, allow_tf32), input):
        return functional.convolution(input, weight, bias, stride, padding, dilation, False, 0, groups)


def convolution_backward_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the input, by cuDNN.

    Shape:
        - input_size: N, C_in and the spatial sizes of the input
        - weight: (C_out, C_in/groups, *k), grad_output: (N, C_out, *out), result: ``input_size``

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("convolution_backward_input", cudnn(benchmark, deterministic, allow_tf32), grad_output):
        return functional.grad_input(input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def convolution_backward_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the weight, by cuDNN.

    Shape:
        - weight_size: C_out, C_in/groups and the kernel sizes
        - input: (N, C_in, *in), grad_output: (N, C_out, *out), result: ``weight_size``

    Raises:
        BackendError: cuDNN is not here, or PyTorch's backward would not pick it for this problem.
    """
    with forced("convolution_backward_weight", cudnn(benchmark, deterministic, allow_tf32), input):
        return functional.grad_weight(input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


@also_with_bias
def convolution_transpose(
    input: Tensor,
    weight: Tensor,
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """A transposed convolution by cuDNN; a bias or None may stand third.

    Shape:
        - input: (N, C_in, *in), weight: (C_in, C_out/groups, *k), result: (N, C_out, *out)

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("convolution_transpose", cudnn(benchmark, deterministic, allow_tf32), input):
        return functional.convolution(input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def convolution_transpose_backward_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the input of a transposed convolution, by cuDNN.

    Shape:
        - input_size: N, C_in and the spatial sizes of the input
        - weight: (C_in, C_out/groups, *k), grad_output: (N, C_out, *out), result: ``input_size``

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
        ShapeError: a grad_output that does not lead to ``input_size``.
    """
    backend = cudnn(benchmark, deterministic, allow_tf32)
    with forced("convolution_transpose_backward_input", backend, grad_output):
        result = grad_input_of_transposed(grad_output, weight, (stride, padding, dilation, groups))
    if tuple(result.shape) != tuple(input_size):
        raise ShapeError(
            f"convolution_transpose_backward_input: grad_output of size {list(grad_output.shape)} belongs to an input "
            f"of size {list(result.shape)}, but got input_size={list(input_size)}"
        )
    return result


def convolution_transpose_backward_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the weight of a transposed convolution, by cuDNN.

    Shape:
        - weight_size: C_in, C_out/groups and the kernel sizes
        - input: (N, C_in, *in), grad_output: (N, C_out, *out), result: ``weight_size``

    Raises:
        BackendError: cuDNN is not here, or PyTorch's backward would not pick it for this problem.
    """
    backend = cudnn(benchmark, deterministic, allow_tf32)
    with forced("convolution_transpose_backward_weight", backend, input):
        return grad_weight_of_transposed(weight_size, grad_output, input, (stride, padding, dilation, groups))
