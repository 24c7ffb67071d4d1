"""The operators written in ATen's: for exported programs, and tensors that know aten alone.

ATen's operators know one padding for both sides, give one gradient only as a part of ``convolution_backward``, and take
no complex numbers. So other paddings become a pad, the missing operand one without data, complex numbers two real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import complex_product
from ..problem import Sides, add_bias, channels_of_output, padding_pairs, sum_of_bias
from ..problem import by_pytorch as pad

_aten = torch.ops.aten
Ints = Sequence[int]


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any, **_: Any) -> Tensor:
    """``convgrad::convolution``."""
    if input.is_complex():
        return complex_product(lambda a, b, bias: convolution(a, b, bias, *arguments), input, weight, bias)
    sides, known = _sides(weight.dim() - 2, *arguments)
    if sides is None:
        return _aten.convolution.default(input, weight, bias, *known)
    if not known[3]:
        return _aten.convolution.default(pad(input, sides), weight, bias, *known)
    whole = _aten.convolution.default(input, weight, None, *known)
    return add_bias(_crop(whole, sides), bias)


def convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, _bias_sizes: Any, *arguments: Any, **_: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``convgrad::convolution_backward``."""
    *rest, mask = arguments
    first, second, bias = mask
    channels = channels_of_output(weight.shape, arguments[3], arguments[5])
    sides, known = _sides(weight.dim() - 2, *rest)
    if sides is None and not input.is_complex():
        bias_sizes = [channels] if bias else None
        return _aten.convolution_backward.default(grad_output, input, weight, bias_sizes, *known, mask)
    grad_bias = sum_of_bias(grad_output, channels) if bias else None
    if sides is None or input.is_complex():
        one = grad_input(grad_output, weight, input.shape, *rest) if first else None
        two = grad_weight(grad_output, input, weight.shape, *rest) if second else None
        return one, two, grad_bias
    transposed = known[3]
    grad_output, input = (pad(grad_output, sides), input) if transposed else (grad_output, pad(input, sides))
    mask = [first, second, False]
    one, two, _none = _aten.convolution_backward.default(grad_output, input, weight, None, *known, mask)
    return _crop(one, sides) if first and not transposed else one, two, grad_bias


def _one_gradient(i: int) -> Callable[..., Tensor]:
    """``convgrad::grad_input`` (0) or ``convgrad::grad_weight`` (1): a part of ``convolution_backward``."""

    def gradient(
        grad_output: Tensor, other: Tensor, size: Ints, *arguments: Any, memory_format: Any = None, **_: Any
    ) -> Tensor:
        if grad_output.is_complex():
            found: Any = complex_product(lambda a, b, _: gradient(a, b, size, *arguments), grad_output, other)
        else:
            unread = grad_output.new_zeros(()).expand(size)  # only its shape counts
            input, weight = (unread, other) if i == 0 else (other, unread)
            found = convolution_backward(grad_output, input, weight, None, *arguments, [i == 0, i == 1, False])[i]
        return found if memory_format is None else found.contiguous(memory_format=memory_format)

    return gradient


grad_input, grad_weight = _one_gradient(0), _one_gradient(1)


def _sides(
    d: int, stride: Ints, padding: Ints, dilation: Ints, transposed: bool, output_padding: Ints, groups: int
) -> tuple[Sides | None, tuple[Any, ...]]:
    """Return the padding of the input (transposed: of grad_output) that comes first, or None, and the rest."""
    pairs = padding_pairs(padding, d)
    if all(low == high >= 0 for low, high in pairs):
        return None, (stride, [low for low, _ in pairs], dilation, transposed, output_padding, groups)
    if transposed:
        extra = [*output_padding] * (d if len(output_padding) == 1 else 1)
        pairs = tuple((low, high - more) for (low, high), more in zip(pairs, extra, strict=True))
    return pairs, (stride, [0] * d, dilation, transposed, [0] * d, groups)


def _crop(t: Tensor, sides: Sides) -> Tensor:
    return pad(t, tuple((-low, -high) for low, high in sides))
