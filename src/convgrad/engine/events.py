"""Where those who watch are told what ran. Empty unless somebody watches, so a call pays one truth test."""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

from ..problem import ConvProblem, Output

__all__ = ["Event", "Observer", "observers", "thread"]


class Event(NamedTuple):
    """One call of one backend, as it happened."""

    problem: ConvProblem
    outputs: tuple[Output, ...]
    backend: str
    device: str
    reason: str
    #: Operands that had to be copied into a layout that the backend takes, each with its shape and strides.
    copies: tuple[str, ...]
    seconds: float


class Observer(Protocol):
    """Somebody who watches. ``synchronize`` asks that device work be finished before the clock is read."""

    synchronize: bool

    def __call__(self, event: Event) -> None: ...


observers: list[Observer] = []


class _Thread(threading.local):
    """Whether this thread is inside one of our computations: a convolution of PyTorch's there is a part of it."""

    in_backend: bool = False


thread = _Thread()
