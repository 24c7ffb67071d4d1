"""Constructors and words for docstrings of layers that are written once for one, two and three dimensions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

__all__ = ["set_constructor", "words"]


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


def words(name: str) -> dict[str, Any]:
    """What a docstring says of the dimensions of a convolution.

    Equivalent to:
        >>> words("ConvTranspose2d")["out"], words("ConvTranspose2d")["function"]
        ('H_out, W_out', 'conv_transpose2d')
    """
    d = int(name[-2])
    sizes = ("D", "H", "W")[3 - d :] if d > 1 else ("L",)
    return {
        "d": d,
        "name": name,
        "function": name.replace("ConvT", "conv_t").lower(),
        "what": "transposed convolution" if "Transpose" in name else "convolution",
        "size": ", ".join(sizes),
        "out": ", ".join(f"{s}_out" for s in sizes),
        "fives": ", 5" * d,
    }
