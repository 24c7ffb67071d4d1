"""Whatever a test registers is gone after it."""

from collections.abc import Iterator

import pytest

import convgrad


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = set(convgrad.backends())
    yield
    for name in set(convgrad.backends()) - before:
        convgrad.unregister(name)
