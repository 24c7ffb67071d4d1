"""Shared by all tests: one seed a test, and few threads, for the problems are small."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from convgrad.engine import rules

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

rules.TABLE = (Path(__file__).parent / "rules.txt").read_text(encoding="utf-8")

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
