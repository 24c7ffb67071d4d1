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
#: What a function is called with unless ``args`` says otherwise.
USUAL: Final[dict[Method, tuple[str, ...]]] = {p: (*OPERANDS[p], "problem") for p in PASSES}
USUAL["backward"] = (*TENSORS["backward"], "problem", "output_mask")
#: How many elements a value can have: one for each of three dimensions, in sizes also batch and channels.
_MOST: Final = {
    **dict.fromkeys(("stride", "padding", "dilation", "kernel_size", "output_mask"), 3),
    **dict.fromkeys(("input_size", "weight_size", "output_size"), 5),
}
_ARGUMENT = re.compile(r"([a-z_]+)(?:\[(:?)(\d+)\])?")


def _parsed(arg: Any) -> tuple[str, int | slice | None]:
    """Return the name in an argument and what is taken of its value, None for all; no name for a constant."""
    found = _ARGUMENT.fullmatch(arg) if isinstance(arg, str) else None
    if found is None:
        return "", None
    name, first, number = found.groups()
    return name, None if number is None else slice(int(number)) if first else int(number)


def _fits(at: int | slice, size: int) -> bool:
    return (at.stop if isinstance(at, slice) else at + 1) <= size


def check(function: Callable[..., Any], args: Sequence[Any] | None, method: Method) -> tuple[Any, ...]:
    """Return the arguments, checked; the usual ones where none are given."""
    if isinstance(args, str):
        raise TypeError(f"args of {method} is a sequence, got the text {args!r}; of one argument: args=({args!r},)")
    chosen = USUAL[method] if args is None else tuple(args)
    whole = (*TENSORS[method], "problem", "groups")
    several = [name for name in _MOST if name != "output_mask" or method == "backward"]
    for arg in chosen:
        name, at = _parsed(arg)
        if isinstance(arg, str) and name not in ((*whole, *several) if at is None else several):
            raise ValueError(
                f"args of {method}: {arg!r} is not one of {', '.join((*whole, *several))}, "
                "nor an element of one that has several, such as kernel_size[0]"
            )
        if at is not None and not _fits(at, _MOST[name]):
            raise ValueError(f"args of {method}: {arg!r} is out of range, {name} has at most {_MOST[name]} elements")
    if method == "backward" and not any(str(arg).startswith("output_mask") for arg in chosen):
        raise ValueError(
            'args of backward: "output_mask" is missing, the booleans that say which of grad_input, grad_weight and '
            'grad_bias are needed; "output_mask[:2]" are the first two, "output_mask[0]" is one'
        )
    try:
        parameters = inspect.signature(function, **_AS_TEXT)
    except ValueError:  # a builtin, or a function of an extension: its parameters are not known
        return chosen
    except TypeError:
        raise TypeError(f"{method}= takes a function, got {function!r}") from None
    try:
        parameters.bind(*chosen)
    except TypeError as error:
        called = f"{method}= is called with ({', '.join(map(str, chosen))})"
        raise TypeError(
            f"{called}{', as no args= are given' if args is None else ''}: {error}; its parameters are {parameters}: "
            f"say what each gets by args=, such as {', '.join(TENSORS[method])}, problem, stride or stride[0]"
        ) from None
    return chosen


def values(args: Sequence[Any], problem: ConvProblem, outputs: Sequence[Output] = gradient_outputs(False)) -> list[Any]:
    """Return the value of each argument for a problem, None for a tensor; a mask selects ``outputs``.

    Raises:
        LookupError: the problem has no such value; the message is a reason against it.
    """
    names = {_parsed(arg)[0] for arg in args}
    if "padding" in names and "problem" not in names and not problem.symmetric:
        raise LookupError(f"its padding is one number a dimension, this problem's is {problem.padding}")
    known: dict[str, Any] = {
        **{name: getattr(problem, name) for name in ("stride", "dilation", "groups", "kernel_size")},
        # In PyTorch's words, with batch and channels.
        **{f"{of}_size": getattr(problem, f"{of}_shape") for of in ("input", "weight", "output")},
        "problem": problem,
        "padding": tuple(low for low, _ in problem.padding),
        "output_mask": tuple(o in outputs for o in gradient_outputs(False)),
    }
    result: list[Any] = []
    for arg in args:
        name, at = _parsed(arg)
        value: Any = known.get(name) if name else arg
        if at is not None and not _fits(at, len(value)):
            raise LookupError(f"it takes {arg}, this problem's {name} is {value}")
        result.append(value if at is None else value[at])
    return result
