"""From a call to its operator: arguments as people write them, and the ways that a call can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function

from .._compat import any_autocast, dispatch_modes, function_modes, functorch_active, jit_tracing, profiler_enabled
from ..engine.cache import BoundedCache
from ..engine.observe import observers
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

__all__ = [
    "Ints",
    "all_arguments",
    "conv_arguments",
    "public_functions",
    "require_tensors",
    "run",
    "sizes",
    "transpose_arguments",
]

Ints = int | Sequence[int]


# ---- arguments -----------------------------------------------------------------------------------


def integers(value: Ints, d: int, name: str) -> tuple[int, ...]:
    """One integer for each dimension; lists of another length are left to validation."""
    if type(value) is int:
        return (value,) * d
    if isinstance(value, torch.SymInt):
        return (value,) * d  # pyright: ignore[reportReturnType]
    try:
        if isinstance(value, (tuple, list)):
            return tuple([v if type(v) is int or isinstance(v, torch.SymInt) else index(v) for v in value])
        return (index(value),) * d  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise TypeError(f"{name} is an integer or a tuple of {d} integers, got {_shown(value)}") from None


def sizes(value: Sequence[int], name: str) -> list[int]:
    """A shape as a list, from whatever holds integers; a tensor whose shape was meant is refused."""
    if type(value) is torch.Size:
        return list(value)
    try:
        return [v if type(v) is int or isinstance(v, torch.SymInt) else index(v) for v in value]
    except TypeError:
        raise TypeError(f"{name} is a sequence of integers, such as a tensor's shape; got {_shown(value)}") from None


def require_tensors(name: str, **operands: object) -> None:
    """Refuse what is no tensor and stands for none, in PyTorch's words.

    Raises:
        TypeError: one of the operands.
    """
    for argument, value in operands.items():
        if not isinstance(value, Tensor) and not has_torch_function((value,)):
            raise TypeError(f"{name}(): argument '{argument}' must be Tensor, not {type(value).__name__}")


def _shown(value: object) -> str:
    """A value for a message; of a tensor its shape, for its elements may fill the screen."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _groups(value: int) -> int:
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # pyright: ignore[reportReturnType]
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"groups is an integer, got {_shown(value)}") from None


def paddings(
    padding: Ints | str, weight_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Padding as integers; ``same`` keeps the size, with the odd element on the high side."""
    d = len(weight_size) - 2
    if not isinstance(padding, str):
        return integers(_flat(padding), d, "padding")
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


def _flat(padding: Any) -> Ints:
    """Pairs of low and high, as `ConvProblem` has them, in the flat form that the operators take."""
    if not isinstance(padding, (tuple, list)) or not padding or not isinstance(padding[0], (tuple, list)):
        return padding
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in padding):
        raise ShapeError(f"expected padding to be integers, or a pair (low, high) for each dimension, got {padding}")
    return [side for pair in padding for side in pair]


def conv_arguments(
    d: int, weight_size: Sequence[int], stride: Ints, padding: Ints | str, dilation: Ints, groups: int
) -> tuple[Any, ...]:
    s, dil = integers(stride, d, "stride"), integers(dilation, d, "dilation")
    return (s, paddings(padding, weight_size, s, dil), dil, False, (0,) * d, _groups(groups))


def transpose_arguments(
    d: int,
    weight_size: Sequence[int],
    stride: Ints,
    padding: Ints,
    output_padding: Ints,
    groups: int,
    dilation: Ints,
) -> tuple[Any, ...]:
    s, dil = integers(stride, d, "stride"), integers(dilation, d, "dilation")
    pads = integers(_flat(padding), d, "padding")
    return (s, pads, dil, True, integers(output_padding, d, "output_padding"), _groups(groups))


def all_arguments(
    d: int,
    weight_size: Sequence[int],
    stride: Ints,
    padding: Ints | str,
    dilation: Ints,
    transposed: bool,
    output_padding: Ints,
    groups: int,
) -> tuple[Any, ...]:
    s, dil = integers(stride, d, "stride"), integers(dilation, d, "dilation")
    pads = paddings(padding, weight_size, s, dil)
    return (s, pads, dil, transposed, integers(output_padding, d, "output_padding"), _groups(groups))


# ---- from a call to its operator -------------------------------------------------------------------

#: Calls that PyTorch computes as they are, while nobody asks for a backend: (complete, written, sizes, dtype) -> its
#: arguments.
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
    quiet = eager and not observers and not profiler_enabled()
    if quiet and asked() is None:
        try:
            dtype = input.dtype
            stock = _stock_of((complete, written, input.shape, weight.shape, dtype))
        except (TypeError, RuntimeError):  # a list among the arguments, a tensor without sizes
            dtype = stock = None
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
                return _convolution(input, weight, bias, *stock)
            except RuntimeError:  # a bias of another size, say: the longer ways refuse it with our exceptions
                pass
    key = call = None
    eager = eager and jit_tracing() is None  # a trace must see torch operators
    if eager:
        key = _key(complete, input, weight, bias, written)
        call = None if key is None else _calls.get(key)
        if call is not None and call.flags == flags(input):
            return _contract(call, input, weight, bias, quiet)
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
            _stock[complete, written, input.shape, weight.shape, input.dtype] = tuple(map(_short, arguments))
    return _contract(call, input, weight, bias, quiet)


def _short(argument: Any) -> Any:
    """One integer for all dimensions where they agree, which PyTorch reads faster."""
    return argument[:1] if isinstance(argument, tuple) and len({*argument}) == 1 else argument


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
