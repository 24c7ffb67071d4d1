"""What `launched` and `tabled` share, in a process of their own."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stand-in for libcuda.so.1, onto which Triton launches for the rest of the process: nothing is computed."""
    from tests.standin_cuda import Driver

    return Driver(tmp_path_factory.mktemp("driver"))
