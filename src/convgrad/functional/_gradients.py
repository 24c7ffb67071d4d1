"""The gradients of the 1-d, 2-d and 3-d names: the signatures of ``torch.nn.grad``; the same for transposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._arguments import Ints, require_tensors, sizes
from ._convolution import grad_input, grad_weight


def _of_input(d: int, input_size: Sequence[int], weight: Tensor, grad_output: Tensor, *rest: Any) -> Tensor:
    require_tensors(f"conv{d}d_input", weight=weight, grad_output=grad_output)
    size = sizes(input_size, "input_size")
    if len(size) != d + 1 or grad_output.dim() != d + 1:
        return grad_input(size, weight, grad_output, *rest)
    return grad_input((1, *size), weight, grad_output.unsqueeze(0), *rest).squeeze(0)


def _of_weight(d: int, input: Tensor, weight_size: Sequence[int], grad_output: Tensor, *rest: Any) -> Tensor:
    require_tensors(f"conv{d}d_weight", input=input, grad_output=grad_output)
    if input.dim() != d + 1 or grad_output.dim() != d + 1:
        return grad_weight(input, weight_size, grad_output, *rest)
    return grad_weight(input.unsqueeze(0), weight_size, grad_output.unsqueeze(0), *rest)


def conv1d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `conv1d` with respect to its input, as ``torch.nn.grad.conv1d_input``.

    Shape:
        - input_size: (N, C_in, L), or without N
        - weight, grad_output: as of `conv1d`, grad_output like its result
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, requires_grad=True), torch.randn(6, 4, 3)
        >>> y = torch.nn.functional.conv1d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(convgrad.conv1d_input(x.shape, w, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_input(1, input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv1d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `conv1d` with respect to its weight, as ``torch.nn.grad.conv1d_weight``.

    Shape:
        - input: (N, C_in, L), grad_output: like the result of `conv1d`, or both without N
        - weight_size: the sizes of the weight of `conv1d`
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 3, requires_grad=True)
        >>> y = torch.nn.functional.conv1d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), w)
        >>> torch.allclose(convgrad.conv1d_weight(x, w.shape, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_weight(1, input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv2d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `conv2d` with respect to its input, as ``torch.nn.grad.conv2d_input``.

    Shape:
        - input_size: (N, C_in, H, W), or without N
        - weight, grad_output: as of `conv2d`, grad_output like its result
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, requires_grad=True), torch.randn(6, 4, 3, 3)
        >>> y = torch.nn.functional.conv2d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(convgrad.conv2d_input(x.shape, w, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_input(2, input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv2d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `conv2d` with respect to its weight, as ``torch.nn.grad.conv2d_weight``.

    Shape:
        - input: (N, C_in, H, W), grad_output: like the result of `conv2d`, or both without N
        - weight_size: the sizes of the weight of `conv2d`
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7), torch.randn(6, 4, 3, 3, requires_grad=True)
        >>> y = torch.nn.functional.conv2d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), w)
        >>> torch.allclose(convgrad.conv2d_weight(x, w.shape, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_weight(2, input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv3d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `conv3d` with respect to its input, as ``torch.nn.grad.conv3d_input``.

    Shape:
        - input_size: (N, C_in, D, H, W), or without N
        - weight, grad_output: as of `conv3d`, grad_output like its result
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7, requires_grad=True), torch.randn(6, 4, 3, 3, 3)
        >>> y = torch.nn.functional.conv3d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(convgrad.conv3d_input(x.shape, w, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_input(3, input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv3d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """The gradient of `conv3d` with respect to its weight, as ``torch.nn.grad.conv3d_weight``.

    Shape:
        - input: (N, C_in, D, H, W), grad_output: like the result of `conv3d`, or both without N
        - weight_size: the sizes of the weight of `conv3d`
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7), torch.randn(6, 4, 3, 3, 3, requires_grad=True)
        >>> y = torch.nn.functional.conv3d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), w)
        >>> torch.allclose(convgrad.conv3d_weight(x, w.shape, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_weight(3, input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv_transpose1d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `conv_transpose1d` with respect to its input.

    Shape:
        - input_size: (N, C_in, L), or without N
        - weight, grad_output: as of `conv_transpose1d`, grad_output like its result
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, requires_grad=True), torch.randn(4, 6, 3)
        >>> y = torch.nn.functional.conv_transpose1d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(convgrad.conv_transpose1d_input(x.shape, w, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_input(1, input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose1d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `conv_transpose1d` with respect to its weight.

    Shape:
        - input: (N, C_in, L), grad_output: like the result of `conv_transpose1d`, or both without N
        - weight_size: the sizes of the weight of `conv_transpose1d`
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(4, 6, 3, requires_grad=True)
        >>> y = torch.nn.functional.conv_transpose1d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), w)
        >>> torch.allclose(convgrad.conv_transpose1d_weight(x, w.shape, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_weight(1, input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose2d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `conv_transpose2d` with respect to its input.

    Shape:
        - input_size: (N, C_in, H, W), or without N
        - weight, grad_output: as of `conv_transpose2d`, grad_output like its result
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, requires_grad=True), torch.randn(4, 6, 3, 3)
        >>> y = torch.nn.functional.conv_transpose2d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(convgrad.conv_transpose2d_input(x.shape, w, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_input(2, input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose2d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `conv_transpose2d` with respect to its weight.

    Shape:
        - input: (N, C_in, H, W), grad_output: like the result of `conv_transpose2d`, or both without N
        - weight_size: the sizes of the weight of `conv_transpose2d`
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7), torch.randn(4, 6, 3, 3, requires_grad=True)
        >>> y = torch.nn.functional.conv_transpose2d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), w)
        >>> torch.allclose(convgrad.conv_transpose2d_weight(x, w.shape, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_weight(2, input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose3d_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `conv_transpose3d` with respect to its input.

    Shape:
        - input_size: (N, C_in, D, H, W), or without N
        - weight, grad_output: as of `conv_transpose3d`, grad_output like its result
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7, requires_grad=True), torch.randn(4, 6, 3, 3, 3)
        >>> y = torch.nn.functional.conv_transpose3d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), x)
        >>> torch.allclose(convgrad.conv_transpose3d_input(x.shape, w, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_input(3, input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose3d_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """The gradient of `conv_transpose3d` with respect to its weight.

    Shape:
        - input: (N, C_in, D, H, W), grad_output: like the result of `conv_transpose3d`, or both without N
        - weight_size: the sizes of the weight of `conv_transpose3d`
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7), torch.randn(4, 6, 3, 3, 3, requires_grad=True)
        >>> y = torch.nn.functional.conv_transpose3d(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), w)
        >>> torch.allclose(convgrad.conv_transpose3d_weight(x, w.shape, torch.ones_like(y)), want, atol=1e-4)
        True
    """
    return _of_weight(3, input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)
