"""A spawned process with poisoned memory, for checks that may not come back.

A kernel that reads uninitialized memory is right as long as that memory happens to be zero. Here the C library fills
what it hands out: every tensor, and every buffer inside PyTorch's libraries, begins with large numbers (about 8e37 in
float32 and bfloat16, 5e303 in float64, NaN in float16). A child that dies is an answer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from .._compat import lock_over_forks

#: glibc writes the complement of this number into what it hands out, and the number itself into what is freed.
POISON = 0x7E ^ 0xFF
_spawned = multiprocessing.get_context("spawn")  # memory is poisoned from a process's beginning, or not at all
_one_at_a_time = lock_over_forks()  # a process has one environment


def poisoned_environment() -> dict[str, str]:
    """Return this process's environment with the variables by which C libraries poison memory."""
    glibc = {"MALLOC_PERTURB_": str(POISON), "GLIBC_TUNABLES": f"glibc.malloc.perturb={POISON}"}
    apple = {"MallocPreScribble": "1", "MallocScribble": "1"}
    path = os.pathsep.join(p for p in sys.path if p)
    return {**os.environ, **glibc, **apple, "PYTHONPATH": path, "CONVGRAD_CACHE": "off", "OMP_NUM_THREADS": "1"}


class Child:
    """A child process that answers requests; it is started when first needed, and again when it has died.

    Args:
        answer: a function of the request, at the top of a module; what it prints is not shown.
        environment: variables beside this process's; else `poisoned_environment`.
    """

    def __init__(self, answer: Callable[[Any], Any], environment: dict[str, str] | None = None) -> None:
        self._answer = answer
        self._environment = poisoned_environment() if environment is None else environment
        self._running: tuple[Any, Connection] | None = None

    def ask(self, request: Any, seconds: float = 60.0) -> tuple[Any, str]:
        """Return the answer; or None, and how the child died.

        Args:
            seconds: how long the answer may take.
        """
        self._running = self._running or self._started()
        process, pipe = self._running
        try:
            pipe.send(request)
            if pipe.poll(seconds):
                return pipe.recv(), ""
            death = f"no answer in {seconds:.3g} s"
        except (EOFError, OSError):
            process.join()
            status = process.exitcode
            death = f"the process {f'died ({signal.Signals(-status).name})' if status < 0 else f'ended with {status}'}"
        self.close()
        return None, death

    def _started(self) -> tuple[Any, Connection]:
        pipe, its_own = _spawned.Pipe()
        process = _spawned.Process(target=_serve, args=(self._answer, its_own), daemon=True)
        with _one_at_a_time:
            before = os.environ.copy()
            os.environ.update(self._environment)
            try:
                process.start()
            finally:
                os.environ.clear()
                os.environ.update(before)
        its_own.close()
        return process, pipe

    def close(self) -> None:
        """End the child."""
        if self._running is not None:
            (process, pipe), self._running = self._running, None
            process.kill()
            process.join()
            pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(answer: Callable[[Any], Any], pipe: Connection) -> None:
    """Answer request after request in the child, quietly; Ctrl-C is left to the parent, which ends the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    while True:
        pipe.send(answer(pipe.recv()))
