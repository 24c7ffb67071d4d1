"""Work in a process of its own, so that a crash or a hang of what it calls is a finding and not the end.

The child is a fork: it has every function, closure and library that the parent has, and nothing needs to be sent to it.
Two things make that safe. The child works in a new thread: GNU OpenMP keeps a team of threads for each thread that
starts parallel regions, and the team of the forked thread is gone, so that the first parallel region in that thread
would wait for ever. And the child ends by ``os._exit``: nothing of the parent's is flushed or closed a second time.
"""

from __future__ import annotations

import contextlib
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
from typing import IO, Any

import torch

Send = Callable[[Any], None]


#: How often, and for how many seconds, a child may try to compute anything at all.
_ATTEMPTS, _START = 3, 20.0


class NoChild(Exception):  # noqa: N818 (an outcome)
    """No child of this process computes anything; in words."""


class Lost(Exception):  # noqa: N818 (an outcome)
    """The child crashed or was silent for too long; in words."""


def why_not_in_child() -> str:
    """Why there is no child here; empty if there is."""
    if not hasattr(os, "fork") or sys.platform == "darwin":  # Apple's libraries do not survive it
        return f"there is no fork on {sys.platform}"
    return ""


def in_child(work: Callable[[Send], object], patience: Callable[[], float]) -> Generator[Any, None, None]:
    """What ``work`` sends, from a forked child.

    Args:
        work: called with a function that sends any object that pickles.
        patience: how many seconds the child may be silent from now on, asked before every message.

    Raises:
        Lost: the child ended before its work did, or was silent for too long.
        NoChild: it never began.
    """
    with tempfile.TemporaryFile("w+") as trace:
        receiver, pid = _started(work, trace)
        status = None
        try:
            while True:
                wait = patience()
                if not receiver.poll(wait):
                    where = _stack(pid, trace)
                    raise Lost(f"did not return in {wait:.3g} s{where}: it hangs, or is too slow for this check")
                try:
                    kind, message = receiver.recv()
                except EOFError:
                    status = os.waitpid(pid, 0)[1]
                    raise Lost(_how(status, trace)) from None
                if kind == "end":
                    return
                if kind == "error":
                    raise RuntimeError(f"the check failed, not the kernel:\n{message}")
                yield message
        finally:
            receiver.close()
            if status is None:
                _end(pid)


def _started(work: Callable[[Send], object], trace: IO[str]) -> tuple[Connection, int]:
    """A child that computes: one that inherits a lock in the hands of a thread that is not there is replaced."""
    for _ in range(_ATTEMPTS):
        receiver, pid = _fork(work, trace)
        if receiver.poll(_START):
            with contextlib.suppress(EOFError):
                receiver.recv()
                return receiver, pid
        receiver.close()
        _end(pid)
    raise NoChild("a fork of this process does not start")


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _fork(work: Callable[[Send], object], trace: IO[str]) -> tuple[Connection, int]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr):  # what is in their buffers belongs to the parent
        with contextlib.suppress(Exception):
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has several threads
        pid = os.fork()
    if pid == 0:
        _be_the_child(work, sender, trace)
    sender.close()
    return receiver, pid


def _be_the_child(work: Callable[[Send], object], sender: Connection, trace: IO[str]) -> None:
    status = 1
    try:
        with contextlib.suppress(ValueError, OSError):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends the child
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(trace, all_threads=False)
        faulthandler.register(signal.SIGUSR1, trace, all_threads=True)
        warnings.simplefilter("ignore")

        def run() -> None:
            nonlocal status
            try:
                torch.set_num_threads(torch.get_num_threads())
                torch.ones(2, 2).mm(torch.ones(2, 2))
                sender.send(("ready", None))
                work(lambda message: sender.send(("message", message)))
                sender.send(("end", None))
            except Exception:  # whatever a kernel raises was caught before
                sender.send(("error", traceback.format_exc()))
            status = 0

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        os._exit(status)


def _how(status: int, trace: IO[str]) -> str:
    """A crash in words, with the line of Python that it happened in."""
    if os.WIFSIGNALED(status):
        return f"crashed with {signal.Signals(os.WTERMSIG(status)).name}{_where(trace)}"
    return f"ended the process with status {os.waitstatus_to_exitcode(status)}{_where(trace)}"


def _stack(pid: int, trace: IO[str]) -> str:
    """The line of Python at which a child is."""
    os.kill(pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        if where := _where(trace):
            return where
    return ""


def _where(trace: IO[str]) -> str:
    """The innermost line of a traceback that is not in a library's code."""
    trace.seek(0)
    lines = re.findall(r'File "(.*)", line (\d+) in ', trace.read())
    inner = (os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"), os.path.dirname(torch.__file__))
    return next((f" ({file}:{line})" for file, line in lines if not file.startswith((*inner, "<"))), "")
