"""JSON that anyone may have written: read and checked by a schema before anything uses it.

A schema is plain data:

- ``str``, ``bool``, ``int``, ``float``: a value of this type. A text has at most `LONGEST` characters, a number is
  finite, True is no number, and an integer is a float;
- `Positive`: a number greater than 0;
- ``[schema]``: a list of such values;
- ``{"name": schema, "other?": schema}``: an object with these fields, the second of which may be missing. Further
  fields are left alone;
- ``{str: schema}``: an object with any names;
- ``(schema, None)``: such a value, or null.
"""

from __future__ import annotations

import json
from sys import float_info
from typing import Any, Final

LONGEST: Final = 2000


class Positive(float):
    """Stands in a schema for a number greater than 0."""


_WORDS: Final[dict[Any, str]] = {
    str: "a text", bool: "true or false", int: "an integer", float: "a number", Positive: "a number greater than 0",
}  # fmt: skip


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


def check(value: Any, schema: Any, where: str = "it") -> None:
    """Check a value by a schema.

    Args:
        where: what the value is called in the error.

    Raises:
        ValueError: it is something else; the error says where.

    Equivalent to:
        >>> check({"name": "a", "times": [1, 2.5]}, {"name": str, "times": [Positive], "why?": str})
        >>> check([{"times": [1, True]}], [{"times": [Positive]}])
        Traceback (most recent call last):
        ValueError: it[0].times[1] is no number greater than 0: True
    """
    if isinstance(schema, tuple):
        if value is not None:
            check(value, schema[0], where)
    elif isinstance(schema, list):
        _require(isinstance(value, list), where, "a list", value)
        for i, item in enumerate(value):
            check(item, schema[0], f"{where}[{i}]")
    elif isinstance(schema, dict):
        _require(isinstance(value, dict), where, "an object", value)
        for name, of_field in schema.items():
            if name is str:
                for key, item in value.items():
                    _require(len(key) <= LONGEST, f"a name in {where}", f"a text of at most {LONGEST} characters", key)
                    check(item, of_field, f"{where}.{key}")
            elif name.removesuffix("?") in value:
                check(value[name.removesuffix("?")], of_field, f"{where}.{name.removesuffix('?')}")
            elif not name.endswith("?"):
                raise ValueError(f"{where} has no {name!r}")
    else:
        _check_plain(value, schema, where)


def _check_plain(value: Any, schema: Any, where: str) -> None:
    number = schema in (float, Positive)
    right = isinstance(value, (int, float) if number else schema) and isinstance(value, bool) == (schema is bool)
    if right and number:
        right = abs(value) <= float_info.max and (schema is float or value > 0)
    _require(right, where, _WORDS[schema], value)
    if schema is str:
        _require(len(value) <= LONGEST, where, f"a text of at most {LONGEST} characters", value)


def _require(condition: bool, where: str, what: str, value: object) -> None:
    if not condition:
        shown = repr(value)
        raise ValueError(f"{where[:200]} is no {what.removeprefix('a ').removeprefix('an ')}: "
                         + (shown if len(shown) <= 60 else f"{shown[:60]}..."))  # fmt: skip
