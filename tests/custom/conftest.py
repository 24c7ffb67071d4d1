"""Whatever a test registers is gone after it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import convgrad


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = set(convgrad.list_backends())
    yield
    for name in set(convgrad.list_backends()) - before:
        convgrad.unregister(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What tests register here is seldom fast, and says so; `test_speed` looks at what is said."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name != "test_speed.py":
            item.add_marker(pytest.mark.filterwarnings("ignore:.* runs wherever it is usable, and is slower there"))
