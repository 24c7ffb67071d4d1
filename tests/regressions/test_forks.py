"""A fork while another thread works: the child, such as a worker of a DataLoader, found that thread's locks held."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from convgrad.check import child, registration
from convgrad.diagnostics import calls
from convgrad.engine import measurer

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


LOCKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "of a registration": lambda: registration._lock,
    "of an observer": lambda: calls._adding,
    "of the environment": lambda: child._one_at_a_time,
    "of measuring": lambda: measurer._state.lock,
}


@pytest.mark.parametrize("which", LOCKS)
def test_a_fork_while_another_thread_holds_a_lock(which: str) -> None:
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCKS[which]():
            held.set()
            enough.wait(0.5)

    def work() -> None:
        with LOCKS[which]():
            pass

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    enough.set()
    worker.join(30)
    worker.kill()
    holder.join()
    worker.join()
    assert worker.exitcode == 0


def test_a_child_of_a_process_that_measures_may_measure() -> None:
    measurer._state.busy = True
    try:
        worker = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(measurer._state.busy))
        worker.start()
        worker.join(30)
    finally:
        measurer._state.busy = False
    assert worker.exitcode == 0
