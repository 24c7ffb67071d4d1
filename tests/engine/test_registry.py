"""The registry of backends, while several threads use it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from convgrad.backends import ReferenceBackend
from convgrad.engine import backends, register, unregister


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
