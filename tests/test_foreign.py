"""JSON of other people's files: what a schema accepts, and an error that says where."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad.foreign import LONGEST, Positive, check, read_json

SCHEMA = {"name": str, "times": {str: [Positive]}, "count": int, "share?": float, "on?": bool, "limit?": (float, None)}
GOOD: dict[str, Any] = {"name": "a", "times": {"x": [1, 0.5]}, "count": 3}


@pytest.mark.parametrize("more", [{}, {"share": -1}, {"on": True}, {"limit": None}, {"limit": 2.5}, {"other": object}])
def test_accepted(more: dict[str, Any]) -> None:
    check({**GOOD, **more}, SCHEMA)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "row.name is no text: None"),
        ({"name": "n" * (LONGEST + 1)}, "row.name is no text of at most"),
        ({"times": []}, "row.times is no object"),
        ({"times": {"x": 1.0}}, "row.times.x is no list"),
        ({"times": {"x": [1, True]}}, r"row.times.x\[1\] is no number greater than 0: True"),
        ({"times": {"x": [0]}}, "is no number greater than 0: 0"),
        ({"times": {"x": ["1.5"]}}, "is no number greater than 0: '1.5'"),
        ({"times": {"x": [float("nan")]}}, "is no number greater than 0: nan"),
        ({"times": {"x": [10**400]}}, "is no number greater than 0: 1000"),
        ({"times": {"x" * (LONGEST + 1): []}}, "a name in row.times is no text of at most"),
        ({"count": 2.0}, "row.count is no integer"),
        ({"count": True}, "row.count is no integer"),
        ({"share": float("inf")}, "row.share is no number"),
        ({"on": 1}, "row.on is no true or false"),
        ({"limit": "x"}, "row.limit is no number"),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check({**GOOD, **change}, SCHEMA, "row")


def test_what_is_missing_and_what_is_too_deep() -> None:
    with pytest.raises(ValueError, match="row has no 'count'"):
        check({"name": "a", "times": {}}, SCHEMA, "row")
    with pytest.raises(ValueError, match="too deep"):
        read_json("[" * 100_000)
    with pytest.raises(ValueError, match="Expecting"):
        read_json("[1,")
