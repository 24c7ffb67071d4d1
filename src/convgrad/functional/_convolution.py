"""The N-d functions, and the way from a call to its operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from .. import ops
from .._compat import any_autocast, dispatch_modes, function_modes, functorch_active, profiler_enabled
from ..calculus import sum_of_bias
from ..engine.cache import BoundedCache
from ..engine.observe import observers
from ..engine.request import asked
from ..errors import ShapeError
from ..ops import kernels
from ..ops.autograd import apply
from ..ops.eager import EagerCall, is_eager
from ..settings import device_flags
from ..settings import key as flags
from ..shapes import check_rank

__all__ = ["Ints", "convolution", "convolution_backward", "grad_bias", "grad_input", "grad_weight"]

Ints = int | Sequence[int]


# ---- arguments -----------------------------------------------------------------------------------


def _ints(value: Ints, d: int) -> tuple[int, ...]:
    """One integer for each dimension; lists of another length are left to validation."""
    if type(value) is int:
        return (value,) * d
    if isinstance(value, torch.SymInt):
        return (value,) * d  # pyright: ignore[reportReturnType]
    if isinstance(value, (tuple, list)):
        return tuple([v if type(v) is int or isinstance(v, torch.SymInt) else index(v) for v in value])
    return (index(value),) * d  # pyright: ignore[reportArgumentType]


def _paddings(
    padding: Ints | str, weight_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Padding as integers; ``same`` keeps the size, with the odd element on the high side."""
    d = len(weight_size) - 2
    if not isinstance(padding, str):
        return _ints(padding, d)
    if padding == "valid":
        return (0,) * d
    if padding != "same":
        raise ShapeError(f"Invalid padding string: {padding!r}, should be one of 'valid', 'same'")
    if any(s != 1 for s in stride):
        raise ShapeError("padding='same' is not supported for strided convolutions")
    steps = dilation if len(dilation) == d else tuple(dilation) * d
    totals = [dil * (k - 1) for k, dil in zip(weight_size[2:], steps, strict=False)]
    if all(total % 2 == 0 for total in totals):
        return tuple(total // 2 for total in totals)
    return tuple(p for total in totals for p in (total // 2, total - total // 2))


def conv_arguments(
    d: int, weight_size: Sequence[int], stride: Ints, padding: Ints | str, dilation: Ints, groups: int
) -> tuple[Any, ...]:
    s, dil = _ints(stride, d), _ints(dilation, d)
    return (s, _paddings(padding, weight_size, s, dil), dil, False, (0,) * d, groups)


def transpose_arguments(
    d: int,
    weight_size: Sequence[int],
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> tuple[Any, ...]:
    return (_ints(stride, d), _ints(padding, d), _ints(dilation, d), True, _ints(output_padding, d), groups)


# ---- from a call to its operator -------------------------------------------------------------------

#: Calls that PyTorch computes as they are: (complete, written, sizes, dtype, request) -> its arguments.
_stock = BoundedCache()
#: All other plain calls, by everything that validation and choice depend on.
_calls = BoundedCache()
_strided, _convolution = torch.strided, torch.convolution


def run(
    name: str,
    d: int,
    complete: Callable[..., tuple[Any, ...]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    written: tuple[Any, ...],
) -> Tensor:
    """Compute one call: as PyTorch's own, or by the short way of `ops.eager`, or through the operator.

    Args:
        name: what the user called, for messages.
        complete: makes the operator's arguments of (d, weight size, *written).
        written: the arguments as the user wrote them; a call that was seen before only compares them.
    """
    # `is_eager`, written out: on this line a frame more is a tenth of what a small convolution costs.
    eager = not is_dynamo_compiling() and (
        (input.__class__ is Tensor or input.__class__ is Parameter)
        and (weight.__class__ is Parameter or weight.__class__ is Tensor)
        and (bias is None or bias.__class__ is Parameter or bias.__class__ is Tensor)
        and not functorch_active()
        and not dispatch_modes()
        and not function_modes()
        and forward_ad._current_level < 0
        and not any_autocast()
    )
    if eager and not observers and not profiler_enabled():
        try:
            stock = _stock.get((complete, written, input.shape, weight.shape, input.dtype, asked()))
        except TypeError:  # a list among the arguments
            stock = None
        if stock is not None:
            moves = input.requires_grad
            if (
                weight.requires_grad is moves
                and (bias is None or bias.requires_grad is moves)
                and input.is_cpu
                and weight.is_cpu
                and input.layout is _strided
                and weight.layout is _strided
            ):
                return _convolution(input, weight, bias, *stock)
    key = call = None
    if eager:
        key = _key(complete, input, weight, bias, written)
        call = None if key is None else _calls.get(key)
        if call is not None and call.flags == flags(input):
            return _contract(call, input, weight, bias)
    if weight.dim() != d + 2:
        _refuse_rank(d, input, weight)
    if input.dim() != d + 2:
        return _unbatched(name, d, input, lambda x: run(name, d, complete, x, weight, bias, written))
    arguments = complete(d, weight.shape, *written)
    call = kernels.eager_call(input, weight, bias, arguments) if eager else None
    if call is None:
        return ops.convolution(input, weight, bias, *arguments)
    if key is not None:
        _calls[key] = call
        if call.is_stock():
            _stock[complete, written, input.shape, weight.shape, input.dtype, asked()] = arguments
    return _contract(call, input, weight, bias)


def _key(
    complete: Callable[..., tuple[Any, ...]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    written: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Everything that validation and choice depend on; None for a call that cannot be looked up."""
    try:
        key = (
            complete,
            written,
            input.shape,
            weight.shape,
            input.stride(),
            weight.stride(),
            input.dtype,
            weight.dtype,
            None if bias is None else (bias.shape, bias.dtype, bias.is_cpu),
            asked(),
            None if input.is_cpu and weight.is_cpu else device_flags(input, weight, bias),
        )
        hash(key)
    except (TypeError, RuntimeError):  # a list among the arguments, a tensor without strides
        return None
    return key


def _contract(call: EagerCall, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return apply(call, input, weight, bias)
    return call.below(input, weight, bias)


def _refuse_rank(d: int, input: Tensor, weight: Tensor) -> None:
    """A weight of another dimension: the message that PyTorch gives, which speaks of the batched input."""
    shape = (1, *input.shape) if input.dim() == d + 1 else tuple(input.shape)
    check_rank(shape, weight.shape)
    raise ShapeError(f"Expected a {d + 2}-dimensional weight, but got weight of size {list(weight.shape)}")


def _unbatched(name: str, d: int, input: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    if input.dim() != d + 1:
        raise ShapeError(
            f"Expected {d + 1}D (unbatched) or {d + 2}D (batched) input to {name}, "
            f"but got input of size: {list(input.shape)}"
        )
    return call(input.unsqueeze(0)).squeeze(0)


# ---- N-d -----------------------------------------------------------------------------------------


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    *,
    backward_weight: Tensor | None = None,
    backward_weight_grad: bool = False,
) -> Tensor:
    """An N-d convolution, or with ``transposed=True`` an N-d transposed convolution.

    Args:
        backward_weight: compute grad_input with this weight (feedback alignment); no second derivative then.
        backward_weight_grad: give backward_weight the gradient of weight (Kolen-Pollack) instead of none.

    Shape:
        - input: (N, C_in, *in) with D = 1, 2 or 3 spatial dimensions
        - weight, backward_weight: (C_out, C_in/groups, *k); transposed: (C_in, C_out/groups, *k)
        - bias: (C_out,)
        - result: (N, C_out, *out)

    Raises:
        ShapeError: sizes that do not belong together (a RuntimeError, worded as PyTorch's).
        DtypeError: operands of different dtypes or devices (a RuntimeError).
        BackendError: a backend that was asked for cannot (a RuntimeError).
        UnsupportedError: a convolution with backward_weight is differentiated twice.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
        >>> torch.equal(convgrad.convolution(x, w), torch.nn.functional.conv1d(x, w))
        True
    """
    d = weight.dim() - 2
    if input.dim() != d + 2 or d < 1:
        check_rank(input.shape, weight.shape)
    if backward_weight is not None:
        from ._feedback import through_other_weights  # it tells the compiler of itself, which loads the compiler

        s, dil = _ints(stride, d), _ints(dilation, d)
        pads = _paddings(padding, weight.shape, s, dil)
        arguments = (s, pads, dil, transposed, _ints(output_padding, d), groups)
        return through_other_weights(input, weight, bias, backward_weight, backward_weight_grad, arguments)
    if transposed:
        written = (stride, padding, output_padding, groups, dilation)
        return run("convolution", d, transpose_arguments, input, weight, bias, written)
    return run("convolution", d, conv_arguments, input, weight, bias, (stride, padding, dilation, groups))


def grad_input(
    input_size: Sequence[int],
    weight: Tensor,
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
) -> Tensor:
    """The gradient of a convolution with respect to its input.

    Shape:
        - input_size: the N, C_in and D spatial sizes of the input
        - weight, grad_output: as in `convolution`, grad_output like its result
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
    d = weight.dim() - 2
    s, dil = _ints(stride, d), _ints(dilation, d)
    pads = _paddings(padding, weight.shape, s, dil)
    other = weight.conj() if weight.is_complex() else weight
    rest = (list(input_size), s, pads, dil, transposed, _ints(output_padding, d), groups)
    if is_eager(grad_output, weight) and not _moves(grad_output, weight):
        return kernels.grad_input(grad_output, other, *rest)
    return ops.grad_input(grad_output, other, *rest)


def grad_weight(
    input: Tensor,
    weight_size: Sequence[int],
    grad_output: Tensor,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
) -> Tensor:
    """The gradient of a convolution with respect to its weight.

    Shape:
        - weight_size: the sizes of the weight as in `convolution`
        - input, grad_output: as in `convolution`, grad_output like its result
        - result: ``weight_size``

    Raises:
        ShapeError: a grad_output that is not of the shape of the output.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, g = torch.randn(2, 4, 9), torch.randn(2, 6, 7)
        >>> w = torch.randn(6, 4, 3, requires_grad=True)
        >>> (want,) = torch.autograd.grad(torch.nn.functional.conv1d(x, w), w, g)
        >>> torch.allclose(convgrad.grad_weight(x, w.shape, g), want, atol=1e-5)
        True
    """
    d = len(weight_size) - 2
    s, dil = _ints(stride, d), _ints(dilation, d)
    pads = _paddings(padding, weight_size, s, dil)
    other = input.conj() if input.is_complex() else input
    rest = (list(weight_size), s, pads, dil, transposed, _ints(output_padding, d), groups)
    if is_eager(grad_output, input) and not _moves(grad_output, input):
        return kernels.grad_weight(grad_output, other, *rest)
    return ops.grad_weight(grad_output, other, *rest)


def grad_bias(grad_output: Tensor) -> Tensor:
    """The gradient of a convolution with respect to its bias: a sum over batch and space.

    Shape:
        (N, C_out, *out) -> (C_out,)

    Equivalent to:
        >>> import torch, convgrad
        >>> convgrad.grad_bias(torch.ones(2, 3, 4))
        tensor([8., 8., 8.])
    """
    return sum_of_bias(grad_output)


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution that the mask asks for; None for the others.

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
    d = weight.dim() - 2
    s, dil = _ints(stride, d), _ints(dilation, d)
    pads = _paddings(padding, weight.shape, s, dil)
    if input.is_complex():
        input, weight = input.conj(), weight.conj()
    rest = (s, pads, dil, transposed, _ints(output_padding, d), groups, list(output_mask))
    sizes = None if bias_sizes is None else list(bias_sizes)
    if is_eager(grad_output, input, weight) and not _moves(grad_output, input, weight):
        return kernels.convolution_backward(grad_output, input, weight, sizes, *rest)
    return ops.convolution_backward(grad_output, input, weight, sizes, *rest)


def _moves(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
