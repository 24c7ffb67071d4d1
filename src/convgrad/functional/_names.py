"""The 1-d, 2-d and 3-d convolutions and their gradients, with the signatures of PyTorch's functions.

Each is thin over what all dimensions share: `run`, `grad_input` and `grad_weight`. What ``padding`` may be besides
PyTorch's integers and words is said in `convolution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._arguments import Ints, Padding, conv_arguments, transpose_arguments
from ._call import ORDERS, Signature, not_tensors, run, signatures
from ._gradients import grad_input, grad_weight
from ._rows import Layout, as_images, in_one_row

# fmt: off


def conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1, *, layout: Layout = "NCL",
) -> Tensor:
    """Return the 1-d convolution of input and weight, as ``torch.nn.functional.conv1d``.

    Args:
        layout: ``"NLC"``: input and result are (N, L, C), or (L, C), and are not copied. (A transposed view without it
            is copied, because results are laid out like PyTorch's, as contiguous (N, C, L).)

    Shape:
        - input: (N, C_in, L), or without N
        - weight: (C_out, C_in/groups, k), bias: (C_out,)
        - result: (N, C_out, L_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).
        ValueError: another layout.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 3)
        >>> torch.equal(convgrad.conv1d(x, w, padding=1), torch.nn.functional.conv1d(x, w, padding=1))
        True
        >>> y = convgrad.conv1d(x.transpose(1, 2), w, padding=1, layout="NLC")
        >>> torch.allclose(y.transpose(1, 2), torch.nn.functional.conv1d(x, w, padding=1), atol=1e-5)
        True
    """
    raw = (stride, padding, dilation, groups)
    if layout == "NCL":
        return run("conv1d", input, weight, bias, raw)
    return _channels_last("conv1d", input, weight, bias, raw, layout)


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return the 2-d convolution of input and weight, as ``torch.nn.functional.conv2d``.

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
    return run("conv2d", input, weight, bias, (stride, padding, dilation, groups))


def conv3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return the 3-d convolution of input and weight, as ``torch.nn.functional.conv3d``.

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
    return run("conv3d", input, weight, bias, (stride, padding, dilation, groups))


def conv_transpose1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
    *, layout: Layout = "NCL",
) -> Tensor:
    """Return the 1-d transposed convolution of input and weight, as ``torch.nn.functional.conv_transpose1d``.

    Args:
        layout: ``"NLC"``: input and result are (N, L, C), or (L, C), and are not copied. (A transposed view without it
            is copied, because results are laid out like PyTorch's, as contiguous (N, C, L).)

    Shape:
        - input: (N, C_in, L), or without N
        - weight: (C_in, C_out/groups, k), bias: (C_out,)
        - result: (N, C_out, L_out), or without N

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).
        ValueError: another layout.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(4, 6, 3)
        >>> torch.equal(convgrad.conv_transpose1d(x, w, stride=2), torch.nn.functional.conv_transpose1d(x, w, stride=2))
        True
        >>> y = convgrad.conv_transpose1d(x.transpose(1, 2), w, stride=2, layout="NLC")
        >>> torch.allclose(y.transpose(1, 2), torch.nn.functional.conv_transpose1d(x, w, stride=2), atol=1e-5)
        True
    """
    raw = (stride, padding, output_padding, groups, dilation)
    if layout == "NCL":
        return run("conv_transpose1d", input, weight, bias, raw)
    return _channels_last("conv_transpose1d", input, weight, bias, raw, layout)


def conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return the 2-d transposed convolution of input and weight, as ``torch.nn.functional.conv_transpose2d``.

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
    return run("conv_transpose2d", input, weight, bias, (stride, padding, output_padding, groups, dilation))


def conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return the 3-d transposed convolution of input and weight, as ``torch.nn.functional.conv_transpose3d``.

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
    return run("conv_transpose3d", input, weight, bias, (stride, padding, output_padding, groups, dilation))


# ---- gradients -----------------------------------------------------------------------------------


def conv1d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return `conv1d`'s gradient with respect to its input, as ``torch.nn.grad.conv1d_input`` (see `grad_input`).

    Shape:
        weight (C_out, C_in/groups, k), grad_output (N, C_out, L_out) -> (N, C_in, L)

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(6, 4, 3), torch.randn(2, 6, 5)
        >>> want = torch.nn.grad.conv1d_input((2, 4, 7), w, g)
        >>> torch.allclose(convgrad.conv1d_input((2, 4, 7), w, g), want, atol=1e-4)
        True
    """
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv1d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return `conv1d`'s gradient with respect to its weight, as ``torch.nn.grad.conv1d_weight`` (see `grad_weight`).

    Shape:
        input (N, C_in, L), grad_output (N, C_out, L_out) -> (C_out, C_in/groups, k)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 7), torch.randn(2, 6, 5)
        >>> want = torch.nn.grad.conv1d_weight(x, (6, 4, 3), g)
        >>> torch.allclose(convgrad.conv1d_weight(x, (6, 4, 3), g), want, atol=1e-4)
        True
    """
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv2d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return `conv2d`'s gradient with respect to its input, as ``torch.nn.grad.conv2d_input`` (see `grad_input`).

    Shape:
        weight (C_out, C_in/groups, k_h, k_w), grad_output (N, C_out, H_out, W_out) -> (N, C_in, H, W)

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(6, 4, 3, 3), torch.randn(2, 6, 5, 5)
        >>> want = torch.nn.grad.conv2d_input((2, 4, 7, 7), w, g)
        >>> torch.allclose(convgrad.conv2d_input((2, 4, 7, 7), w, g), want, atol=1e-4)
        True
    """
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv2d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return `conv2d`'s gradient with respect to its weight, as ``torch.nn.grad.conv2d_weight`` (see `grad_weight`).

    Shape:
        input (N, C_in, H, W), grad_output (N, C_out, H_out, W_out) -> (C_out, C_in/groups, k_h, k_w)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 7, 7), torch.randn(2, 6, 5, 5)
        >>> want = torch.nn.grad.conv2d_weight(x, (6, 4, 3, 3), g)
        >>> torch.allclose(convgrad.conv2d_weight(x, (6, 4, 3, 3), g), want, atol=1e-4)
        True
    """
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv3d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return `conv3d`'s gradient with respect to its input, as ``torch.nn.grad.conv3d_input`` (see `grad_input`).

    Shape:
        weight (C_out, C_in/groups, k_d, k_h, k_w), grad_output (N, C_out, D_out, H_out, W_out) -> (N, C_in, D, H, W)

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(6, 4, 3, 3, 3), torch.randn(2, 6, 5, 5, 5)
        >>> want = torch.nn.grad.conv3d_input((2, 4, 7, 7, 7), w, g)
        >>> torch.allclose(convgrad.conv3d_input((2, 4, 7, 7, 7), w, g), want, atol=1e-4)
        True
    """
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv3d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:
    """Return `conv3d`'s gradient with respect to its weight, as ``torch.nn.grad.conv3d_weight`` (see `grad_weight`).

    Shape:
        input (N, C_in, D, H, W), grad_output (N, C_out, D_out, H_out, W_out) -> (C_out, C_in/groups, k_d, k_h, k_w)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 7, 7, 7), torch.randn(2, 6, 5, 5, 5)
        >>> want = torch.nn.grad.conv3d_weight(x, (6, 4, 3, 3, 3), g)
        >>> torch.allclose(convgrad.conv3d_weight(x, (6, 4, 3, 3, 3), g), want, atol=1e-4)
        True
    """
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv_transpose1d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return `conv_transpose1d`'s gradient with respect to its input (see `grad_input`).

    Shape:
        weight (C_in, C_out/groups, k), grad_output (N, C_out, L_out) -> (N, C_in, L)

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(4, 6, 3), torch.randn(2, 6, 9)
        >>> want = torch.nn.functional.conv1d(g, w)
        >>> torch.allclose(convgrad.conv_transpose1d_input((2, 4, 7), w, g), want, atol=1e-4)
        True
    """
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose1d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return `conv_transpose1d`'s gradient with respect to its weight (see `grad_weight`).

    Shape:
        input (N, C_in, L), grad_output (N, C_out, L_out) -> (C_in, C_out/groups, k)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 7), torch.randn(2, 6, 9)
        >>> want = torch.nn.grad.conv1d_weight(g, (4, 6, 3), x)
        >>> torch.allclose(convgrad.conv_transpose1d_weight(x, (4, 6, 3), g), want, atol=1e-4)
        True
    """
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose2d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return `conv_transpose2d`'s gradient with respect to its input (see `grad_input`).

    Shape:
        weight (C_in, C_out/groups, k_h, k_w), grad_output (N, C_out, H_out, W_out) -> (N, C_in, H, W)

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(4, 6, 3, 3), torch.randn(2, 6, 9, 9)
        >>> want = torch.nn.functional.conv2d(g, w)
        >>> torch.allclose(convgrad.conv_transpose2d_input((2, 4, 7, 7), w, g), want, atol=1e-4)
        True
    """
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose2d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return `conv_transpose2d`'s gradient with respect to its weight (see `grad_weight`).

    Shape:
        input (N, C_in, H, W), grad_output (N, C_out, H_out, W_out) -> (C_in, C_out/groups, k_h, k_w)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 7, 7), torch.randn(2, 6, 9, 9)
        >>> want = torch.nn.grad.conv2d_weight(g, (4, 6, 3, 3), x)
        >>> torch.allclose(convgrad.conv_transpose2d_weight(x, (4, 6, 3, 3), g), want, atol=1e-4)
        True
    """
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose3d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return `conv_transpose3d`'s gradient with respect to its input (see `grad_input`).

    Shape:
        weight (C_in, C_out/groups, k_d, k_h, k_w), grad_output (N, C_out, D_out, H_out, W_out) -> (N, C_in, D, H, W)

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(4, 6, 3, 3, 3), torch.randn(2, 6, 9, 9, 9)
        >>> want = torch.nn.functional.conv3d(g, w)
        >>> torch.allclose(convgrad.conv_transpose3d_input((2, 4, 7, 7, 7), w, g), want, atol=1e-4)
        True
    """
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose3d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:
    """Return `conv_transpose3d`'s gradient with respect to its weight (see `grad_weight`).

    Shape:
        input (N, C_in, D, H, W), grad_output (N, C_out, D_out, H_out, W_out) -> (C_in, C_out/groups, k_d, k_h, k_w)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 7, 7, 7), torch.randn(2, 6, 9, 9, 9)
        >>> want = torch.nn.grad.conv3d_weight(g, (4, 6, 3, 3, 3), x)
        >>> torch.allclose(convgrad.conv_transpose3d_weight(x, (4, 6, 3, 3, 3), g), want, atol=1e-4)
        True
    """
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)


# fmt: on

# ---- what `run` knows of them ----------------------------------------------------------------------


def _channels_last(
    name: str, input: Tensor, weight: Tensor, bias: Tensor | None, raw: tuple[Any, ...], layout: Layout
) -> Tensor:
    """Return `conv1d` or `conv_transpose1d` of a tensor (N, L, C)."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor | None)):
        return not_tensors(name, input, weight, bias, raw, layout=layout)

    def call(image: Tensor, kernel: Tensor) -> Tensor:
        return run(f"{name}(layout='NLC')", image, kernel, bias, raw)

    return as_images(call, input, weight, layout)


for _kind, _read, _functions in (
    ("conv", conv_arguments, (conv1d, conv2d, conv3d)),
    ("conv_transpose", transpose_arguments, (conv_transpose1d, conv_transpose2d, conv_transpose3d)),
):
    signatures[f"{_kind}1d(layout='NLC')"] = Signature(2, in_one_row(_read))
    for _d, _function in enumerate(_functions, 1):
        _name = f"{_kind}{_d}d"
        signatures[_name] = Signature(_d, _read, _function, ORDERS[_kind], getattr(torch, _name))
