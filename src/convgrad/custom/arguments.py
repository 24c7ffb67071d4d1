"""What a user's function is called with: tensors, values of the problem by name, and constants."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..problem import OPERANDS, ConvProblem, Pass

__all__ = ["VALUES", "check", "tensors_of", "values"]

#: What a function may be given besides tensors, in PyTorch's words. Sizes have batch and channels.
VALUES: dict[str, Callable[[ConvProblem], Any]] = {
    "problem": lambda p: p,
    "stride": lambda p: p.stride,
    "padding": lambda p: tuple(low for low, _ in p.padding),
    "dilation": lambda p: p.dilation,
    "groups": lambda p: p.groups,
    "kernel_size": lambda p: p.kernel_size,
    "input_size": lambda p: p.input_shape,
    "weight_size": lambda p: p.weight_shape,
    "output_size": lambda p: p.output_shape,
    "transposed": lambda p: False,
    "output_padding": lambda p: (0,) * p.ndim,
}
_ARGUMENT = re.compile(r"([a-z_]+)(?:\[(\d+)\])?")


def tensors_of(pass_: Pass) -> tuple[str, ...]:
    """The names of the tensors that a function for this pass may be given."""
    return (*OPERANDS[pass_], "bias") if pass_ == "forward" else OPERANDS[pass_]


def check(function: Callable[..., Any], args: Sequence[Any], pass_: Pass) -> tuple[Any, ...]:
    """The arguments as a tuple.

    Raises:
        TypeError: the function cannot be called with them.
        ValueError: a text that is neither a name of this pass nor such a name with a number.
    """
    whole = (*tensors_of(pass_), "problem", "groups", "transposed")
    for arg in args:
        name, number = found.groups() if (found := _ARGUMENT.fullmatch(str(arg))) else ("", None)
        if isinstance(arg, str) and (name in whole if number else name not in (*whole, *VALUES)):
            raise ValueError(
                f"args of {pass_}: {arg!r} is none of {', '.join(dict.fromkeys((*whole, *VALUES)))}, "
                "nor an element of one that has several, such as kernel_size[0]"
            )
    try:
        inspect.signature(function).bind(*args)
    except ValueError:
        pass  # a builtin, or a function of an extension: nobody knows its parameters
    except TypeError as error:
        called = f"{pass_}= is called with ({', '.join(map(str, args))})"
        raise TypeError(f'{called}: {error}; say what it takes, as in args=("input", "weight", "stride")') from None
    return tuple(args)


def values(args: Sequence[Any], problem: ConvProblem, pass_: Pass) -> list[Any]:
    """What each argument is for a problem; None for a tensor.

    Raises:
        LookupError: the problem has no such value; the message is a reason against it.
    """
    names = {a.partition("[")[0] for a in args if isinstance(a, str)}
    if "padding" in names and "problem" not in names and not problem.symmetric:
        raise LookupError(f"its padding is one number a dimension, this problem's is {problem.padding}")
    result: list[Any] = []
    for arg in args:
        name, _, number = arg.rstrip("]").partition("[") if isinstance(arg, str) else ("", "", "")
        value: Any = arg if not name else None if name in tensors_of(pass_) else VALUES[name](problem)
        if number and int(number) >= len(value):
            raise LookupError(f"it takes {arg}, this problem's {name} is {value}")
        result.append(value[int(number)] if number else value)
    return result
