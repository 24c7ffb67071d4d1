"""Shared by all tests: one seed a test, and few threads, for the problems are small."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from convgrad.engine import rules

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

#: What is derived on any machine changes nothing: tests ask what a choice does, not which one is fast here.
rules.TABLE = {
    "depthwise": {"native": 4.0},
    "grouped": {"native": 3.0},
    "emulated": {"native": 6.0, "aten:float32": 5.0},
}

# No deadline: other processes share the machine. CI repeats the same examples, so that a red run can be repeated.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from the user's cache folder, nor written there; by processes that a test starts neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONVGRAD_CACHE", str(tmp_path_factory.mktemp("store")))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
