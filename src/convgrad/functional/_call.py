"""From a call to its operator: the ways that a call can take."""

from __future__ import annotations

from collections.abc import Callable
from marshal import dumps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from .._compat import any_autocast, dispatch_modes, function_modes, functorch_active, jit_tracing, profiler_enabled
from ..engine.cache import BoundedCache
from ..engine.events import observers
from ..engine.request import asked
from ..errors import ShapeError
from ..ops import kernels
from ..ops.asked import operator
from ..ops.autograd import apply
from ..ops.eager import EagerCall
from ..settings import device_flags
from ..settings import key as flags
from ..shapes import check_rank
from ..validation import refuse_nested

__all__ = ["public_functions", "run"]

#: Calls that PyTorch computes as they are, while nobody asks for a backend: (complete, kinds, sizes, dtype) -> its
#: function of (input, weight, bias). The kinds are `marshal`'s bytes of what the user wrote: in them 1, 1.0 and True
#: differ, which are one key to a dictionary but not one argument to PyTorch.
_stock = BoundedCache()
_stock_of = _stock.get
#: All other plain calls, by everything that validation and choice depend on.
_calls = BoundedCache()
#: The functions that people call, by name; each file of them adds its own.
public_functions: dict[str, Callable[..., Tensor]] = {}
_strided, _convolution, _recording = torch.strided, torch.convolution, torch.is_grad_enabled


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
        written: the arguments as the user wrote them; of a call that was seen before nobody looks into them.
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
    quiet = eager and not observers and not profiler_enabled()
    kinds = dtype = stock = None
    if eager:
        try:
            kinds = dumps(written, 2)
            if quiet and asked() is None:
                dtype = input.dtype
                stock = _stock_of((complete, kinds, input.shape, weight.shape, dtype))
        except (ValueError, RuntimeError):  # an argument of a kind without bytes, a tensor without sizes
            pass
        if (
            stock is not None
            and weight.dtype is dtype
            and (bias is None or (bias.dtype is dtype and bias.is_cpu))
            and input.is_cpu
            and weight.is_cpu
            and input.layout is _strided
            and weight.layout is _strided
            and (
                (
                    weight.requires_grad is input.requires_grad
                    and (bias is None or input.requires_grad or not bias.requires_grad)
                )
                or not _recording()
            )
        ):
            try:
                return stock(input, weight, bias)
            except RuntimeError:  # a bias of another size, say: the longer ways refuse it with our exceptions
                pass
    key = None
    eager = eager and jit_tracing() is None  # a trace must see torch operators
    if eager and kinds is not None:
        key = _key(complete, kinds, input, weight, bias)
        call = None if key is None else _calls.get(key)
        if call is not None and call.flags == flags(input):
            return _contract(call, input, weight, bias, quiet)
    return _first_call(name, d, complete, input, weight, bias, written, kinds, key, eager, quiet)


def _first_call(
    name: str,
    d: int,
    complete: Callable[..., tuple[Any, ...]],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    written: tuple[Any, ...],
    kinds: bytes | None,
    key: tuple[Any, ...] | None,
    eager: bool,
    quiet: bool,
) -> Tensor:
    """A call that was not seen before: validated, planned and, if it has a key, remembered."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor | None)):
        return _not_tensors(name, input, weight, bias, written)
    refuse_nested(input, weight, bias)
    if weight.dim() != d + 2:
        _refuse_rank(d, input, weight)
    if input.dim() != d + 2:
        return _unbatched(name, d, input, lambda x: run(name, d, complete, x, weight, bias, written))
    arguments = complete(d, weight.shape, *written)
    call = kernels.eager_call(input, weight, bias, arguments) if eager else None
    if call is None:
        return operator("convolution")(input, weight, bias, *arguments)
    if key is not None:
        _calls[key] = call
        if call.stock.any_strides:
            _stock[complete, kinds, input.shape, weight.shape, input.dtype] = _stock_function(d, arguments)
    return _contract(call, input, weight, bias, quiet)


def _stock_function(d: int, arguments: tuple[Any, ...]) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """PyTorch's function of (input, weight, bias) with the other arguments fixed, in the form that it reads fastest."""
    # One integer for all dimensions where they agree, and none at all where they are what PyTorch assumes.
    short: list[Any] = [a[:1] if isinstance(a, tuple) and len({*a}) == 1 else a for a in arguments]
    stride, padding, dilation, transposed, output_padding, groups = short
    if short == [(1,), (0,), (1,), transposed, (0,), 1]:
        return getattr(torch, f"conv_transpose{d}d" if transposed else f"conv{d}d")
    return lambda input, weight, bias: _convolution(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


def _key(
    complete: Callable[..., tuple[Any, ...]], kinds: bytes, input: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Any, ...] | None:
    """Everything that validation and choice depend on; None for a call that cannot be looked up."""
    try:
        return (
            complete,
            kinds,
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
    except RuntimeError:  # a tensor without strides
        return None


def _contract(call: EagerCall, input: Tensor, weight: Tensor, bias: Tensor | None, quiet: bool) -> Tensor:
    """By PyTorch's own operator, if nobody watches and that is the same; else by the plan, with our autograd."""
    first, second = input.requires_grad, weight.requires_grad
    if _recording() and (first or second or (bias is not None and bias.requires_grad)):
        if quiet and first and second and call.stock.autograd:
            return _convolution(input, weight, bias, *call.form.arguments)
        return apply(call, input, weight, bias)
    if quiet and call.stock.forward:
        return _convolution(input, weight, bias, *call.form.arguments)
    return call.below(input, weight, bias)


def _not_tensors(name: str, input: object, weight: object, bias: object, written: tuple[Any, ...]) -> Any:
    """What is no tensor may stand for one (a proxy of torch.fx, say); anything else is refused as PyTorch does."""
    operands = {"input": input, "weight": weight, "bias": bias}
    if has_torch_function(tuple(operands.values())):
        public = public_functions.get(name)
        if public is not None:
            return handle_torch_function(public, tuple(operands.values()), input, weight, bias, *written)
    for position, (argument, value) in enumerate(operands.items(), start=1):
        if not isinstance(value, Tensor) and not (argument == "bias" and value is None):
            kind = type(value).__name__
            raise TypeError(f"{name}(): argument '{argument}' (position {position}) must be Tensor, not {kind}")
    raise TypeError(f"{name}() takes tensors")


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
