"""The operators' arguments, from those that users write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from operator import index
from typing import Any, ParamSpec, TypeVar
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import ShapeError
from ..problem import effective_kernel, padding_pairs, refuse_nested

Ints = int | Sequence[int]
#: Integers for both sides, or low and high of each dimension, flat or in pairs.
Padding = Ints | Sequence[Sequence[int]]
P = ParamSpec("P")
R = TypeVar("R")


def integers(value: Any, d: int, name: str) -> tuple[int, ...]:
    """Return an integer for each dimension, of any type that PyTorch accepts; of a tuple only the first is no bool."""
    if type(value) is int:
        return (value,) * d
    try:
        if not isinstance(value, (tuple, list)):
            return (_integer(value),) * d
        if not value or not isinstance(value[0], bool):
            return tuple([v if isinstance(v, int) else _integer(v) for v in value])
    except TypeError:
        pass
    raise TypeError(f"{name} is an integer or a tuple of {d} integers, got {_shown(value)}")


def _integer(value: Any) -> int:
    """Return a value as an integer; raise a TypeError for a bool."""
    if isinstance(value, torch.SymInt):
        return value  # pyright: ignore[reportReturnType]
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype is torch.bool):
        raise TypeError
    return index(value)


def sizes(value: Sequence[int], name: str) -> list[int]:
    """Return a shape as a list, from any sequence of integers; refuse a tensor in the place of its shape."""
    if type(value) is torch.Size and not (value and type(value[0]) is Tensor):  # in a trace of jit they are
        return list(value)
    try:
        return [v if type(v) is int or isinstance(v, torch.SymInt) else index(v) for v in value]
    except TypeError:
        raise TypeError(f"{name} is a sequence of integers, such as a tensor's shape; got {_shown(value)}") from None


def require_tensors(name: str, **operands: object) -> None:
    """Refuse what is neither a tensor nor stands for one, in PyTorch's words."""
    for argument, value in operands.items():
        if not isinstance(value, Tensor) and not has_torch_function((value,)):
            raise TypeError(f"{name}(): argument '{argument}' must be Tensor, not {type(value).__name__}")


def of_tensors(*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the operands of a function, which have these names: each is a tensor, or an object that stands for one.

    One whose default is None may be None. Nested tensors are refused. An object that stands for a tensor, such as a
    proxy of ``torch.fx``, handles the call.
    """

    def made(function: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(function).parameters
        required = {name for name in names if parameters[name].default is not None}

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given: dict[str, Any] = {**dict(zip(parameters, args, strict=False)), **kwargs}
            operands = {n: given[n] for n in names if n in given and (n in required or given[n] is not None)}
            require_tensors(function.__name__, **operands)
            if not all(isinstance(operand, Tensor) for operand in operands.values()):
                return handle_torch_function(checked, operands.values(), *args, **kwargs)
            refuse_nested(*operands.values())
            return function(*args, **kwargs)

        return checked

    return made


def _shown(value: object) -> str:
    """Return a value as text for a message; a tensor is shown by its shape."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def require_bool(name: str, value: object) -> None:
    """Refuse anything but a bool, as PyTorch does."""
    if value is not True and value is not False:
        hint = " (conv2d_input and conv2d_weight take the arguments of torch.nn.grad)" if name == "transposed" else ""
        raise TypeError(f"{name} is True or False, got {_shown(value)}{hint}")


def paddings(
    padding: Padding | str, weight_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return padding as integers, one for each dimension or low and high of each: ``same`` has the odd one high."""
    d = len(weight_size) - 2
    if not isinstance(padding, str):
        return _padding_integers(padding, d)
    if padding == "valid" or d < 1:  # no weight, which is refused when its shape is looked at
        return (0,) * d
    kernel = _constants(weight_size[2:])
    steps = dilation if len(dilation) == d else tuple(dilation) * d
    totals = [dil * (k - 1) for k, dil in zip(kernel, steps, strict=False)]
    if padding == "causal":
        if d == 1:
            return (totals[0], 0)
        raise ShapeError(
            "padding='causal' is for 1-D convolutions; write a pair (low, high) for each dimension, "
            f"(dilation * (kernel - 1), 0) for one that is causal: padding=(({totals[0]}, 0), ...)"
        )
    if padding != "same":
        raise ShapeError(f"Invalid padding string: {padding!r}, should be one of 'valid', 'same', 'causal'")
    if any(s != 1 for s in stride):
        raise ShapeError("padding='same' is not supported for strided convolutions")
    return _shortest(tuple(p for total in totals for p in (total // 2, total - total // 2)))


def sides_of(module: Any) -> tuple[tuple[int, int], ...]:
    """Return low and high padding of each dimension of a convolution module."""
    size = (0, 0, *module.kernel_size)  # the weight may be a proxy of torch.fx, without sizes
    return padding_pairs(paddings(module.padding, size, module.stride, module.dilation), len(size) - 2)


def _padding_integers(padding: Any, d: int) -> tuple[int, ...]:
    """Return padding in the operators' flat form, from integers or, as in `ConvProblem`, pairs (low, high)."""
    if isinstance(padding, (tuple, list)) and padding and isinstance(padding[0], (tuple, list)):
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in padding):
            raise ShapeError(
                f"expected padding to be integers, or a pair (low, high) for each dimension, got {padding}"
            )
        padding = [side for pair in padding for side in pair]
    pads = integers(padding, d, "padding")
    if len(pads) in (1, d) and any(isinstance(p, int) and p < 0 for p in pads):
        # the operators crop where low and high are given
        return tuple(p for p in pads * (d // len(pads)) for _ in "lh")
    return _shortest(pads) if len(pads) == 2 * d else pads


def _shortest(both: tuple[int, ...]) -> tuple[int, ...]:
    """Return low and high of each dimension as one number where they agree, as PyTorch's operators take them."""
    return both[::2] if both[::2] == both[1::2] and all(p >= 0 for p in both) else both


def _constants(sizes: Sequence[Any]) -> Sequence[int]:
    """Return sizes as integers, also in a jit trace, where they are tensors, without its warning."""
    if not sizes or type(sizes[0]) is not Tensor:
        return sizes
    with catch_warnings():
        simplefilter("ignore")
        return [int(n) for n in sizes]


def gradient_arguments(
    form: tuple[Any, ...], input_size: Sequence[int], weight_size: Sequence[int], output_size: Sequence[int]
) -> tuple[Any, ...]:
    """Return `all_arguments`, with the output_padding, if none was stated, that gives a known output size."""
    d = len(weight_size) - 2
    arguments = all_arguments(d, weight_size, *form)
    stride, padding, dilation, transposed, stated, groups = arguments
    if not transposed or any(stated) or {len(input_size), len(output_size)} != {d + 2}:
        return arguments
    if not len(stride) == len(dilation) == len(stated) == d:
        return arguments
    inner, outer, kernel = map(_constants, (input_size[2:], output_size[2:], weight_size[2:]))
    dims = zip(inner, outer, kernel, stride, padding_pairs(padding, d), dilation, strict=True)
    missing = [out - ((n - 1) * s - low - high + effective_kernel(k, dil)) for n, out, k, s, (low, high), dil in dims]
    if all(0 <= m < max(s, dil) for m, s, dil in zip(missing, stride, dilation, strict=True)):
        return (stride, padding, dilation, transposed, tuple(missing), groups)
    return arguments


def all_arguments(
    d: int, weight_size: Sequence[int], stride: Ints, padding: Padding | str, dilation: Ints, transposed: bool,
    output_padding: Ints, groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the operator's arguments; a plain convolution ignores output_padding, and its gradients refuse it."""
    require_bool("transposed", transposed)
    s, dil = integers(stride, d, "stride"), integers(dilation, d, "dilation")
    extra = integers(output_padding, d, "output_padding")
    pads = _padding_integers(padding, d) if transposed else paddings(padding, weight_size, s, dil)
    try:
        return (s, pads, dil, transposed, extra, groups if type(groups) is int else _integer(groups))
    except TypeError:
        raise TypeError(f"groups is an integer, got {_shown(groups)}") from None
