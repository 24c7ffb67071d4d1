"""Which backend computes which output: an explicit request first, then a kernel of the user's, then the rules."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..backends import Backend, warn_of
from ..errors import BackendError
from ..problem import ConvProblem, Output, Pass, passes_of
from ..settings import Settings
from .registry import backends, get_backend, reasons_against
from .request import Request
from .rules import why_native

__all__ = ["Step", "choose"]


class Step(NamedTuple):
    """One call of one backend, and why it was chosen."""

    backend: Backend
    outputs: tuple[Output, ...]
    reason: str


def choose(
    problem: ConvProblem,
    outputs: tuple[Output, ...],
    device: torch.device,
    settings: Settings,
    request: Request | None,
) -> tuple[Step, ...]:
    """The steps that compute ``outputs``; a ``grad_bias`` that no step yields is the engine's sum.

    Several gradients come from one sweep where the backend that is chosen for all of them has one.

    Raises:
        BackendError: a requested backend cannot, or none can; the message holds every backend's reasons.
    """
    passes = passes_of(outputs)
    request = request or Request()
    if len(passes) > 1:
        sweep = _sweep(problem, outputs, device, settings, request)
        if sweep is not None:
            return (sweep,)
    return tuple(_single(problem, p, device, settings, request) for p in passes)


def _single(problem: ConvProblem, pass_: Pass, device: torch.device, settings: Settings, request: Request) -> Step:
    name = request.of(pass_)
    if name is not None and not _only_swept(get_backend(name), pass_):
        if reasons_against(get_backend(name), problem, (pass_,), device, settings, requested=True):
            raise BackendError(_refusal(f"backend {name!r}", problem, pass_, device, settings))
        warn_of(get_backend(name).wrong_here(problem, (pass_,), device)[0])
        return Step(get_backend(name), (pass_,), "asked for by name" + _unchecked(get_backend(name)))
    usable = {b.name: b for b in backends().values() if not reasons_against(b, problem, (pass_,), device, settings)}
    if not usable:
        raise BackendError(_refusal("no backend", problem, pass_, device, settings))
    preferred = [b for b in usable.values() if b.preferred]
    if preferred:
        return Step(preferred[-1], (pass_,), "registered by the user" + _unchecked(preferred[-1]))
    why = why_native(problem, (pass_,), device, settings.threads) if "native" in usable else ""
    if why:
        return Step(usable["native"], (pass_,), f"by rule: {why}")
    wrong, instead = get_backend("aten").wrong_here(problem, (pass_,), device)
    first = next((usable[n] for n in instead if n in usable), next(iter(usable.values())))
    why = f"PyTorch's kernel is wrong here: {wrong}" if wrong else _why_first(first, usable, device)
    return Step(first, (pass_,), why)


def _why_first(backend: Backend, usable: dict[str, Backend], device: torch.device) -> str:
    if len(usable) == 1:
        return "the only one that can"
    if backend.name != "aten":
        return "the first that can"
    measured = device.type == "cpu"
    return "no rule prefers another backend" if measured else f"no other backend was ever timed on {device.type}"


def _sweep(
    problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device, settings: Settings, request: Request
) -> Step | None:
    """All passes by one backend in one call, with grad_bias where it can."""
    passes = passes_of(outputs)
    requested = {request.of(p) for p in passes}
    asked = requested != {None}
    mine = None if asked else _preferred_for(problem, passes, device, settings)
    if mine is not None:
        candidates = [(mine.name, "registered by the user" + _unchecked(mine))]
    elif not asked:
        why = why_native(problem, outputs, device, settings.threads)
        candidates = [("native", f"by rule: {why}")] if why else []
        candidates += [("aten", _why_first(get_backend("aten"), backends(), device))]
    elif len(requested) == 1:
        name = requested.pop()
        assert name is not None
        candidates = [(name, "asked for by name" + _unchecked(get_backend(name)))]
    else:
        return None
    for name, reason in candidates:
        for wanted in dict.fromkeys((outputs, passes)):
            backend = backends().get(name)
            if backend is not None and not reasons_against(backend, problem, wanted, device, settings, requested=asked):
                if asked:
                    warn_of(backend.wrong_here(problem, wanted, device)[0])
                return Step(backend, wanted, f"{reason}, in one sweep")
    return None


def _preferred_for(
    problem: ConvProblem, passes: tuple[Pass, ...], device: torch.device, settings: Settings
) -> Backend | None:
    """The kernel of the user's that was registered last, of those that compute any of these passes or all at once."""
    wanted: list[tuple[Output, ...]] = [passes, *((p,) for p in passes)]
    usable = [
        b
        for b in backends().values()
        if b.preferred and any(not reasons_against(b, problem, o, device, settings) for o in wanted)
    ]
    return usable[-1] if usable else None


def _only_swept(backend: Backend, pass_: Pass) -> bool:
    """A pass that it computes with others only: alone, the engine chooses as if nobody had been requested."""
    return pass_ not in backend.passes and any(pass_ in sweep for sweep in backend.sweeps)


def _unchecked(backend: Backend) -> str:
    return "" if backend.verified else ", not verified"


def _refusal(who: str, problem: ConvProblem, pass_: Pass, device: torch.device, settings: Settings) -> str:
    lines = [f"{who} cannot compute {pass_} of {problem} on {device}:"]
    for b in backends().values():
        against = reasons_against(b, problem, (pass_,), device, settings)
        lines.append(f"  {b.name}: {'; '.join(against) or 'can'}")
    return "\n".join(lines)
