"""``signature="torch"``, deprecated: what a function is called with follows from the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..problem import ConvProblem
from .arguments import VALUES, Method, default_args, tensors_of
from .backend import Accepts, UserKernel

__all__ = ["by_names"]

#: What PyTorch takes for a parameter that a call does not mention.
_DEFAULTS = {"stride": {1}, "padding": {0}, "dilation": {1}, "groups": {1}}


def by_names(function: Callable[..., Any], method: Method, accepts: Accepts | None) -> UserKernel:
    """A kernel that gets its arguments by name, one integer where a parameter is annotated ``int``.

    Without ``accepts``, what it has no parameter for must have PyTorch's default.

    Raises:
        TypeError: other parameters, or none that have names.
    """
    operator: Any = getattr(function, "_opoverload", getattr(function, "default", function))  # of torch.library
    if hasattr(operator, "_schema"):
        parameters = {a.name: (str(a.type), a.has_default_value()) for a in operator._schema.arguments}
    else:
        signature = inspect.signature(function).parameters
        parameters = {n: (p.annotation, p.default is not p.empty) for n, p in signature.items()}
    known = (*tensors_of(method), *VALUES)
    names = [n for n in parameters if n in known]
    if not {*default_args(method)[:2]} <= {*names} or not all(
        optional or n in known for n, (_, optional) in parameters.items()
    ):
        raise TypeError(f"{method}= has the parameters ({', '.join(parameters)}), signature='torch' knows {known}")
    integers = [n for n in names if parameters[n][0] in (int, "int") and n != "groups"]

    @wraps(function)
    def call(*values: Any) -> Any:
        return function(**{n: v[0] if n in integers else v for n, v in zip(names, values, strict=True)})

    @wraps(accepts or function)
    def accepts_too(p: ConvProblem) -> bool | str:
        for name in (*_DEFAULTS, *integers):
            value = VALUES[name](p)
            found = {*value} if isinstance(value, tuple) else {value}
            if name in integers and len(found) > 1:
                return f"its {name} is one int, this problem's is {value}"
            if accepts is None and name not in names and found != _DEFAULTS[name]:
                return f"it has no parameter {name}, this problem's is {value}"
        return accepts is None or accepts(p)

    return UserKernel(call, tuple(names), accepts_too)
