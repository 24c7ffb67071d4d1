"""The backends, and the reasons why one cannot be used."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..backends import COPY, Backend, PaddedCopy
from ..errors import UnknownNameError
from ..problem import ConvProblem, Outputs, passes_of
from ..settings import capturing, determinism_demanded
from .cache import invalidate
from .found import load

_backends: dict[str, Backend] = {}
#: A name that is passed over in this thread or task.
_hidden: ContextVar[str | None] = ContextVar("convgrad_hidden", default=None)


def register(backend: Backend) -> None:
    """Add a backend, or replace the one of the same name."""
    _backends[backend.name] = backend
    backend.changed = invalidate
    invalidate()


def unregister(name: str) -> None:
    """Remove a backend.

    Raises:
        KeyError: no backend has this name.
    """
    if _backends.pop(name, None) is None:
        raise _unknown(name)
    invalidate()


def backends() -> dict[str, Backend]:
    """Return all registered backends by name, in the order of their registration."""
    found = _backends.copy()  # at once: another thread may register one
    found.pop(_hidden.get() or "", None)
    return found


@contextmanager
def without(name: str) -> Generator[None, None, None]:
    """Choose in this block, and in this thread or task, as if no backend had this name."""
    token = _hidden.set(name)
    try:
        yield
    finally:
        _hidden.reset(token)


def get_backend(name: str) -> Backend:
    """Return the backend of this name, which may say that it computes over a padded copy.

    Raises:
        KeyError: there is none; the message lists those there are.
    """
    try:
        base = name.removesuffix(COPY)
        return _backends[base] if base == name else PaddedCopy(_backends[base])
    except (KeyError, TypeError, AttributeError):
        raise _unknown(name) from None


def _unknown(name: object) -> UnknownNameError:
    return UnknownNameError.of("no backend is called", name, _backends)


def reasons_against(
    backend: Backend, problem: ConvProblem, outputs: Outputs, device: torch.device, *, requested: bool = False
) -> list[str]:
    """Return every reason why a backend cannot compute these outputs here and now; empty means usable.

    Args:
        requested: it was requested by name, so that it may compute even what is known to be wrong.
    """
    passes = passes_of(outputs)
    if outputs not in backend.sweeps:
        missing = [p for p in passes if p not in backend.passes]
        if missing:
            return [f"it has no {' and no '.join(missing)}"]
        if len(passes) > 1:
            return [f"it does not compute {' and '.join(outputs)} in one sweep"]
    reasons: list[str] = []
    if not backend.deterministic and determinism_demanded(device):
        reasons.append("deterministic algorithms are demanded and it does not repeat its bits")
    if device.type == "cuda" and not backend.capture_safe and capturing():
        reasons.append("a CUDA graph is being captured and it may not be called then")
    reasons += backend.against(problem, outputs, device)
    if not (requested or reasons or problem.empty):
        load()
        wrong, _ = backend.wrong_here(problem, outputs, device)
        reasons += [f"PyTorch's kernel is wrong here: {wrong}"] if wrong else []
    return reasons


def computed_at_once(
    backend: Backend, problem: ConvProblem, outputs: Outputs, device: torch.device, *, requested: bool = False
) -> Outputs | None:
    """Return the outputs that one call of a backend gives: all, or all but grad_bias; else None."""
    passes = passes_of(outputs)
    sets = (outputs, passes) if len(passes) > 1 else (passes,)
    return next((o for o in sets if not reasons_against(backend, problem, o, device, requested=requested)), None)
