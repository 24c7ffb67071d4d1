"""Work in a child: what it sends comes back, and how it ended is told."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from convgrad.check import child
from convgrad.check.child import Lost, NoChild, in_child


def test_what_it_sends() -> None:
    assert list(in_child(lambda send: [send(n) for n in (1, "two", (3,))], lambda: 60)) == [1, "two", (3,)]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not fill memory")
def test_memory_that_a_kernel_allocates_is_not_zero() -> None:
    (first,) = in_child(lambda send: send(np.empty(5000, np.float32)[0].item()), lambda: 60)
    assert first > 1e37


def test_parallel_regions_after_those_of_the_parent() -> None:
    """The parent's team of threads is gone in the child; waiting for it would never end."""
    x = torch.ones(1 << 18)
    torch.set_num_threads(2)
    expected = (x * 2).sum().item()
    assert list(in_child(lambda send: send((x * 2).sum().item()), lambda: 60)) == [expected]


def test_a_compilation_after_one_of_the_parent() -> None:
    """Inductor's pool of threads is gone in the child, too."""
    inductor = pytest.importorskip("torch._inductor.async_compile")

    def compile_in_child(send):
        done = inductor.AsyncCompile.submit(lambda: "there")
        send(done if isinstance(done, str) else done.result(20))

    with inductor.config.patch(compile_threads=2):
        assert inductor.AsyncCompile.submit(lambda: "here").result(60) == "here"
        assert list(in_child(compile_in_child, lambda: 60)) == ["there"]


def test_a_crash_and_its_line() -> None:
    def crash(send):
        send("here")
        ctypes.string_at(0)

    messages = in_child(crash, lambda: 60)
    assert next(messages) == "here"
    line = crash.__code__.co_firstlineno + 2
    with pytest.raises(Lost, match=rf"crashed with SIGSEGV \(.*test_child\.py:{line}\)"):
        next(messages)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(0), GeneratorExit()], ids=repr)
def test_what_is_no_exception_is_named(error: BaseException) -> None:
    def leave(send):
        raise error

    with pytest.raises(Lost, match=f"raised {type(error).__name__}: {error}"):
        list(in_child(leave, lambda: 60))


def test_an_end_without_a_result() -> None:
    with pytest.raises(Lost, match="ended the process with status 7"):
        list(in_child(lambda send: os._exit(7), lambda: 60))


def test_silence() -> None:
    start = time.monotonic()

    def sleep(send):
        time.sleep(100)

    line = sleep.__code__.co_firstlineno + 1
    with pytest.raises(Lost, match=rf"did not return in 0\.1 s \(.*test_child\.py:{line}\)"):
        list(in_child(sleep, lambda: 0.1))
    assert time.monotonic() - start < 50


def test_a_child_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_START", 0.1)
    monkeypatch.setattr(torch, "ones", lambda *size: time.sleep(100))
    with pytest.raises(NoChild, match="does not start"):
        list(in_child(lambda send: send(1), lambda: 60))


def test_a_library_that_ends_every_fork() -> None:
    """As numba does once its parallel loops have run in the parent."""
    with pytest.raises(NoChild, match="does not run in a fork"):
        list(in_child(lambda send: os.kill(os.getpid(), signal.SIGTERM), lambda: 60))


def test_an_error_of_ours_is_no_finding() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(in_child(lambda send: 1 // 0, lambda: 60))


def test_nothing_is_left_behind() -> None:
    messages = in_child(lambda send: [send(os.getpid()), time.sleep(100)], lambda: 60)
    child = next(messages)
    messages.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    """It holds no end of its own to read from, so that what it sends next fails, and that is said nowhere."""
    code = (
        "import itertools, os\n"
        "from convgrad.check.child import in_child\n"
        "for n in in_child(lambda send: [send(n) for n in itertools.count()], lambda: 60):\n"
        "    if n == 100: os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert parent.communicate(timeout=60) == (b"", b"")  # which the child keeps open
    finally:
        parent.kill()
    assert parent.returncode == -9
