"""Which backend computes which output: an explicit request first, then the rules.

The rules need no measuring. Each backend says how many times faster than ATen it expects to be (from
measurements that its documentation shows); the largest wins. Several gradients are taken from one sweep or
from two backends, whichever is expected to be faster in sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends.base import Backend
from ..errors import BackendError
from ..problem import ConvProblem, Output, Pass, passes_of
from ..settings import Settings
from .registry import backends, get, reasons_against
from .request import Request

__all__ = ["Step", "choose"]


class Step(NamedTuple):
    """One call of one backend, and why it was chosen."""

    backend: Backend
    outputs: tuple[Output, ...]
    reason: str


class _Candidate(NamedTuple):
    speedup: float
    steps: tuple[Step, ...]


def choose(
    problem: ConvProblem,
    outputs: tuple[Output, ...],
    device: torch.device,
    settings: Settings,
    request: Request | None,
) -> tuple[Step, ...]:
    """The steps that compute ``outputs``; a ``grad_bias`` that no step yields is the engine's sum.

    Raises:
        BackendError: a requested backend cannot, or none can; the message holds every backend's reasons.
    """
    passes = passes_of(outputs)
    request = request or Request()
    if not passes:
        return ()
    if len(passes) == 1:
        return (_single(problem, passes[0], device, settings, request),)
    steps = tuple(_single(problem, p, device, settings, request) for p in passes)
    if any(s.backend.preferred for s in steps):
        return steps
    apart = _Candidate(_harmonic([_speedup(s, problem, device) for s in steps]), steps)
    together = _sweeps(problem, outputs, device, settings, request)
    return max([*together, apart], key=lambda c: c.speedup).steps


def _single(problem: ConvProblem, pass_: Pass, device: torch.device, settings: Settings, request: Request) -> Step:
    name = request.of(pass_)
    if name is not None:
        against = reasons_against(get(name), problem, (pass_,), device, settings)
        if against:
            raise BackendError(_refusal(f"backend {name!r}", problem, pass_, device, settings))
        unchecked = "" if get(name).verified else ", not verified"
        return Step(get(name), (pass_,), f"asked for by name{unchecked}")
    usable = [b for b in backends().values() if not reasons_against(b, problem, (pass_,), device, settings)]
    if not usable:
        raise BackendError(_refusal("no backend", problem, pass_, device, settings))
    preferred = [b for b in usable if b.preferred]
    if preferred:
        unchecked = "" if preferred[-1].verified else ", not verified"
        return Step(preferred[-1], (pass_,), f"registered by the user{unchecked}")
    best = max(usable, key=lambda b: b.expected_speedup(problem, (pass_,), device))
    return Step(best, (pass_,), _why(best.expected_speedup(problem, (pass_,), device), len(usable)))


def _sweeps(
    problem: ConvProblem,
    outputs: tuple[Output, ...],
    device: torch.device,
    settings: Settings,
    request: Request,
) -> list[_Candidate]:
    """Every backend that yields all passes in one sweep, with grad_bias where it can; first the widest sweep."""
    passes = passes_of(outputs)
    found = []
    for backend in backends().values():
        if any(request.of(p) not in (None, backend.name) for p in passes):
            continue
        for wanted in dict.fromkeys((outputs, passes)):
            if not reasons_against(backend, problem, wanted, device, settings):
                speedup = backend.expected_speedup(problem, wanted, device)
                asked = all(request.of(p) == backend.name for p in passes)
                reason = "asked for by name" if asked else _why(speedup, 2)
                found.append(_Candidate(speedup, (Step(backend, wanted, f"{reason}, in one sweep"),)))
                break
    return found


def _speedup(step: Step, problem: ConvProblem, device: torch.device) -> float:
    return step.backend.expected_speedup(problem, step.outputs, device)


def _harmonic(speedups: list[float]) -> float:
    """Speed-up of several outputs that take ATen the same time each."""
    return 0.0 if 0.0 in speedups else len(speedups) / sum(1 / s for s in speedups)


def _why(speedup: float, usable: int) -> str:
    if usable == 1:
        return "the only one that can"
    if speedup == 1.0:
        return "nothing here is expected to be faster than ATen"
    return f"expected {speedup:.1f}x as fast as ATen" if speedup else "the first that can"


def _refusal(who: str, problem: ConvProblem, pass_: Pass, device: torch.device, settings: Settings) -> str:
    lines = [f"{who} cannot compute {pass_} of {problem} on {device}:"]
    for b in backends().values():
        against = reasons_against(b, problem, (pass_,), device, settings)
        lines.append(f"  {b.name}: {'; '.join(against) or 'can'}")
    return "\n".join(lines)
