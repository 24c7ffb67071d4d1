"""The gradients of the 1-d, 2-d and 3-d names: the signatures of ``torch.nn.grad``; the same for transposed ones.

Each is written once: only its name, its docstring and the rank of an operand without a batch depend on the dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ._arguments import Ints, require_tensors, sizes
from ._gradients import grad_input, grad_weight
from ._names import words

Function = Callable[..., Tensor]


def _of_dimensions(d: int):
    """The four functions of ``d`` dimensions; those of transposed convolutions have another order of arguments."""

    def conv_input(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        rest = (stride, padding, dilation, False, 0, groups)
        return _of_input(conv_input, d, input_size, weight, grad_output, *rest)

    def conv_weight(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints | str = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> Tensor:
        rest = (stride, padding, dilation, False, 0, groups)
        return _of_weight(conv_weight, d, input, weight_size, grad_output, *rest)

    def conv_transpose_input(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        rest = (stride, padding, dilation, True, output_padding, groups)
        return _of_input(conv_transpose_input, d, input_size, weight, grad_output, *rest)

    def conv_transpose_weight(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> Tensor:
        rest = (stride, padding, dilation, True, output_padding, groups)
        return _of_weight(conv_transpose_weight, d, input, weight_size, grad_output, *rest)

    for function in (conv_input, conv_weight, conv_transpose_input, conv_transpose_weight):
        kind, operand = function.__name__.rsplit("_", 1)
        _name(function, f"{kind}{d}d", operand)
    return conv_input, conv_weight, conv_transpose_input, conv_transpose_weight


def _of_input(
    function: Function, d: int, input_size: Sequence[int], weight: Tensor, grad_output: Tensor, *rest: Any
) -> Tensor:
    require_tensors(function.__name__, weight=weight, grad_output=grad_output)
    size = sizes(input_size, "input_size")
    if len(size) != d + 1 or grad_output.dim() != d + 1:
        return grad_input(size, weight, grad_output, *rest)
    return grad_input((1, *size), weight, grad_output.unsqueeze(0), *rest).squeeze(0)


def _of_weight(
    function: Function, d: int, input: Tensor, weight_size: Sequence[int], grad_output: Tensor, *rest: Any
) -> Tensor:
    require_tensors(function.__name__, input=input, grad_output=grad_output)
    if input.dim() != d + 1 or grad_output.dim() != d + 1:
        return grad_weight(input, weight_size, grad_output, *rest)
    return grad_weight(input.unsqueeze(0), weight_size, grad_output.unsqueeze(0), *rest)


_DOCSTRING = """The gradient of `{name}` with respect to its {operand}{as_in_torch}.

    Shape:
        - {input}: (N, C_in, {size}), or without N
        - {of_weight}: the weight's, as in `{name}`
        - grad_output: like the result of `{name}`
        - result: ``{operand}_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x = torch.randn(2, 4{x7}, requires_grad=True)
        >>> w = torch.randn({channels}{x3}, requires_grad=True)
        >>> y = torch.nn.functional.{name}(x, w)
        >>> (want,) = torch.autograd.grad(y.sum(), {variable})
        >>> got = convgrad.{gradient}({arguments}, torch.ones_like(y))
        >>> torch.allclose(got, want, atol=1e-4)
        True
    """


def _name(function: Function, forward: str, operand: str) -> None:
    """Name a function and write its docstring."""
    name, of_input = f"{forward}_{operand}", operand == "input"
    function.__name__ = function.__qualname__ = name
    function.__doc__ = _DOCSTRING.format(
        **words(forward),
        gradient=name,
        operand=operand,
        as_in_torch="" if "transpose" in name else f", as ``torch.nn.grad.{name}``",
        input="input_size" if of_input else "input",
        of_weight="weight" if of_input else "weight_size",
        variable="x" if of_input else "w",
        arguments="x.shape, w" if of_input else "x, w.shape",
    )


conv1d_input, conv1d_weight, conv_transpose1d_input, conv_transpose1d_weight = _of_dimensions(1)
conv2d_input, conv2d_weight, conv_transpose2d_input, conv_transpose2d_weight = _of_dimensions(2)
conv3d_input, conv3d_weight, conv_transpose3d_input, conv_transpose3d_weight = _of_dimensions(3)
