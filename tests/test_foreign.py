"""JSON of other people's files: what a type accepts, and an error that says where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from convgrad.foreign import read_as, read_json


@dataclass
class Row:
    name: str
    times: dict[str, tuple[float, ...]]
    count: int
    share: float = 0.0
    on: bool = False
    limit: float | None = None


GOOD: dict[str, Any] = {"name": "a", "times": {"x": [1, 0.5]}, "count": 3}


@pytest.mark.parametrize("more", [{}, {"share": -1}, {"on": True}, {"limit": None}, {"limit": 2.5}])
def test_accepted(more: dict[str, Any]) -> None:
    expected = Row(**{**GOOD, **more, "times": {"x": (1, 0.5)}})
    assert read_as(Row, {**GOOD, **more, "other": object}, "row") == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "row.name is None"),
        ({"times": []}, "row.times is "),
        ({"times": {"x": 1.0}}, "row.times.x is 1.0"),
        ({"times": {"x": [1, True]}}, r"row.times.x\[1\] is True, not of the right type"),
        ({"times": {"x": ["1.5"]}}, "is '1.5'"),
        ({"times": {"x": [float("nan")]}}, "is nan"),
        ({"times": {"x": [10**400]}}, "not of the right type"),
        ({"count": 2.0}, "row.count is 2.0"),
        ({"count": True}, "row.count is True"),
        ({"share": float("inf")}, "row.share is inf"),
        ({"on": 1}, "row.on is 1"),
        ({"limit": "x"}, "row.limit is 'x'"),
    ],
)
def test_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_as(Row, {**GOOD, **change}, "row")


def test_what_is_missing_and_what_is_too_deep() -> None:
    with pytest.raises(ValueError, match="row has no field 'count'"):
        read_as(Row, {"name": "a", "times": {}}, "row")
    with pytest.raises(ValueError, match="too deep"):
        read_json("[" * 100_000)
    with pytest.raises(ValueError, match="Expecting"):
        read_json("[1,")
