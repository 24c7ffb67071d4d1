"""The gradients of a convolution as functions: the N-d ones, and those of 1 to 3 dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor

from ..errors import ShapeError
from ..problem import Ints, Padding, check_backward, conv_geometry, require_bool, sum_of_bias
from ._arguments import gradient_arguments, of_tensors, sizes
from ._call import gradient

__all__ = [
    "conv1d_input", "conv1d_weight", "conv2d_input", "conv2d_weight", "conv3d_input", "conv3d_weight",
    "conv_transpose1d_input", "conv_transpose1d_weight", "conv_transpose2d_input", "conv_transpose2d_weight",
    "conv_transpose3d_input", "conv_transpose3d_weight", "convolution_backward", "grad_bias", "grad_input",
    "grad_weight",
]  # fmt: skip


@of_tensors("weight", "grad_output")
def grad_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor, stride: Ints = 1, padding: Padding | str = 0,
    dilation: Ints = 1, transposed: bool = False, output_padding: Ints = 0, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the gradient of a convolution with respect to its input.

    Shape:
        - input_size, weight, grad_output: as input, weight and result of `convolution`; or without N
        - result: ``input_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> w, g = torch.randn(6, 4, 3), torch.randn(2, 6, 7)
        >>> x = torch.randn(2, 4, 9, requires_grad=True)
        >>> (want,) = torch.autograd.grad(torch.nn.functional.conv1d(x, w), x, g)
        >>> torch.allclose(convgrad.grad_input(x.shape, w, g), want, atol=1e-5)
        True
    """
    form = (stride, padding, dilation, transposed, output_padding, groups)
    size = sizes(input_size, "input_size")
    if len(size) == grad_output.dim() == weight.dim() - 1:
        return grad_input((1, *size), weight, grad_output.unsqueeze(0), *form).squeeze(0)
    arguments = gradient_arguments(form, size, weight.shape, grad_output.shape)
    return gradient("grad_input", (size, *arguments), grad_output, weight.conj())


@of_tensors("input", "grad_output")
def grad_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor, stride: Ints = 1, padding: Padding | str = 0,
    dilation: Ints = 1, transposed: bool = False, output_padding: Ints = 0, groups: int = 1,
    *, per_sample: bool = False,
) -> Tensor:  # fmt: skip
    """Return the gradient of a convolution with respect to its weight.

    Args:
        per_sample: return one gradient for each sample of the batch, computed by one convolution with N times as many
            groups (Rochette et al., "Efficient Per-Example Gradient Computations in Convolutional Neural Networks",
            arXiv:1912.06015); a depthwise one remains depthwise.

    Shape:
        - input, weight_size, grad_output: as input, weight and result of `convolution`; or without N
        - result: ``weight_size``; per sample (N, *weight_size)

    Raises:
        ShapeError: as `grad_input`.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 9), torch.randn(2, 6, 7)
        >>> w = torch.randn(6, 4, 3, requires_grad=True)
        >>> (want,) = torch.autograd.grad(torch.nn.functional.conv1d(x, w), w, g)
        >>> torch.allclose(convgrad.grad_weight(x, w.shape, g), want, atol=1e-5)
        True
    """
    require_bool("per_sample", per_sample)
    size = sizes(weight_size, "weight_size")
    form = (stride, padding, dilation, transposed, output_padding, groups)
    if input.dim() == grad_output.dim() == len(size) - 1 and not per_sample:
        return grad_weight(input.unsqueeze(0), size, grad_output.unsqueeze(0), *form)
    *rest, groups = arguments = gradient_arguments(form, input.shape, size, grad_output.shape)
    if not per_sample:
        return gradient("grad_weight", (size, *arguments), grad_output, input.conj())
    check_backward(grad_output.shape, input.shape, size, None, conv_geometry(size, *arguments))
    if (n := input.shape[0]) == 0:
        return grad_output.new_zeros((0, *size))
    # Samples become groups of one image, [1, N * C, *].
    wide = ([n * size[0], *size[1:]], *rest, n * groups)
    one_image = [t.flatten(0, 1).unsqueeze(0) for t in (grad_output, input.conj())]
    return gradient("grad_weight", wide, *one_image).unflatten(0, (n, size[0]))


@of_tensors("grad_output")
def grad_bias(grad_output: Tensor, *, per_sample: bool = False) -> Tensor:
    """Return the gradient of a convolution with respect to its bias: a sum over batch and space.

    Args:
        per_sample: return one gradient for each sample of the batch.

    Shape:
        (N, C_out, *out) -> (C_out,); per sample (N, C_out). The batch is needed: without it an image looks like a
        batch of sequences.

    Raises:
        ShapeError: a grad_output without a batch or without spatial dimensions.

    Equivalent to:
        >>> import torch, convgrad
        >>> convgrad.grad_bias(torch.ones(2, 3, 4))
        tensor([8., 8., 8.])
    """
    require_bool("per_sample", per_sample)
    if grad_output.dim() < 3:
        raise ShapeError(f"Expected grad_output (N, C_out, *out), but got one of size {list(grad_output.shape)}")
    return grad_output.flatten(2).sum(2) if per_sample else sum_of_bias(grad_output)


@of_tensors("grad_output", "input", "weight")
def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None = None, stride: Ints = 1,
    padding: Padding | str = 0, dilation: Ints = 1, transposed: bool = False, output_padding: Ints = 0, groups: int = 1,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of a convolution that the mask selects; None for the others.

    Shape:
        - grad_output: (N, C_out, *out), like the result of `convolution`
        - result: like input, like weight, and (C_out,)

    Raises:
        ShapeError: a grad_output or bias_sizes that do not belong to input and weight.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w, g = torch.randn(2, 4, 9), torch.randn(6, 4, 3), torch.randn(2, 6, 7)
        >>> gi, gw, gb = convgrad.convolution_backward(g, x, w, output_mask=(True, False, True))
        >>> gi.shape, gw, gb.shape
        (torch.Size([2, 4, 9]), None, torch.Size([6]))
    """
    form = (stride, padding, dilation, transposed, output_padding, groups)
    arguments = gradient_arguments(form, input.shape, weight.shape, grad_output.shape)
    if not isinstance(output_mask, (tuple, list)) or not all(isinstance(wanted, bool) for wanted in output_mask):
        raise TypeError(f"output_mask is a sequence of three booleans, got {output_mask!r}")
    rest = (None if bias_sizes is None else sizes(bias_sizes, "bias_sizes"), *arguments, list(output_mask))
    return gradient("convolution_backward", rest, grad_output, input.conj(), weight.conj())


# ---- of 1, 2 and 3 dimensions, with the arguments of torch.nn.grad: the operands say how many -------


def conv2d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return `conv2d`'s gradient with respect to its input, as ``torch.nn.grad.conv2d_input`` (see `grad_input`)."""
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, False, 0, groups)


def conv2d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return `conv2d`'s gradient with respect to its weight, as ``torch.nn.grad.conv2d_weight`` (see `grad_weight`)."""
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, False, 0, groups)


def conv_transpose2d_input(
    input_size: Sequence[int], weight: Tensor, grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:  # fmt: skip
    """Return `conv_transpose2d`'s gradient with respect to its input (see `grad_input`)."""
    return grad_input(input_size, weight, grad_output, stride, padding, dilation, True, output_padding, groups)


def conv_transpose2d_weight(
    input: Tensor, weight_size: Sequence[int], grad_output: Tensor,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:  # fmt: skip
    """Return `conv_transpose2d`'s gradient with respect to its weight (see `grad_weight`)."""
    return grad_weight(input, weight_size, grad_output, stride, padding, dilation, True, output_padding, groups)


_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def _of(d: int, function: _Function) -> _Function:
    """Return a function of the operands' dimensions under its name for d of them."""
    name = function.__name__.replace("2d", f"{d}d")
    made: Any = FunctionType(function.__code__, globals(), name, function.__defaults__)
    update_wrapper(made, function, ("__module__", "__doc__", "__annotations__"), ())
    return made


conv1d_input, conv3d_input = _of(1, conv2d_input), _of(3, conv2d_input)
conv1d_weight, conv3d_weight = _of(1, conv2d_weight), _of(3, conv2d_weight)
conv_transpose1d_input, conv_transpose3d_input = _of(1, conv_transpose2d_input), _of(3, conv_transpose2d_input)
conv_transpose1d_weight, conv_transpose3d_weight = _of(1, conv_transpose2d_weight), _of(3, conv_transpose2d_weight)
_DOCSTRING = """{first}

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4{sevens}, requires_grad=True), torch.randn(4, 4{threes}, requires_grad=True)
        >>> y = torch.nn.functional.{function}(x, w)
        >>> g = torch.randn_like(y)
        >>> (expected,) = torch.autograd.grad(y, {of}, g)
        >>> torch.allclose(convgrad.{function}_{argument}({sizes}, g), expected, atol=1e-4)
        True
    """
for _name in (name for name in __all__ if name.startswith("conv") and "d_" in name):
    _function, _argument = _name.rsplit("_", 1)
    _of_what, _sizes = ("x", "x.shape, w") if _argument == "input" else ("w", "x, w.shape")
    _d, _made = int(_function[-2]), globals()[_name]
    _made.__doc__ = _DOCSTRING.format(
        first=_made.__doc__.replace("2d", f"{_d}d"), sevens=", 7" * _d, threes=", 3" * _d, function=_function,
        argument=_argument, of=_of_what, sizes=_sizes,
    )  # fmt: skip
