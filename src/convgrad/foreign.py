"""JSON that anyone may have written: read by the type that it must have before anything uses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from sys import float_info
from textwrap import shorten
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_hints = cache(get_type_hints)


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, or its lists are too deep.

    Equivalent to:
        >>> read_json('{"a": [1, true]}')
        {'a': [1, True]}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are too deep") from None


def read_as(hint: Any, data: Any, what: str) -> Any:
    """Return plain data as a type: a number, a text, None, a union; tuples, dicts or dataclasses of these.

    Numbers are finite, and True is none. A field of a dataclass with a default may be missing; one that only a later
    version knows is left out.

    Raises:
        ValueError: the data is something else; the message names the place.

    Equivalent to:
        >>> read_as(tuple[int, ...], [1, 2], "sizes"), read_as(float | None, None, "share")
        ((1, 2), None)
        >>> read_as(dict[str, tuple[int, ...]], {"sizes": [1, True]}, "it")
        Traceback (most recent call last):
        ValueError: it.sizes[1] is True, not of the right type
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(data, Mapping):
        hints = _hints(hint)
        missing = [f.name for f in fields(hint) if f.default is f.default_factory is MISSING and f.name not in data]
        if missing:
            raise ValueError(f"{what} has no field {missing[0]!r}")
        named = [f.name for f in fields(hint) if f.name in data]
        return hint(**{name: read_as(hints[name], data[name], f"{what}.{name}") for name in named})
    if origin is tuple and isinstance(data, (list, tuple)):
        return tuple(read_as(arguments[0], one, f"{what}[{i}]") for i, one in enumerate(data))
    if origin is dict and isinstance(data, dict):
        return {name: read_as(arguments[1], one, f"{what}.{name[:60]}") for name, one in data.items()}
    if origin in (Union, UnionType):
        other = next(one for one in arguments if one is not type(None))
        return None if data is None and type(None) in arguments else read_as(other, data, what)
    if hint in (int, float):
        fits = isinstance(data, (int, hint)) and not isinstance(data, bool) and abs(data) <= float_info.max
    else:
        fits = hint is Any or (origin is None and isinstance(data, hint))
    if fits:
        return data
    raise ValueError(f"{what} is {shorten(repr(data)[:1000], 60)}, not of the right type")
