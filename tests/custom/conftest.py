"""Whatever a test registers is gone after it."""

from collections.abc import Iterator

import pytest

import convgrad


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    before = set(convgrad.list_backends())
    yield
    for name in set(convgrad.list_backends()) - before:
        convgrad.unregister(name)
