"""Shared by all tests: one seed a test, and few threads, for the problems are small."""

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# No deadline: other processes share the machine. CI repeats the same examples, so that a red run can be repeated.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
