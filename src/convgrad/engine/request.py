"""`use_backend`: an explicit request for a backend, per thread and per async task, over a process default."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch.compiler import is_compiling

from ..backends import COPY
from ..problem import PASSES
from . import cache, registry


class Request(NamedTuple):
    """The name of the backend that is requested for each pass; None leaves the choice to the engine."""

    forward: str | None = None
    grad_input: str | None = None
    grad_weight: str | None = None
    #: It is part of the program, so a compiled graph carries it.
    fixed: bool = False


class _Alive:
    """While one exists, also in a task's copied context, the table computes nothing: it knows no requests."""

    def __init__(self, tell: Callable[[int], None] = cache.tell) -> None:
        self._tell = tell
        tell(1)

    def __del__(self) -> None:
        self._tell(-1)


_task: ContextVar[Request | None] = ContextVar("convgrad_request", default=None)
_alive: ContextVar[_Alive | None] = ContextVar("convgrad_request_alive", default=None)
_default: Request | None = None
#: The requests of the `use_backend` blocks in which a compiler or exporter is at the moment; else empty.
traced: list[Request] = []


#: The request of this thread or task, without the process default (which empties the cache when it changes).
requested: Callable[[], Request | None] = _task.get


def active() -> Request | None:
    """The request in force here, or None."""
    return _task.get() or _default


def request_for(name: str | None, **passes: str | None) -> Request:
    """Return the request of `use_backend` with these arguments; KeyError if no backend has one of these names."""
    for own in passes.values():
        if own is not None:
            registry.get_backend(own)
    if name is not None:
        backend = registry.get_backend(name)
        for pass_ in PASSES:
            if pass_ in backend.passes or any(pass_ in sweep for sweep in backend.sweeps):
                passes[pass_] = passes.get(pass_) or name
    return Request(**passes)  # pyright: ignore[reportArgumentType]


@contextmanager
def use_backend(
    name: str | None = None,
    *,
    forward: str | None = None,
    grad_input: str | None = None,
    grad_weight: str | None = None,
) -> Generator[None, None, None]:
    """Use the named backend inside this block, in this thread and async task only.

    ``name`` applies to all passes that the backend has, each keyword to one pass. ``use_backend(None)`` inside an outer
    block leaves the choice to convgrad again. A backward pass uses the request under which its forward ran. Passes
    are those of the problem: the output of a transposed convolution is the pass ``grad_input``.

    Raises:
        KeyError: no backend has this name.
        BackendError: at the call that the named backend cannot compute, with every backend's reasons.

    Equivalent to:
        >>> import torch, convgrad
        >>> with convgrad.use_backend("im2col"):
        ...     y = convgrad.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))
        >>> y.item()
        9.0
    """
    request = request_for(name, forward=forward, grad_input=grad_input, grad_weight=grad_weight)
    if is_compiling():  # the compiler knows no context variables, but follows a list
        traced.append(request)
        try:
            yield
        finally:
            traced.pop()
        return
    with resume(request):
        yield


@contextmanager
def resume(request: Request | None) -> Generator[None, None, None]:
    """Compute a backward under the request of its forward; with None as outside of all `use_backend` blocks."""
    token, alive = _task.set(request), _alive.set(None if request is None else _Alive())
    try:
        yield
    finally:
        _task.reset(token)
        _alive.reset(alive)


def unregister(name: str) -> None:
    """Remove a backend, as the process default too: the engine chooses again."""
    registry.unregister(name)
    if _default is not None and any(n.removesuffix(COPY) == name for n in _default[:3] if n):
        set_default_backend(None)


def set_default_backend(name: str | None) -> None:
    """Use the named backend in the whole process, except where `use_backend` says otherwise.

    Raises:
        KeyError: no backend has this name.

    Equivalent to:
        >>> import convgrad
        >>> convgrad.set_default_backend("aten")
        >>> convgrad.set_default_backend(None)
    """
    global _default  # noqa: PLW0603
    _default = None if name is None else request_for(name)
    cache.invalidate()
