"""Constructors of layers that are written once for one, two and three dimensions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any


def set_constructor(cls: type, base: type, options: dict[str, Any], leading: Collection[str] = ()) -> None:
    """Give a class a constructor that says its arguments to help(), editors and ``torch.nn.utils.skip_init``.

    It is its own: a subclass has that of its own constructor.

    Args:
        base: the class whose arguments it takes.
        options: keywords that it takes besides, with their defaults.
        leading: those of them that may be given by position too, in front of ``device``.
    """
    signature = inspect.signature(base.__init__)
    parameters = [*signature.parameters.values()]
    before = [name for name in options if name in leading]
    at = next(i for i, p in enumerate(parameters) if p.name == "device")
    parameters[at:at] = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=options[n]) for n in before
    ]
    parameters += [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default)
        for n, default in options.items()
        if n not in leading
    ]
    signature = signature.replace(parameters=parameters)

    def constructor(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        super(cls, given.pop("self")).__init__(**given)

    made: Any = functools.wraps(base.__init__)(constructor)
    made.__signature__ = signature
    cls.__init__ = made
