"""Work in another process, where a crash or a hang of a kernel is a result and not the end.

`in_child` forks: the child has every function, closure and library of its parent. Three things make that safe. It works
in a new thread: GNU OpenMP keeps a team of threads for each thread that starts parallel regions, and the team of the
forked thread is gone. Functions of ``torch.compile`` are compiled without a pool of threads, for the same reason. And
it is a child of `multiprocessing`, which flushes nothing of its parent's again.

`Child` is spawned: PyTorch's own kernels are checked there. In both the C library fills what it hands out, for a kernel
that reads uninitialized memory is right as long as that is zero: every tensor, and every buffer inside PyTorch's
libraries, begins with large numbers (about 8e37 in float32 and bfloat16, 5e303 in float64, NaN in float16).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

import torch

from .._compat import compile_in_this_thread, lock_over_forks
from .loading import LIBRARIES

Send = Callable[[Any], None]
#: glibc writes the complement of this number into what it hands out, and the number itself into what is freed.
POISON = 0x7E ^ 0xFF
#: M_PERTURB of malloc.h.
_PERTURB = -6
#: How often, and for how many seconds, a forked child may try to compute anything at all.
_ATTEMPTS, _START = 3, 20.0
_one_at_a_time = lock_over_forks()  # a process has one environment


class NoChild(Exception):  # noqa: N818 (it is an outcome)
    """No child of this process can compute, for this reason."""


class Lost(Exception):  # noqa: N818 (it is an outcome)
    """The child crashed or was silent for too long; the message says which."""


# ---- a forked child ------------------------------------------------------------------------------


def why_not_in_child() -> str:
    """Return why there is no forked child here; empty if there is."""
    if not hasattr(os, "fork") or sys.platform == "darwin":  # Apple's libraries fail after a fork
        return f"there is no fork on {sys.platform}"
    return "a daemonic process has no children" if multiprocessing.current_process().daemon else ""


def in_child(work: Callable[[Send], object], patience: Callable[[], float]) -> Generator[Any, None, None]:
    """Yield what ``work`` sends from a forked child, which may be silent for so many seconds as ``patience`` returns.

    Raises:
        Lost: the child ended before its work did, was silent for too long, or raised what is no ``Exception``.
        NoChild: it never began, or a library ended it because it is a fork.
    """
    with tempfile.TemporaryFile("w+") as trace:
        receiver, child = _forked(work, trace)
        try:
            while True:
                if not receiver.poll(wait := patience()):
                    os.kill(child.pid or 0, signal.SIGUSR1)  # the child then writes its stack
                    end = time.monotonic() + 1
                    while not (where := _where(trace)) and time.monotonic() < end:
                        time.sleep(0.05)
                    raise Lost(f"did not return in {wait:.3g} s{where}: it hangs, or is too slow for this check")
                try:
                    kind, message = receiver.recv()
                except EOFError:
                    child.join()
                    if child.exitcode == -signal.SIGTERM:  # numba's answer to a fork after it has used GNU OpenMP
                        raise NoChild("a library that it calls does not run in a fork of this process") from None
                    how = _how(child, "crashed with {}", "ended the process with status {}")
                    raise Lost(how + _where(trace)) from None
                if kind == "end":
                    return
                if kind == "left":
                    raise Lost(message)
                if kind == "error":
                    raise RuntimeError(f"the check failed, not the kernel:\n{message}")
                yield message
        finally:
            _end(receiver, child)


def _forked(work: Callable[[Send], object], trace: IO[str]) -> tuple[Connection, BaseProcess]:
    """Return a child that computes; one that inherits a lock of a thread that is gone is replaced."""
    context = multiprocessing.get_context("fork")
    for _ in range(_ATTEMPTS):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_be_the_child, args=(work, receiver, sender, trace))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has several threads
            child.start()
        sender.close()
        if receiver.poll(_START):
            with contextlib.suppress(EOFError):
                receiver.recv()
                return receiver, child
        _end(receiver, child)
    raise NoChild("a fork of this process does not start")


def _end(pipe: Connection, child: BaseProcess) -> None:
    pipe.close()
    child.kill()
    child.join()


def _be_the_child(work: Callable[[Send], object], receiver: Connection, sender: Connection, trace: IO[str]) -> None:
    receiver.close()  # the parent's: while it is open here too, sending to a parent that was killed waits for ever
    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends the child
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc: memory that a kernel allocates is never zero
        ctypes.CDLL(None).mallopt(_PERTURB, POISON)
    faulthandler.enable(trace, all_threads=False)
    faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
    warnings.simplefilter("ignore")
    lock = threading.Lock()

    def send(message: Any) -> None:
        with lock:
            sender.send(("message", message))

    def run() -> None:
        try:
            torch.set_num_threads(torch.get_num_threads())
            compile_in_this_thread()
            torch.ones(2, 2).mm(torch.ones(2, 2))
            sender.send(("ready", None))
            work(send)
            sender.send(("end", None))
        except Exception:  # an error of this library; a kernel's was caught before
            with contextlib.suppress(BrokenPipeError):  # the parent was killed
                sender.send(("error", traceback.format_exc()))
        except BaseException as error:  # Ctrl-C is ignored here: only what is called can raise such a thing
            sender.send(("left", f"raised {type(error).__name__}: {error}"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _how(child: BaseProcess, died: str, ended: str) -> str:
    """Return how a child ended, in words for a signal or for a status."""
    status = child.exitcode or 0
    return died.format(signal.Signals(-status).name) if status < 0 else ended.format(status)


def _where(trace: IO[str]) -> str:
    """Return the innermost line of a stack of Python that is not in a library's code."""
    trace.seek(0)
    lines = re.findall(r'File "(.*)", line (\d+) in ', trace.read())
    return next((f" ({file}:{line})" for file, line in lines if not file.startswith(LIBRARIES)), "")


# ---- a spawned child -----------------------------------------------------------------------------


def poisoned_environment() -> dict[str, str]:
    """Return this process's environment with the variables by which C libraries poison memory."""
    glibc = {"MALLOC_PERTURB_": str(POISON), "GLIBC_TUNABLES": f"glibc.malloc.perturb={POISON}"}
    more = {"MallocPreScribble": "1", "MallocScribble": "1", "CONVGRAD_CACHE": "off", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **glibc, **more, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Child:
    """A spawned process in which a module's function answers requests; it is started again when it has died."""

    def __init__(self, answer: Callable[[Any], Any], environment: dict[str, str] | None = None) -> None:
        self._answer = answer
        self._environment = poisoned_environment() if environment is None else environment
        self._running: tuple[Connection, BaseProcess] | None = None

    def ask(self, request: Any, seconds: float = 60.0) -> tuple[Any, str]:
        """Return the answer, which may take so many seconds; or None, and how the child died."""
        pipe, process = self._running = self._running or self._started()
        try:
            pipe.send(request)
            if pipe.poll(seconds):
                return pipe.recv(), ""
            death = f"no answer in {seconds:.3g} s"
        except (EOFError, OSError):
            process.join()
            death = _how(process, "the process died ({})", "the process ended with {}")
        self.close()
        return None, death

    def _started(self) -> tuple[Connection, BaseProcess]:
        context = multiprocessing.get_context("spawn")
        pipe, its_own = context.Pipe()
        process = context.Process(target=_serve, args=(self._answer, its_own), daemon=True)
        with _one_at_a_time:
            before = os.environ.copy()
            os.environ.update(self._environment)
            try:
                process.start()
            finally:
                os.environ.clear()
                os.environ.update(before)
        its_own.close()
        return pipe, process

    def close(self) -> None:
        """End the child."""
        if self._running is not None:
            _end(*self._running)
            self._running = None

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
