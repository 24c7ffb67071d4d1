"""The registry of backends, while several threads use it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from convgrad.backends import ReferenceBackend
from convgrad.check import check_problem
from convgrad.engine import backends, get_backend, register, unregister
from convgrad.errors import UnknownNameError
from convgrad.problem import PASSES


@pytest.fixture
def eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_backends_may_be_registered_while_another_thread_looks(eager_threads: None) -> None:
    class Another(ReferenceBackend):
        name = "another"

    failed: list[Exception] = []
    ended = threading.Event()

    def look() -> None:
        try:
            while not ended.is_set():
                backends()
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3000):
            register(Another())
            unregister("another")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failed


@pytest.mark.parametrize("name", ["native", "im2col"])
def test_a_backend_over_a_padded_copy_has_a_name_too(name: str) -> None:
    """And is right in all respects: also where it has a workspace, and sweeps of transposed problems."""
    copied = get_backend(f"{name} (padded copy)")
    assert copied.name == f"{name} (padded copy)"
    for output in PASSES:
        found = check_problem(copied, "mb2ic4ih6oc8kh3ph1 reflect", output)
        assert not [r for r in found if r.status == "failed"]
        assert [r for r in found if r.status == "passed"]
    for unknown in (unregister, get_backend):
        with pytest.raises(UnknownNameError, match="no backend is called"):
            unknown("none (padded copy)")
    with pytest.raises(UnknownNameError, match="no backend is called"):
        unregister(copied.name)
