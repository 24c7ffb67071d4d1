"""A function's operands, checked, and what its arguments say beside the operators' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from operator import index
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..problem import all_arguments, as_text, constant_sizes, effective_kernel, padding_pairs, paddings, refuse_nested

P = ParamSpec("P")
R = TypeVar("R")


def sizes(value: Sequence[int], name: str) -> list[int]:
    """Return a shape as a list, from any sequence of integers; refuse a tensor in the place of its shape."""
    if type(value) is torch.Size and not (value and type(value[0]) is Tensor):  # in a trace of jit they are
        return list(value)
    try:
        return [v if type(v) is int or isinstance(v, torch.SymInt) else index(v) for v in value]
    except TypeError:
        raise TypeError(f"{name} is a sequence of integers, such as a tensor's shape; got {as_text(value)}") from None


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


def sides_of(module: Any) -> tuple[tuple[int, int], ...]:
    """Return low and high padding of each dimension of a convolution module."""
    size = (0, 0, *module.kernel_size)  # the weight may be a proxy of torch.fx, without sizes
    return padding_pairs(paddings(module.padding, size, module.stride, module.dilation), len(size) - 2)


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
    inner, outer, kernel = map(constant_sizes, (input_size[2:], output_size[2:], weight_size[2:]))
    dims = zip(inner, outer, kernel, stride, padding_pairs(padding, d), dilation, strict=True)
    missing = [out - ((n - 1) * s - low - high + effective_kernel(k, dil)) for n, out, k, s, (low, high), dil in dims]
    if all(0 <= m < max(s, dil) for m, s, dil in zip(missing, stride, dilation, strict=True)):
        return (stride, padding, dilation, transposed, tuple(missing), groups)
    return arguments
