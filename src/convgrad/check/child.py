"""Work in another process, where a crash or a hang of a kernel is an answer and not the end.

A spawned child checks PyTorch's own kernels. A forked one has every function, closure and library of its parent. Three
things make that safe. It works in a new thread: GNU OpenMP keeps a team of threads for each thread that starts parallel
regions, and the team of the forked thread is gone. Functions of ``torch.compile`` are compiled without a pool of
threads, for the same reason. And it is a child of `multiprocessing`, which flushes nothing of its parent's again.

The C library fills what it hands out in a child, for a kernel that reads uninitialized memory is right as long as that
is zero: every tensor, and every buffer inside PyTorch's libraries, begins with large numbers (about 8e37 in float32 and
bfloat16, 5e303 in float64, NaN in float16).
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
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from .._compat import compile_in_this_thread, lock_over_forks
from .loading import is_foreign

#: glibc writes the complement of this number into what it hands out, and the number itself into what is freed.
POISON = 0x7E ^ 0xFF
#: M_PERTURB of malloc.h.
_PERTURB = -6
#: How often, and for how many seconds, a child may try to compute anything at all.
_ATTEMPTS, _START = 3, {"fork": 20.0, "spawn": 120.0}
#: In a child: where its messages go, one at a time.
_pipes: list[Connection] = []
_lock = lock_over_forks()
#: Held while a child starts: the filters of warnings belong to all threads.
_starting = lock_over_forks()


class NoChild(Exception):  # noqa: N818 (it is an outcome)
    """No child of this process can compute, for this reason."""


class Lost(Exception):  # noqa: N818 (it is an outcome)
    """The child crashed or was silent for too long; the message says which."""


def why_not_in_child() -> str:
    """Return why there is no forked child here; empty if there is."""
    if not hasattr(os, "fork") or sys.platform == "darwin":  # Apple's libraries fail after a fork
        return f"there is no fork on {sys.platform}"
    return "a daemonic process has no children" if multiprocessing.current_process().daemon else ""


class Child(contextlib.AbstractContextManager["Child"]):
    """A process in which a function answers requests; it is started again when it has died.

    In a forked child the function may be anything; a spawned one imports its module, and prints nothing.
    """

    def __init__(self, answer: Callable[[Any], Any], *, fork: bool = False) -> None:
        self._answer, self._method = answer, "fork" if fork else "spawn"
        self._running: tuple[Connection, Any] | None = None
        self._trace: IO[str] | None = None  # where a forked child writes its stack

    def ask(self, request: Any, seconds: float = 60.0, heard: Callable[[Any], object] = lambda message: None) -> Any:
        """Return the answer of a child that may be silent for so many seconds; ``heard`` gets what it says by `say`.

        Raises:
            Lost: the child ended, was silent for too long, or raised what is no ``Exception``.
            NoChild: it never began, or a library ended it because it is a fork.
            RuntimeError: the function raised an exception.
        """
        pipe, process = self._running = self._running or self._started()
        try:
            pipe.send(request)
            while pipe.poll(seconds):
                kind, message = pipe.recv()
                if kind == "answer":
                    return message
                if kind == "error":
                    raise RuntimeError(f"the check failed, not the kernel:\n{message}")
                if kind == "left":
                    raise Lost(message)
                heard(message)
            if self._trace:
                os.kill(process.pid, signal.SIGUSR1)  # the child then writes its stack
                end = time.monotonic() + 1
                while not self._where() and time.monotonic() < end:
                    time.sleep(0.05)
            raise Lost(f"did not return in {seconds:.3g} s{self._where()}: it hangs, or is too slow for this check")
        except (EOFError, ConnectionError):
            process.join()
            status, where = process.exitcode, self._where()
            self.close()
            if self._method == "fork" and status == -signal.SIGTERM:  # numba's, after it has used GNU OpenMP
                raise NoChild("a library that it calls does not run in a fork of this process") from None
            crashed = f"crashed with {signal.Signals(-status).name}" if status < 0 else ""
            raise Lost((crashed or f"ended the process with status {status}") + where) from None
        except Lost:
            self.close()
            raise

    def _where(self) -> str:
        """Return the innermost line of the child's Python stack that is the user's, or else a package's."""
        if self._trace is None:
            return ""
        self._trace.seek(0)
        lines = re.findall(r'File "(.*)", line (\d+) in ', self._trace.read())
        found = sorted((at for at in lines if is_foreign(at[0])), key=lambda at: "-packages" in at[0])
        return next((f" ({file}:{line})" for file, line in found), "")

    def _started(self) -> tuple[Connection, Any]:
        """Return a child that computes; one that inherits a lock of a thread that is gone is replaced."""
        context: Any = multiprocessing.get_context(self._method)
        fork, failed = self._method == "fork", f"a {self._method} of this process does not start"
        for _ in range(_ATTEMPTS):
            try:
                pipe, inner = context.Pipe()
                self._trace = tempfile.TemporaryFile("w+") if fork else None  # noqa: SIM115 (`close` closes it)
                args = (self._answer, inner, *((pipe, self._trace) if fork else ()))
                child = context.Process(target=_serve, args=args, daemon=not fork)  # which could have no children
                with _starting, warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has several threads
                    child.start()
            except OSError as error:  # no memory, no process, no file
                self.close()
                raise NoChild(f"{failed}: {error}") from None
            inner.close()
            self._running = pipe, child
            if pipe.poll(_START[self._method]):
                with contextlib.suppress(EOFError):
                    pipe.recv()
                    return self._running
            self.close()
        raise NoChild(failed)

    def close(self) -> None:
        """End the child."""
        if self._running is not None:
            pipe, process = self._running
            pipe.close()
            process.kill()
            process.join()
        if self._trace is not None:
            self._trace.close()
        self._running = self._trace = None

    def __exit__(self, *_: object) -> None:
        self.close()


def say(message: Any, kind: str = "said") -> None:
    """Send a message to the parent of a child, from any thread."""
    with _lock:
        for pipe in _pipes:
            pipe.send((kind, message))


def _serve(answer: Callable[[Any], Any], pipe: Connection, outer: Any = None, trace: IO[str] | None = None) -> None:
    """Answer request after request in the child, until the parent closes the pipe or ends."""
    _pipes[:] = [pipe]
    with contextlib.suppress(ValueError, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends the child
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have set another
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc only
        ctypes.CDLL(None).mallopt(_PERTURB, POISON)
    if trace is not None:
        outer.close()  # the parent's: while it is open here too, a child does not see that its parent was killed
        faulthandler.enable(trace, all_threads=False)
        faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
        warnings.simplefilter("ignore")
    else:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    thread = threading.Thread(target=_answer_all, args=(answer, pipe))
    thread.start()
    thread.join()


def _answer_all(answer: Callable[[Any], Any], pipe: Connection) -> None:
    torch.set_num_threads(torch.get_num_threads())
    compile_in_this_thread()
    torch.ones(2, 2).mm(torch.ones(2, 2))
    say(None, "ready")
    with contextlib.suppress(EOFError, ConnectionError):  # the parent was killed
        while True:
            request = pipe.recv()
            try:
                say(answer(request), "answer")
            except Exception:  # an error of this library; a kernel's was caught before
                say(traceback.format_exc(), "error")
            except BaseException as error:  # Ctrl-C is ignored here: only what is called can raise such a thing
                say(f"raised {type(error).__name__}: {error}", "left")
