"""THNN's spatial convolution by its old names: 2-D, undilated, ungrouped, on the CPU or in CUDA.

``thnn_conv2d`` and ``slow_conv2d`` are one kernel, PyTorch's own (the backend ``aten:native``): unfold the input to
columns, multiply. Its scratch tensors ``finput`` and ``fgrad_input`` were once passed from forward to backward. Today
each pass makes its own; they are accepted, empty or not, and not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from .. import functional
from ..engine.registry import get
from ..errors import ShapeError
from ._forced import Grads, Ints, backward, forced

__all__ = [
    "slow_conv2d",
    "slow_conv2d_backward",
    "slow_conv2d_forward",
    "thnn_conv2d",
    "thnn_conv2d_backward",
    "thnn_conv2d_forward",
]

Scratch = Tensor | Sequence[bool] | None


def thnn_conv2d(
    self: Tensor,
    weight: Tensor,
    kernel_size: Ints,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
) -> Tensor:
    """A 2-D convolution by PyTorch's own kernel.

    Shape:
        - self: (N, C_in, H, W) or (C_in, H, W)
        - weight: (C_out, C_in, *kernel_size), or the same as a matrix of C_out rows
        - result: (N, C_out, *out), without N where self has none

    Raises:
        ShapeError: a kernel_size that is not the weight's, or operands that do not belong together.

    Equivalent to:
        >>> import torch
        >>> x, w = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3)
        >>> want = torch.nn.functional.conv2d(x, w, stride=2, padding=1)
        >>> torch.allclose(thnn_conv2d(x, w, [3, 3], None, [2, 2], [1, 1]), want, atol=1e-5)
        True
    """
    return _convolution("thnn_conv2d", self, weight, kernel_size, bias, stride, padding)


def thnn_conv2d_forward(
    self: Tensor, weight: Tensor, kernel_size: Ints, bias: Tensor | None, stride: Ints, padding: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    """`thnn_conv2d` as it was below autograd: (output, finput, fgrad_input), the last two empty today.

    Shape:
        - as in `thnn_conv2d`

    Raises:
        ShapeError: as in `thnn_conv2d`.
    """
    output = _convolution("thnn_conv2d_forward", self, weight, kernel_size, bias, stride, padding)
    return output, output.new_empty(0), output.new_empty(0)


def thnn_conv2d_backward(
    grad_output: Tensor,
    self: Tensor,
    weight: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    finput: Scratch = None,
    fgrad_input: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Grads:
    """The gradients of `thnn_conv2d`.

    Args:
        finput: not read; today's order, in which the mask stands here, is understood too.
        fgrad_input: not read.
        output_mask: which of grad_input, grad_weight, grad_bias.

    Shape:
        - grad_output: like the result of `thnn_conv2d`
        - result: like self, like weight, and (C_out,); None where the mask does not ask

    Raises:
        ShapeError: a kernel_size that is not the weight's, or operands that do not belong together.

    Equivalent to:
        >>> import torch
        >>> x, w, g = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 4, 3)
        >>> empty = torch.empty(0)
        >>> gi, gw, gb = thnn_conv2d_backward(g, x, w, [3, 3], [1, 1], [0, 0], empty, empty, [True, False, True])
        >>> gi.shape, gw, gb.shape
        (torch.Size([2, 3, 6, 5]), None, torch.Size([4]))
    """
    scratch = (finput, fgrad_input, output_mask)
    return _gradients("thnn_conv2d_backward", grad_output, self, weight, kernel_size, stride, padding, scratch)


def slow_conv2d(
    self: Tensor,
    weight: Tensor,
    kernel_size: Ints,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
) -> Tensor:
    """`thnn_conv2d` by the name that its kernel got later.

    Shape:
        - as in `thnn_conv2d`

    Raises:
        ShapeError: as in `thnn_conv2d`.
    """
    return _convolution("slow_conv2d", self, weight, kernel_size, bias, stride, padding)


def slow_conv2d_forward(
    self: Tensor, weight: Tensor, kernel_size: Ints, bias: Tensor | None, stride: Ints, padding: Ints
) -> tuple[Tensor, Tensor, Tensor]:
    """`thnn_conv2d_forward` by its later name.

    Shape:
        - as in `thnn_conv2d`

    Raises:
        ShapeError: as in `thnn_conv2d`.
    """
    output = _convolution("slow_conv2d_forward", self, weight, kernel_size, bias, stride, padding)
    return output, output.new_empty(0), output.new_empty(0)


def slow_conv2d_backward(
    grad_output: Tensor,
    self: Tensor,
    weight: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    finput: Scratch = None,
    fgrad_input: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> Grads:
    """`thnn_conv2d_backward` by its later name.

    Shape:
        - as in `thnn_conv2d_backward`

    Raises:
        ShapeError: as in `thnn_conv2d_backward`.
    """
    scratch = (finput, fgrad_input, output_mask)
    return _gradients("slow_conv2d_backward", grad_output, self, weight, kernel_size, stride, padding, scratch)


def _convolution(
    name: str,
    self: Tensor,
    weight: Tensor,
    kernel_size: Ints,
    bias: Tensor | None,
    stride: Ints,
    padding: Ints,
) -> Tensor:
    weight = _as_4d(name, weight, kernel_size)
    call: Callable[..., Tensor] = functional.conv2d  # takes an input without N
    with forced(name, get("aten:native"), self):
        return call(self, weight, bias, stride, padding)


def _gradients(
    name: str,
    grad_output: Tensor,
    self: Tensor,
    weight: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    scratch: tuple[Scratch, Tensor | None, Sequence[bool]],
) -> Grads:
    finput, _, mask = scratch
    if finput is not None and not isinstance(finput, Tensor):
        mask = finput
    matrix, single = weight.shape, self.dim() == 3
    weight = _as_4d(name, weight, kernel_size)
    if single:
        self, grad_output = self.unsqueeze(0), grad_output.unsqueeze(0)
    with forced(name, get("aten:native"), self):
        grads = list(backward(grad_output, self, weight, (stride, padding, 1, 1), mask))
    if single and grads[0] is not None:
        grads[0] = grads[0].squeeze(0)
    if grads[1] is not None:
        grads[1] = grads[1].reshape(matrix)
    return tuple(grads)


def _as_4d(name: str, weight: Tensor, kernel_size: Ints) -> Tensor:
    """The weight with its kernel sizes, which THNN also took as a matrix."""
    kernel = (kernel_size,) * 2 if isinstance(kernel_size, int) else tuple(kernel_size)
    if len(kernel) == 1:
        kernel *= 2
    if weight.dim() == 2 and len(kernel) == 2 and prod(kernel) > 0 and weight.shape[1] % prod(kernel) == 0:
        return weight.reshape(weight.shape[0], -1, *kernel)
    if weight.dim() != 4 or tuple(weight.shape[2:]) != kernel:
        raise ShapeError(
            f"{name}: expected a weight (C_out, C_in, *kernel_size) or (C_out, C_in * product of kernel_size) "
            f"with kernel_size={list(kernel)}, but got weight of size {list(weight.shape)}"
        )
    return weight
