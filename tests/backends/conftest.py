"""What the tests of the compiled kernels share."""

from collections.abc import Iterator

import pytest

from convgrad.backends import _native_library as library


@pytest.fixture(params=["x86-64-v4", "x86-64-v3", "baseline"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this build and this processor have."""
    before = library.instruction_set()
    try:
        library.select(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    library.select(before)
