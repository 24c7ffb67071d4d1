"""Work in a child: it answers, and how it ended is told."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from convgrad.check import child
from convgrad.check.child import Child, Lost, NoChild, say


def asked(answer: Callable[[Any], object], seconds: float = 60, **options: Any) -> Any:
    """The answer of a forked child to None."""
    with Child(answer, fork=True) as forked:
        return forked.ask(None, seconds, **options)


def test_what_it_says() -> None:
    heard: list[Any] = []

    def answer(request: int) -> int:
        for message in (request, "two", (3,)):
            say(message)
        return request + 1

    with Child(answer, fork=True) as forked:
        assert [forked.ask(n, heard=heard.append) for n in (1, 5)] == [2, 6]
    assert heard == [1, "two", (3,), 5, "two", (3,)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not fill memory")
def test_memory_that_a_kernel_allocates_is_not_zero() -> None:
    assert asked(lambda _: np.empty(5000, np.float32)[0].item()) > 1e37


def test_parallel_regions_after_those_of_the_parent() -> None:
    """The parent's team of threads is gone in the child; waiting for it would never end."""
    x = torch.ones(1 << 18)
    torch.set_num_threads(2)
    expected = (x * 2).sum().item()
    assert asked(lambda _: (x * 2).sum().item()) == expected


def test_a_compilation_after_one_of_the_parent() -> None:
    """Inductor's pool of threads is gone in the child, too."""
    inductor = pytest.importorskip("torch._inductor.async_compile")

    def compile_in_child(_: None) -> str:
        done = inductor.AsyncCompile.submit(lambda: "there")
        return done if isinstance(done, str) else done.result(20)

    with inductor.config.patch(compile_threads=2):
        assert inductor.AsyncCompile.submit(lambda: "here").result(60) == "here"
        assert asked(compile_in_child) == "there"


def test_a_crash_and_its_line() -> None:
    heard: list[str] = []

    def crash(_: None) -> None:
        say("here")
        ctypes.string_at(0)

    line = crash.__code__.co_firstlineno + 2
    with pytest.raises(Lost, match=rf"crashed with SIGSEGV \(.*test_child\.py:{line}\)"):
        asked(crash, heard=heard.append)
    assert heard == ["here"]


def test_another_one_is_started_after_a_crash() -> None:
    with Child(lambda n: n or ctypes.string_at(0), fork=True) as forked:
        with pytest.raises(Lost):
            forked.ask(0)
        assert forked.ask(2) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(0), GeneratorExit()], ids=repr)
def test_what_is_no_exception_is_named(error: BaseException) -> None:
    def leave(_: None) -> None:
        raise error

    with pytest.raises(Lost, match=f"raised {type(error).__name__}: {error}"):
        asked(leave)


def test_an_end_without_an_answer() -> None:
    with pytest.raises(Lost, match="ended the process with status 7"):
        asked(lambda _: os._exit(7))


def test_silence() -> None:
    start = time.monotonic()

    def sleep(_: None) -> None:
        time.sleep(100)

    line = sleep.__code__.co_firstlineno + 1
    with pytest.raises(Lost, match=rf"did not return in 0\.1 s \(.*test_child\.py:{line}\)"):
        asked(sleep, 0.1)
    assert time.monotonic() - start < 50


def test_a_child_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(child._START, "fork", 0.1)
    monkeypatch.setattr(torch, "ones", lambda *size: time.sleep(100))
    with pytest.raises(NoChild, match="does not start"):
        asked(lambda _: 1)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, lambda *_: None], ids=["default", "handled"])
def test_a_library_that_ends_every_fork(handler: Any) -> None:
    """As numba does once its parallel loops have run in the parent; a program on a cluster may handle the signal."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(NoChild, match="does not run in a fork"):
            asked(lambda _: signal.raise_signal(signal.SIGTERM), 5)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(NoChild, match=r"does not start: .*Resource temporarily unavailable"):
        asked(lambda _: 1)


def test_an_error_of_ours_is_no_finding() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        asked(lambda _: 1 // 0)


def test_nothing_is_left_behind() -> None:
    with Child(lambda _: os.getpid(), fork=True) as forked:
        pid = forked.ask(None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_children_that_start_at_once_leave_the_filters_of_warnings() -> None:
    before = [*warnings.filters]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda n: asked(lambda _: n), range(16))] == [*range(16)]
    assert warnings.filters == before


def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    """It holds no end of its own to read from, so that what it sends next fails, and that is said nowhere."""
    code = (
        "import itertools, os\n"
        "from convgrad.check.child import Child, say\n"
        "with Child(lambda _: [say(n) for n in itertools.count()], fork=True) as child:\n"
        "    child.ask(None, heard=lambda n: os.kill(os.getpid(), 9) if n == 100 else None)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert parent.communicate(timeout=60) == (b"", b"")  # which the child keeps open
    finally:
        parent.kill()
    assert parent.returncode == -9
