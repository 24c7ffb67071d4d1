"""The backends, the reasons why one cannot be used, and what PyTorch's kernels were found to get wrong here."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch

from .._compat import onednn_limit
from ..backends import COPY, Backend, PaddedCopy, learn
from ..errors import UnknownNameError
from ..problem import OUTPUTS, ConvProblem, Output, Outputs, passes_of
from ..settings import capturing, determinism_demanded
from .cache import invalidate
from .measure import store


class Registered(NamedTuple):
    """A backend, and what was said of it when it was registered."""

    backend: Backend
    #: It is chosen wherever it is usable, before any rule: a user registered it so.
    preferred: bool = False
    #: It is measured against the others, where measuring is on and no backend is requested, unless it `repeats_aten`.
    candidate: bool = True
    #: What ``--kernels`` loads it from: empty if it comes with the library, None if no command can load it.
    source: str | None = None


_registered: dict[str, Registered] = {}


def register(backend: Backend, *, preferred: bool = False, candidate: bool = True, source: str | None = None) -> None:
    """Add a backend as the last one, in place of one of the same name; for the options see `Registered`."""
    global _registered  # noqa: PLW0603
    others = {name: entry for name, entry in _registered.items() if name != backend.name}
    _registered = {**others, backend.name: Registered(backend, preferred, candidate, source)}
    backend.changed = invalidate
    invalidate()


def unregister(name: str) -> None:
    """Remove a backend; KeyError if none has this name."""
    if _registered.pop(name, None) is None:
        raise _unknown(name)
    invalidate()


def registered() -> dict[str, Registered]:
    """Return what is registered by name, in the order of registration."""
    return _registered.copy()  # at once: another thread may register one


def backends() -> dict[str, Backend]:
    """Return all registered backends by name, in the order of their registration."""
    return {name: entry.backend for name, entry in registered().items()}


def get_backend(name: str) -> Backend:
    """Return the backend of this name, which may say that it computes over a padded copy; KeyError lists the names."""
    try:
        base = name.removesuffix(COPY)
        backend = _registered[base].backend
        return backend if base == name else PaddedCopy(backend)
    except (KeyError, TypeError, AttributeError):
        raise _unknown(name) from None


def _unknown(name: object) -> UnknownNameError:
    return UnknownNameError.of("no backend is called", name, _registered)


def reasons_against(
    backend: Backend, problem: ConvProblem, outputs: Outputs, device: torch.device, *, requested: bool = False
) -> list[str]:
    """Return every reason why a backend cannot compute these outputs here and now; empty means usable.

    One that was ``requested`` by name may compute even what is known to be wrong.
    """
    passes = passes_of(outputs)
    if outputs not in backend.sweeps:
        if missing := [p for p in passes if p not in backend.passes]:
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
        load_recorded()
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


# ---- what `convgrad check --aten` found --------------------------------------------------------------------

_KIND = "defect"


class Found(NamedTuple):
    """One finding: an output of a problem that PyTorch's kernel got wrong here."""

    problem: ConvProblem
    output: Output
    what: str
    #: A command that shows it again, with PyTorch alone.
    repeat: str


def _key(output: str, problem: object) -> str:
    """Return all that decides which kernel runs, for the store."""
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {onednn_limit() or 'any'}"
    return f"torch {torch.__version__} {machine}; {output}; {problem}"


def recorded() -> list[Found]:
    """Everything that was found on this machine with this PyTorch."""
    findings = []
    for key, value in store.items(_KIND).items():
        with suppress(ValueError, KeyError, TypeError):  # of another version of this library
            _, output, text = key.split("; ", 2)
            if key == _key(output, text) and output in OUTPUTS:
                findings.append(Found(ConvProblem.parse(text), output, value["what"], value["repeat"]))
    return findings


def record(found: Found) -> None:
    """Keep a finding, and avoid PyTorch's kernel there from now on."""
    store.write(_KIND, _key(found.output, found.problem), {"what": found.what, "repeat": found.repeat})
    learn([found[:3]])
    invalidate()


@cache
def load_recorded() -> None:
    """Avoid what was found before; read once a process."""
    learn(f[:3] for f in recorded())
