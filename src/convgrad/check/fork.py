"""Work in a forked process, where a crash or a hang of the kernel is a result and not the end.

The child is a fork: it has every function, closure and library of its parent, and nothing needs to be sent to it. Three
things make that safe. It works in a new thread: GNU OpenMP keeps a team of threads for each thread that starts parallel
regions, and the team of the forked thread is gone. Functions of ``torch.compile`` are compiled without a pool of
threads, for the same reason. And it is a child of `multiprocessing`, which flushes nothing of its parent's again.
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
import sysconfig
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

from .._compat import compile_in_this_thread
from .child import POISON

Send = Callable[[Any], None]
#: M_PERTURB of malloc.h.
_PERTURB = -6
#: How often, and for how many seconds, a child may try to compute anything at all.
_ATTEMPTS, _START = 3, 20.0


class NoChild(Exception):  # noqa: N818 (an outcome)
    """No child of this process can compute, for this reason."""


class Lost(Exception):  # noqa: N818 (an outcome)
    """The child crashed or was silent for too long; the message says which."""


def why_not_in_child() -> str:
    """Return why there is no child here; empty if there is."""
    if not hasattr(os, "fork") or sys.platform == "darwin":  # Apple's libraries fail after a fork
        return f"there is no fork on {sys.platform}"
    return "a daemonic process has no children" if multiprocessing.current_process().daemon else ""


def in_child(work: Callable[[Send], object], patience: Callable[[], float]) -> Generator[Any, None, None]:
    """Yield what ``work`` sends from a forked child.

    Args:
        work: called with a function that sends any object that pickles, from any thread.
        patience: returns how many seconds the child may be silent from now on.

    Raises:
        Lost: the child ended before its work did, was silent for too long, or raised what is no ``Exception``.
        NoChild: it never began, or a library ended it because it is a fork.
    """
    with tempfile.TemporaryFile("w+") as trace:
        receiver, child = _started(work, trace)
        try:
            while True:
                wait = patience()
                if not receiver.poll(wait):
                    if child.pid is not None:
                        os.kill(child.pid, signal.SIGUSR1)  # the child then writes its stack
                    end = time.monotonic() + 1
                    while not (where := _where(trace)) and time.monotonic() < end:
                        time.sleep(0.05)
                    raise Lost(f"did not return in {wait:.3g} s{where}: it hangs, or is too slow for this check")
                try:
                    kind, message = receiver.recv()
                except EOFError:
                    child.join()
                    status = child.exitcode or 0
                    if status == -signal.SIGTERM:  # numba's answer to a fork after it has used GNU OpenMP
                        raise NoChild("a library that it calls does not run in a fork of this process") from None
                    how = f"crashed with {signal.Signals(-status).name}" if status < 0 else ""
                    raise Lost((how or f"ended the process with status {status}") + _where(trace)) from None
                if kind == "end":
                    return
                if kind == "left":
                    raise Lost(message)
                if kind == "error":
                    raise RuntimeError(f"the check failed, not the kernel:\n{message}")
                yield message
        finally:
            _end(receiver, child)


def _started(work: Callable[[Send], object], trace: IO[str]) -> tuple[Connection, BaseProcess]:
    """Return a child that computes; one that inherits a lock of a thread that is gone is replaced."""
    forked = multiprocessing.get_context("fork")
    for _ in range(_ATTEMPTS):
        receiver, sender = forked.Pipe(duplex=False)
        child = forked.Process(target=_be_the_child, args=(work, receiver, sender, trace))
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


def _end(receiver: Connection, child: BaseProcess) -> None:
    receiver.close()
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


def _where(trace: IO[str]) -> str:
    """Return the innermost line of a stack of Python that is not in a library's code."""
    trace.seek(0)
    lines = re.findall(r'File "(.*)", line (\d+) in ', trace.read())
    inner = (os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__))
    return next((f" ({file}:{line})" for file, line in lines if not file.startswith((*inner, "<"))), "")
