"""Observers, which are told of every call of a backend. Without any, a call pays one truth test for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from ..problem import ConvProblem, Outputs
from . import cache


class Event(NamedTuple):
    """One call of one backend, as it happened."""

    problem: ConvProblem
    outputs: Outputs
    backend: str
    device: str
    reason: str
    #: Operands that had to be copied into a layout that the backend takes, each with its shape and strides.
    copies: tuple[str, ...] = ()
    seconds: float = 0.0


#: Where there is one, work on a GPU is waited for before the clock is read.
observers: list[Callable[[Event], object]] = []


@contextmanager
def observing(observer: Callable[[Event], object]) -> Generator[None, None, None]:
    """Tell an observer of every call in this block, in all threads; meanwhile the table of calls computes nothing."""
    observers.append(observer)
    cache.tell(1)
    try:
        yield
    finally:
        observers.remove(observer)
        cache.tell(-1)


class _Thread(threading.local):
    """The call that this thread is running."""

    _in_backend: bool = False
    #: No observer is told of what it computes, which is a trial of the library's.
    unobserved: bool = False

    @property
    def in_backend(self) -> bool:
        """Whether it is inside one of our computations: a convolution of PyTorch's there is a part of it."""
        return self._in_backend

    @in_backend.setter
    def in_backend(self, value: bool) -> None:
        self._in_backend = value
        cache.inside(value)


thread = _Thread()


@contextmanager
def unobserved() -> Generator[None, None, None]:
    """Tell no observer of the calls of this thread in this block: the user did not ask for them."""
    outer, thread.unobserved = thread.unobserved, True
    try:
        yield
    finally:
        thread.unobserved = outer


def observed(event: Event, call: Callable[[], Any]) -> Any:
    """Return the result of a call of a backend, with a label for the profiler; tell every observer of it."""
    device = event.device
    # Not for a profiler, which has a clock of its own, nor in a trial, whose time would be that of what is before it.
    wait = device.startswith("cuda") and bool(observers) and not thread.unobserved
    with record_function(f"convgrad::{'+'.join(event.outputs)}[{event.backend}]"):
        if wait:
            torch.cuda.synchronize(device)
        outer, thread.in_backend = thread.in_backend, True  # or a convolution of ATen's would be reported once more
        start = time.perf_counter()
        try:
            result = call()
        finally:
            thread.in_backend = outer
        if wait:
            torch.cuda.synchronize(device)
        event = event._replace(seconds=time.perf_counter() - start)
    for observer in () if thread.unobserved else tuple(observers):
        observer(event)
    return result
