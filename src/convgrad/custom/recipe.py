"""How a user's function is called: which of its parameters gets which tensor or number.

A `Recipe` is worked out once, when the function is registered. There are three kinds: ``native`` (the two tensors and
the problem), by the function's own parameter names (PyTorch's words), and by expressions such as ``"kernel_size[0]"``
for a function that has no names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..problem import OPERANDS, ConvProblem, Pass

__all__ = ["Recipe", "by_expressions", "by_names", "native"]

#: What a function may be given besides tensors, in PyTorch's words: sizes with batch and channels, padding of one side.
VALUES: dict[str, Callable[[ConvProblem], Any]] = {
    "stride": lambda p: p.stride,
    "padding": lambda p: tuple(low for low, _ in p.padding),
    "dilation": lambda p: p.dilation,
    "groups": lambda p: p.groups,
    "transposed": lambda p: False,
    "output_padding": lambda p: (0,) * p.ndim,
    "kernel_size": lambda p: p.kernel_size,
    "input_size": lambda p: p.input_shape,
    "weight_size": lambda p: p.weight_shape,
    "output_size": lambda p: p.output_shape,
    "problem": lambda p: p,
}
#: What PyTorch takes for a parameter that a call does not mention.
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_EXPRESSION = re.compile(r"([a-z_]+)(?:\[(\d+)\])?")


class Source(NamedTuple):
    """Where one argument comes from: a name, one element of it, or all of its elements if they are one integer."""

    name: str
    element: int | None = None
    as_int: bool = False
    constant: Any = None

    def value(self, problem: ConvProblem) -> Any:
        """The argument, unless it is a tensor.

        Raises:
            ValueError: this problem has no such value; the message is a reason.
        """
        if not self.name:
            return self.constant
        value = VALUES[self.name](problem)
        if self.element is not None:
            if self.element >= len(value):
                raise ValueError(f"it wants {self.name}[{self.element}], this problem's {self.name} is {value}")
            return value[self.element]
        if self.as_int and isinstance(value, tuple):
            if len(set(value)) != 1:
                raise ValueError(f"its {self.name} is one int, this problem's is {value}")
            return value[0]
        return value


class Recipe(NamedTuple):
    """The arguments of a call, positional and by keyword."""

    pass_: Pass
    positional: tuple[Source, ...]
    keywords: dict[str, Source]
    #: What the function cannot be told, so that a problem must have PyTorch's default for it.
    silent: tuple[str, ...] = ()

    @property
    def takes_bias(self) -> bool:
        """Whether the function adds the bias itself."""
        return any(s.name == "bias" for s in self._sources())

    def _sources(self) -> tuple[Source, ...]:
        return (*self.positional, *self.keywords.values())

    def reasons_against(self, problem: ConvProblem) -> list[str]:
        """Why the arguments cannot state this problem; empty if they can."""
        reasons, tensors = [], _tensors(self.pass_)
        names = {s.name for s in self._sources()}
        if not problem.symmetric and "problem" not in names and ("padding" in names or "padding" in self.silent):
            reasons.append(f"its padding is one number a dimension, this problem's is {problem.padding}")
        for source in self._sources():
            if source.name not in tensors:
                try:
                    source.value(problem)
                except ValueError as e:
                    reasons.append(str(e))
        for name in self.silent:
            value = VALUES[name](problem)
            if any(v != _DEFAULTS[name] for v in (value if isinstance(value, tuple) else (value,))):
                reasons.append(f"it has no parameter {name}, this problem's is {value}")
        return reasons

    def bind(self, function: Callable[..., Any], problem: ConvProblem) -> Callable[..., Any]:
        """A function of (first operand, second operand, bias) that makes the call for this problem."""
        tensors = _tensors(self.pass_)

        def split(sources: dict[Any, Source]) -> tuple[dict[Any, Any], list[tuple[Any, int]]]:
            fixed = {k: None if s.name in tensors else s.value(problem) for k, s in sources.items()}
            return fixed, [(k, tensors.index(s.name)) for k, s in sources.items() if s.name in tensors]

        fixed, slots = split(dict(enumerate(self.positional)))
        keywords, named_slots = split(self.keywords)
        values = list(fixed.values())

        def call(*operands: Tensor | None) -> Any:
            arguments, named = values.copy(), keywords.copy()
            for i, which in slots:
                arguments[i] = operands[which]
            for name, which in named_slots:
                named[name] = operands[which]
            return function(*arguments, **named)

        return call


def _tensors(pass_: Pass) -> tuple[str, ...]:
    return (*OPERANDS[pass_], "bias") if pass_ == "forward" else OPERANDS[pass_]


# ---- the three kinds -----------------------------------------------------------------------------


def native(function: Callable[..., Any], pass_: Pass) -> Recipe:
    """The two operands of the pass and the problem.

    Raises:
        TypeError: the function cannot be called so.
    """
    sources = tuple(Source(name) for name in (*OPERANDS[pass_], "problem"))
    wanted = f"({', '.join(s.name for s in sources)})"
    known = _parameters(function)
    if known is None:
        return Recipe(pass_, sources, {})
    positional = [p for p in known if p.kind in _BY_POSITION]
    fits = len(positional) >= 3 or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in known)
    if not fits or any(p.required for p in positional[3:]) or _schema(function) is not None:
        raise TypeError(
            f"{pass_}= is called with {wanted}, but its parameters are ({', '.join(p.name for p in known)}); "
            'if they are PyTorch\'s words say signature="torch", else name them with args=("input", "weight", ...)'
        )
    return Recipe(pass_, sources, {})


def by_names(function: Callable[..., Any], pass_: Pass, *, free: bool) -> Recipe:
    """Whatever the function has parameters for, by their names.

    Args:
        free: what it has no parameter for is left to ``accepts``; otherwise it must have PyTorch's default value.

    Raises:
        TypeError: a parameter of another name without a default, or no parameter names at all.
    """
    known = _parameters(function)
    if known is None:
        raise TypeError(f'{pass_}= has no parameter names: say args=("input", "weight", ...)')
    names = (*_tensors(pass_), *VALUES)
    unknown = [p.name for p in known if p.required and p.name not in names]
    missing = [n for n in OPERANDS[pass_] if n not in [p.name for p in known]]
    if unknown or missing:
        raise TypeError(
            f"{pass_}= has the parameters ({', '.join(p.name for p in known)}); "
            f"signature='torch' needs {' and '.join(OPERANDS[pass_])}, and knows no others than {', '.join(names)}"
        )
    mine = [p for p in known if p.name in names and p.kind not in _VARIADIC]
    first = [Source(p.name, as_int=p.is_int) for p in mine if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    rest = {p.name: Source(p.name, as_int=p.is_int) for p in mine if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    told = {p.name for p in mine}
    silent = () if free or "problem" in told else tuple(n for n in _DEFAULTS if n not in told)
    return Recipe(pass_, tuple(first), rest, silent)


def by_expressions(expressions: Sequence[Any], pass_: Pass) -> Recipe:
    """What each expression says: a name, one element of it, or anything that is no text as it is.

    Raises:
        ValueError: an expression that is neither a name nor ``name[number]``, or whose name this pass does not have.
    """
    sources, tensors = [], _tensors(pass_)
    for expression in expressions:
        if not isinstance(expression, str):
            sources.append(Source("", constant=expression))
            continue
        found = _EXPRESSION.fullmatch(expression.strip())
        if found is None or found[1] not in (*tensors, *VALUES):
            raise ValueError(
                f"args of {pass_}: {expression!r} is not one of {', '.join((*tensors, *VALUES))}, "
                "or one of them with a number, such as kernel_size[0]"
            )
        if found[2] is not None and found[1] in (*tensors, "groups", "transposed", "problem"):
            raise ValueError(f"args of {pass_}: {expression!r}: {found[1]} has no elements")
        sources.append(Source(found[1], None if found[2] is None else int(found[2])))
    return Recipe(pass_, tuple(sources), {})


# ---- parameter names -----------------------------------------------------------------------------

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Parameter(NamedTuple):
    name: str
    kind: Any
    required: bool
    is_int: bool


def _parameters(function: Any) -> list[_Parameter] | None:
    """The parameters of a function or of an operator; None where nothing knows them."""
    schema = _schema(function)
    if schema is not None:
        kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
        return [
            _Parameter(a.name, kinds[a.kwarg_only], not a.has_default_value(), str(a.type) == "int")
            for a in schema.arguments
        ]
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return None
    return [
        _Parameter(
            p.name,
            p.kind,
            p.default is p.empty and p.kind not in _VARIADIC,
            p.annotation is int or p.annotation == "int",
        )
        for p in signature.parameters.values()
    ]


def _schema(function: Any) -> Any:
    """The schema of an operator that is registered with PyTorch, or of a scripted function; None for anything else."""
    overloads = getattr(function, "overloads", None)
    if callable(overloads):  # torch.ops.mine.conv, whose overloads are looked up at each call
        names: Any = overloads()
        function = getattr(function, "default" if "default" in names else names[0])
    function = getattr(function, "_opoverload", function)  # torch.library.custom_op
    return getattr(function, "_schema", None) or getattr(function, "schema", None)
