"""The 1-d, 2-d and 3-d names: thin over the N-d functions, with the signatures of ``torch.nn.functional``."""

from __future__ import annotations

from torch import Tensor

from ._arguments import Ints, conv_arguments, transpose_arguments
from ._call import public_functions, run


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """A 1-d convolution, as ``torch.nn.functional.conv1d``.

    Shape:
        - input: (N, C_in, L), or without N
        - weight: (C_out, C_in/groups, k_w), bias: (C_out,)
        - result: (N, C_out, L_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 3)
        >>> torch.equal(convgrad.conv1d(x, w, padding=1), torch.nn.functional.conv1d(x, w, padding=1))
        True
    """
    return run("conv1d", 1, conv_arguments, input, weight, bias, (stride, padding, dilation, groups))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """A 2-d convolution, as ``torch.nn.functional.conv2d``.

    Shape:
        - input: (N, C_in, H, W), or without N
        - weight: (C_out, C_in/groups, k_h, k_w), bias: (C_out,)
        - result: (N, C_out, H_out, W_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7), torch.randn(6, 4, 3, 3)
        >>> torch.equal(convgrad.conv2d(x, w, padding=1), torch.nn.functional.conv2d(x, w, padding=1))
        True
    """
    return run("conv2d", 2, conv_arguments, input, weight, bias, (stride, padding, dilation, groups))


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Tensor:
    """A 3-d convolution, as ``torch.nn.functional.conv3d``.

    Shape:
        - input: (N, C_in, D, H, W), or without N
        - weight: (C_out, C_in/groups, k_d, k_h, k_w), bias: (C_out,)
        - result: (N, C_out, D_out, H_out, W_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7), torch.randn(6, 4, 3, 3, 3)
        >>> torch.equal(convgrad.conv3d(x, w, padding=1), torch.nn.functional.conv3d(x, w, padding=1))
        True
    """
    return run("conv3d", 3, conv_arguments, input, weight, bias, (stride, padding, dilation, groups))


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """A 1-d transposed convolution, as ``torch.nn.functional.conv_transpose1d``.

    Shape:
        - input: (N, C_in, L), or without N
        - weight: (C_in, C_out/groups, k_w), bias: (C_out,)
        - result: (N, C_out, L_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(4, 6, 3)
        >>> torch.equal(convgrad.conv_transpose1d(x, w, stride=2), torch.nn.functional.conv_transpose1d(x, w, stride=2))
        True
    """
    written = (stride, padding, output_padding, groups, dilation)
    return run("conv_transpose1d", 1, transpose_arguments, input, weight, bias, written)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """A 2-d transposed convolution, as ``torch.nn.functional.conv_transpose2d``.

    Shape:
        - input: (N, C_in, H, W), or without N
        - weight: (C_in, C_out/groups, k_h, k_w), bias: (C_out,)
        - result: (N, C_out, H_out, W_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7), torch.randn(4, 6, 3, 3)
        >>> torch.equal(convgrad.conv_transpose2d(x, w, stride=2), torch.nn.functional.conv_transpose2d(x, w, stride=2))
        True
    """
    written = (stride, padding, output_padding, groups, dilation)
    return run("conv_transpose2d", 2, transpose_arguments, input, weight, bias, written)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Tensor:
    """A 3-d transposed convolution, as ``torch.nn.functional.conv_transpose3d``.

    Shape:
        - input: (N, C_in, D, H, W), or without N
        - weight: (C_in, C_out/groups, k_d, k_h, k_w), bias: (C_out,)
        - result: (N, C_out, D_out, H_out, W_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7), torch.randn(4, 6, 3, 3, 3)
        >>> torch.equal(convgrad.conv_transpose3d(x, w, stride=2), torch.nn.functional.conv_transpose3d(x, w, stride=2))
        True
    """
    written = (stride, padding, output_padding, groups, dilation)
    return run("conv_transpose3d", 3, transpose_arguments, input, weight, bias, written)


for _function in (conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d):
    public_functions[_function.__name__] = _function
