"""The processes that the tests of `parallel` share: started when first used, ended with the session."""

from collections.abc import Iterator

import pytest

from .processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """``processes(4, function, *arguments)`` calls a function in four gloo processes and returns their results."""
    ranks = Processes()
    yield ranks
    ranks.close()
