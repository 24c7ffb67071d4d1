"""cuDNN by its old names, arguments in PyTorch 1.10's order, the flags last.

The flags of a call hold for that call and for its derivatives, and touch no global. For the gradient of the weight
PyTorch has kept no function that takes them: it is PyTorch's own backward, under PyTorch's own flags, as long as these
allow no more than the call's; else a cuDNN forward in another role computes it, with the call's flags, more slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import functional
from ._forced import (
    Grads,
    Ints,
    also_with_bias,
    backward,
    cudnn,
    forced,
    grad_input_of_transposed,
    grad_weight_of_transposed,
)

__all__ = [
    "cudnn_convolution",
    "cudnn_convolution_backward",
    "cudnn_convolution_backward_input",
    "cudnn_convolution_backward_weight",
    "cudnn_convolution_transpose",
    "cudnn_convolution_transpose_backward",
    "cudnn_convolution_transpose_backward_input",
    "cudnn_convolution_transpose_backward_weight",
]


@also_with_bias
def cudnn_convolution(
    self: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """A convolution by cuDNN.

    Args:
        benchmark: whether cuDNN tries its algorithms; None: as ``torch.backends.cudnn.benchmark`` says.
        deterministic: whether only algorithms that repeat their bits are used; None: as PyTorch's flags say.
        allow_tf32: whether float32 operands may be rounded to TF32; None: as PyTorch's flags say.

    Shape:
        - self: (N, C_in, *in), weight: (C_out, C_in/groups, *k), result: (N, C_out, *out)

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.

    Equivalent to:
        >>> import torch
        >>> try:
        ...     cudnn_convolution(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), [0, 0], [1, 1], [1, 1], 1)
        ... except RuntimeError as e:
        ...     print(str(e).split(",")[0])
        convgrad.direct.cudnn_convolution is forced onto NVIDIA's cuDNN
    """
    with forced("cudnn_convolution", cudnn(benchmark, deterministic, allow_tf32), self):
        return functional.convolution(self, weight, bias, stride, padding, dilation, False, 0, groups)


def cudnn_convolution_backward_input(
    self_size: Sequence[int],
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the input, by cuDNN (its backward-data).

    Shape:
        - self_size: N, C_in and the spatial sizes of the input
        - grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k), result: ``self_size``

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("cudnn_convolution_backward_input", cudnn(benchmark, deterministic, allow_tf32), grad_output):
        return functional.grad_input(self_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def cudnn_convolution_backward_weight(
    weight_size: Sequence[int],
    grad_output: Tensor,
    self: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the weight, by cuDNN (for the flags see the head of this module).

    Shape:
        - weight_size: C_out, C_in/groups and the kernel sizes
        - grad_output: (N, C_out, *out), self: (N, C_in, *in), result: ``weight_size``

    Raises:
        BackendError: cuDNN is not here, or PyTorch's backward would not pick it for this problem.
    """
    with forced("cudnn_convolution_backward_weight", cudnn(benchmark, deterministic, allow_tf32), self):
        return functional.grad_weight(self, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def cudnn_convolution_backward(
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
    output_mask: Sequence[bool] = (True, True),
) -> Grads:
    """The gradients of the input and of the weight, by cuDNN; with a third entry in the mask, that of the bias too.

    Shape:
        - self: (N, C_in, *in), grad_output: (N, C_out, *out), weight: (C_out, C_in/groups, *k)
        - result: like self and like weight; None where the mask does not ask

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("cudnn_convolution_backward", cudnn(benchmark, deterministic, allow_tf32), self):
        return backward(grad_output, self, weight, (stride, padding, dilation, groups), output_mask)


@also_with_bias
def cudnn_convolution_transpose(
    self: Tensor,
    weight: Tensor,
    padding: Ints,
    output_padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """A transposed convolution by cuDNN (its backward-data).

    Shape:
        - self: (N, C_in, *in), weight: (C_in, C_out/groups, *k), result: (N, C_out, *out)

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("cudnn_convolution_transpose", cudnn(benchmark, deterministic, allow_tf32), self):
        return functional.convolution(self, weight, bias, stride, padding, dilation, True, output_padding, groups)


def cudnn_convolution_transpose_backward(
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
    allow_tf32: bool | None = None,
    output_mask: Sequence[bool] = (True, True),
) -> Grads:
    """The gradients of the input and of the weight of a transposed convolution, by cuDNN.

    Shape:
        - self: (N, C_in, *in), grad_output: (N, C_out, *out), weight: (C_in, C_out/groups, *k)
        - result: like self and like weight; None where the mask does not ask

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    with forced("cudnn_convolution_transpose_backward", cudnn(benchmark, deterministic, allow_tf32), self):
        arguments = (stride, padding, dilation, groups)
        return backward(grad_output, self, weight, arguments, output_mask, True, output_padding)


def cudnn_convolution_transpose_backward_input(
    grad_output: Tensor,
    weight: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the input of a transposed convolution, by cuDNN (its forward).

    Shape:
        - grad_output: (N, C_out, *out), weight: (C_in, C_out/groups, *k), result: (N, C_in, *in)

    Raises:
        BackendError: cuDNN is not here, or cannot compute this.
    """
    backend = cudnn(benchmark, deterministic, allow_tf32)
    with forced("cudnn_convolution_transpose_backward_input", backend, grad_output):
        return grad_input_of_transposed(grad_output, weight, (stride, padding, dilation, groups))


def cudnn_convolution_transpose_backward_weight(
    weight_size: Sequence[int],
    grad_output: Tensor,
    self: Tensor,
    padding: Ints,
    stride: Ints,
    dilation: Ints,
    groups: int,
    benchmark: bool | None = None,
    deterministic: bool | None = None,
    allow_tf32: bool | None = None,
) -> Tensor:
    """The gradient of the weight of a transposed convolution, by cuDNN (for the flags see the head of this module).

    Shape:
        - weight_size: C_in, C_out/groups and the kernel sizes
        - grad_output: (N, C_out, *out), self: (N, C_in, *in), result: ``weight_size``

    Raises:
        BackendError: cuDNN is not here, or PyTorch's backward would not pick it for this problem.
    """
    backend = cudnn(benchmark, deterministic, allow_tf32)
    with forced("cudnn_convolution_transpose_backward_weight", backend, self):
        return grad_weight_of_transposed(weight_size, grad_output, self, (stride, padding, dilation, groups))
