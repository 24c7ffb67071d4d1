"""A fork while another thread works: the child, such as a worker of a DataLoader, found that thread's locks held."""

import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from convgrad.check import registration
from convgrad.diagnostics import records
from convgrad.engine.measure import measurer

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


#: Each pair in a fork that has made nothing but PyTorch's own call: a fork during the first of those hangs by itself.
PROGRAM = """
import os, sys, threading
import torch

torch.set_num_threads(1)
x, w = torch.ones(2, 8, 20, 20), torch.ones(8, 1, 3, 3)
torch.nn.functional.conv2d(x, w, groups=8)
failed = []
for pair in [("ours", "takeover"), ("takeover", "ours")]:
    process = os.fork()
    if process == 0:
        break
    if os.waitpid(process, 0)[1]:
        failed.append(pair)
else:
    sys.exit(str(failed) if failed else 0)
import convgrad

first, second = pair
ends = threading.Event()


def call(kind):
    if kind == "ours":
        convgrad.conv2d(x, w, groups=8)
    else:
        with convgrad.takeover():
            torch.nn.functional.conv2d(x, w, groups=8)


def spin():
    while not ends.is_set():
        call(first)


threads = [threading.Thread(target=spin) for _ in range(3)]
for thread in threads:
    thread.start()
states = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        call(second)
        os._exit(0)
    states.append(os.waitpid(child, 0)[1])
ends.set()
for thread in threads:
    thread.join()
assert not any(states), states
"""


def test_a_fork_during_the_first_call() -> None:
    """The other threads load what the first call needs, while a child is forked that needs it too."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, timeout=240)


LOCKS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "of a registration": lambda: registration._lock,
    "of an observer": lambda: records._adding,
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


def test_threads_that_fork_at_the_same_time() -> None:
    program = """
import multiprocessing, threading
import convgrad._compat

def work():
    for _ in range(15):
        process = multiprocessing.get_context("fork").Process(target=int)
        process.start()
        process.join()

threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for lock in convgrad._compat._locks:  # none is held by a thread that has ended
    assert lock.acquire(timeout=5)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    assert not subprocess.run(command, stderr=subprocess.PIPE, check=True, timeout=60).stderr


def test_a_child_of_a_process_that_measures_may_measure() -> None:
    measurer._state.busy = True
    try:
        worker = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(measurer._state.busy))
        worker.start()
        worker.join(30)
    finally:
        measurer._state.busy = False
    assert worker.exitcode == 0
