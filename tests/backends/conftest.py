"""What the tests of the compiled kernels share."""

from collections.abc import Iterator

import pytest

from convgrad.backends import _native_library as library


@pytest.fixture(params=["x86-64-v4", "x86-64-v3", "baseline"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this build and this processor have."""
    before, loaded = library.instruction_set(), library.load()
    if loaded is None or loaded.convgrad_select(request.param.encode()):
        pytest.skip(f"no compiled CPU kernels for {request.param} here {library.why_absent()}")
    yield request.param
    loaded.convgrad_select(before.encode())
