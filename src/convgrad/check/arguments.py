"""The arguments of a user's function: tensors, values of the problem by name, and constants."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from ..problem import OPERANDS, PASSES, ConvProblem, Output, gradient_outputs

#: Options of `inspect.signature`: annotations that Python 3.14 has not evaluated may name imports for type checkers.
_AS_TEXT: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    from annotationlib import Format

    _AS_TEXT["annotation_format"] = Format.STRING

#: The function of one pass, or of the gradients that a mask selects.
Method = Literal["forward", "grad_input", "grad_weight", "backward"]
METHODS: Final[tuple[Method, ...]] = (*PASSES, "backward")

#: The tensors that a function may be given.
TENSORS: Final[dict[Method, tuple[str, ...]]] = {
    "forward": (*OPERANDS["forward"], "bias", "out"),
    "grad_input": (*OPERANDS["grad_input"], "out"),
    "grad_weight": (*OPERANDS["grad_weight"], "out"),
    "backward": ("grad_output", "input", "weight"),
}
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
}
#: How many elements a value can have: one for each of three dimensions, in sizes also batch and channels.
_MOST: Final = {
    **dict.fromkeys(("stride", "padding", "dilation", "kernel_size", "output_mask"), 3),
    **dict.fromkeys(("input_size", "weight_size", "output_size"), 5),
}
_ARGUMENT = re.compile(r"([a-z_]+)(?:\[(:?)(\d+)\])?")


def usual(method: Method) -> tuple[str, ...]:
    """Return the arguments of a function unless ``args`` says otherwise."""
    if method == "backward":
        return (*TENSORS[method], "problem", "output_mask")
    return (*OPERANDS[method], "problem")


def check(function: Callable[..., Any], args: Sequence[Any] | None, method: Method) -> tuple[Any, ...]:
    """Return the arguments, checked; without any, the operands, the problem and the mask of ``backward``."""
    if isinstance(args, str):
        raise TypeError(f"args of {method} is a sequence, got the text {args!r}; of one argument: args=({args!r},)")
    chosen = usual(method) if args is None else tuple(args)
    for arg in chosen:
        if isinstance(arg, str):
            _check_name(arg, method)
    if method == "backward" and not any(str(arg).startswith("output_mask") for arg in chosen):
        raise ValueError(
            'args of backward: "output_mask" is missing, the booleans that say which of grad_input, grad_weight and '
            'grad_bias are needed; "output_mask[:2]" are the first two, "output_mask[0]" is one'
        )
    _check_call(function, chosen, method, given=args is not None)
    return chosen


def _check_name(arg: str, method: Method) -> None:
    whole = (*TENSORS[method], "problem", "groups")
    several = [name for name in _MOST if name != "output_mask" or method == "backward"]
    name, first, number = found.groups() if (found := _ARGUMENT.fullmatch(arg)) else ("", None, None)
    if name not in several if number else name not in (*whole, *several):
        raise ValueError(
            f"args of {method}: {arg!r} is not one of {', '.join((*whole, *several))}, "
            "nor an element of one that has several, such as kernel_size[0]"
        )
    if number and int(number) + (not first) > _MOST[name]:
        raise ValueError(f"args of {method}: {arg!r} is out of range, {name} has at most {_MOST[name]} elements")


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], method: Method, given: bool) -> None:
    try:
        parameters = inspect.signature(function, **_AS_TEXT)
    except ValueError:
        return  # a builtin, or a function of an extension: its parameters are not known
    except TypeError:
        raise TypeError(f"{method}= takes a function, got {function!r}") from None
    try:
        parameters.bind(*args)
    except TypeError as error:
        called = f"{method}= is called with ({', '.join(map(str, args))})"
        raise TypeError(
            f"{called}{'' if given else ', as no args= are given'}: {error}; its parameters are {parameters}: say what "
            f"each gets by args=, such as {', '.join(TENSORS[method])}, problem, stride or stride[0]"
        ) from None


def values(
    args: Sequence[Any], problem: ConvProblem, method: Method, outputs: Sequence[Output] = gradient_outputs(False)
) -> list[Any]:
    """Return the value of each argument for a problem, None for a tensor; a mask selects ``outputs``.

    Raises:
        LookupError: the problem has no such value; the message is a reason against it.
    """
    names = {a.partition("[")[0] for a in args if isinstance(a, str)}
    if "padding" in names and "problem" not in names and not problem.symmetric:
        raise LookupError(f"its padding is one number a dimension, this problem's is {problem.padding}")
    mask = tuple(o in outputs for o in gradient_outputs(False))
    result: list[Any] = []
    for arg in args:
        found = _ARGUMENT.fullmatch(arg) if isinstance(arg, str) else None
        if found is None or found[1] in TENSORS[method]:
            result.append(None if found else arg)
            continue
        name, first = found[1], bool(found[2])
        value: Any = mask if name == "output_mask" else VALUES[name](problem)
        if found[3]:
            number = int(found[3])
            if number + (not first) > len(value):
                raise LookupError(f"it takes {arg}, this problem's {name} is {value}")
            value = value[:number] if first else value[number]
        result.append(value)
    return result
