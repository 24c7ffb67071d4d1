"""Which backend computes which output.

What decides is the first of these: a request by name; a kernel that the user registered; what was measured of this
problem on this machine; where measuring is on, a measurement now; the rules; and where no rule applies, ATen. On a GPU
a rule only proposes: the first call of what it chose is a measurement.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ..backends import Backend, PaddedCopy, padded, warn_of
from ..errors import BackendError
from ..problem import ConvProblem, Outputs, Pass, passes_of
from ..settings import determinism_demanded
from .cache import invalidate
from .measurements import SETTLED, find
from .measurer import measure_now, steps_of, worth_measuring
from .proposals import not_timed, proposals
from .registry import backends, computed_at_once, get_backend, reasons_against
from .request import Request
from .rules import by_rule
from .steps import Step

#: How the reason of such a choice begins.
BY_RULE = "by rule: "
_PROPOSED = "proposed by rule, and timed against PyTorch's own at its first call: "

_by_rules_alone = [0]


@contextmanager
def by_rules_alone() -> Generator[None, None, None]:
    """Choose as if nothing had been measured while the block lasts, in all threads.

    What PyTorch was found to get wrong is avoided all the same.
    """
    _by_rules_alone[0] += 1
    invalidate()
    try:
        yield
    finally:
        _by_rules_alone[0] -= 1
        invalidate()


def choose(
    problem: ConvProblem,
    outputs: Outputs,
    device: torch.device,
    request: Request | None = None,
    *,
    now: bool = False,
    stored: bool = True,
) -> tuple[Step, ...]:
    """The steps that compute ``outputs``; a ``grad_bias`` that no step yields is computed by the engine, as a sum.

    Several gradients come from one sweep if the backend that is chosen for all of them has one.

    Args:
        now: they are about to run, so they may be measured where measuring is on.
        stored: use what was measured on this machine; False for a choice that is to be explained for another one.

    Raises:
        BackendError: a requested backend cannot, or none can; the message holds the reasons.
    """
    if problem.padding_mode != "zeros":  # what is best for the padded copy, and no copy where it can do without
        steps = choose(padded(problem), outputs, device, request, now=now, stored=stored)
        copying = [PaddedCopy.where_needed(s.backend, problem, s.outputs, device) for s in steps]
        return tuple(s._replace(backend=b, proposed=False) for s, b in zip(steps, copying, strict=True))
    passes = passes_of(outputs)
    names = {_name_for(p, request, alone=len(passes) == 1) for p in passes}
    steps: tuple[Step, ...] = ()
    if len(names) == 1:
        name = names.pop()
        if name is not None:
            steps = _by(get_backend(name), "requested by name", problem, outputs, device, requested=True)
        elif (mine := _registered(problem, outputs, device)) is not None:
            steps = mine
        else:
            unsettled = False
            if stored and not _by_rules_alone[0] and not determinism_demanded(device):
                steps, unsettled = _measured(problem, outputs, device, now)
            if not steps:
                steps = _by_rule(problem, outputs, device)
            steps = tuple(step._replace(unsettled=unsettled) for step in steps)
        if not steps and len(passes) == 1:
            raise BackendError(_refusal(name, problem, passes, device))
    return steps or tuple(
        step for p in passes for step in choose(problem, (p,), device, request, now=now, stored=stored)
    )


# ---- by name -------------------------------------------------------------------------------------


def _name_for(pass_: Pass, request: Request | None, alone: bool) -> str | None:
    """The backend that is requested for a pass; None if it has the pass in sweeps only, and none is needed."""
    name = getattr(request, pass_) if request else None
    if name is None or not alone or pass_ in get_backend(name).passes:
        return name
    return None if any(pass_ in sweep for sweep in get_backend(name).sweeps) else name


def _registered(problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[Step, ...] | None:
    """One call of the user's kernel registered last of those that compute any of the passes; no step if it computes
    them one by one, None if there is none. Of one pass a kernel is asked once: it may not answer the same again.
    """
    passes = passes_of(outputs)
    for backend in reversed(backends().values()):
        if not backend.preferred:
            continue
        steps = _by(backend, "registered by the user", problem, outputs, device)
        if steps or any(_by(backend, "", problem, (one,), device) for one in passes if len(passes) > 1):
            return steps
    return None


def _by(
    backend: Backend, reason: str, problem: ConvProblem, outputs: Outputs, device: torch.device, requested: bool = False
) -> tuple[Step, ...]:
    """One call of this backend for all of the outputs, with the gradient of the bias if it can; else no step."""
    wanted = computed_at_once(backend, problem, outputs, device, requested=requested)
    if wanted is None:
        return ()
    if requested:
        warn_of(backend.wrong_here(problem, wanted, device)[0])
    swept = ", in one sweep" if len(passes_of(wanted)) > 1 and backend.name != "aten" else ""
    words = filter(None, (reason, backend.remark(wanted)))
    return (Step(backend, wanted, f"{', '.join(words)}{swept}"),)


# ---- measured ------------------------------------------------------------------------------------


def _measured(problem: ConvProblem, outputs: Outputs, device: torch.device, now: bool) -> tuple[tuple[Step, ...], bool]:
    """The fastest usable steps by what was measured before, or is now; and whether to measure again later."""
    known = find(problem, outputs, device)
    unsettled = now and worth_measuring(problem, device, known)
    if unsettled:
        known = measure_now(problem, outputs, device) or known
        unsettled = known is None or known.count < SETTLED
    if known:
        for way, _ in known.ranked():
            if steps := steps_of(way, problem, outputs, device):
                return tuple(s._replace(reason=known.reason(way)) for s in steps), unsettled
    return (), unsettled


# ---- by rule -------------------------------------------------------------------------------------


def _by_rule(problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[Step, ...]:
    """One call for all of the outputs; no step if no sweep yields them."""
    passes = passes_of(outputs)
    for way, why in by_rule(problem, passes, device):
        steps = _by(get_backend(way), BY_RULE + why, problem, outputs, device)
        if steps:
            return steps
        if any(_by(get_backend(way), "", problem, (one,), device) for one in passes if len(passes) > 1):
            return ()  # it has no sweep, but computes one of the passes: they are chosen one by one
    aten = get_backend("aten")
    why = "no rule prefers another backend"
    if _by(aten, "", problem, outputs, device):  # else there is nothing to time a proposal against
        for way, reason in proposals(problem, device):
            steps = _by(get_backend(way), _PROPOSED + reason, problem, outputs, device)
            singly = [_by(get_backend(way), "", problem, (one,), device) for one in passes if len(passes) > 1]
            if not (steps or any(singly)):
                continue
            untimed = "rules alone decide" if _by_rules_alone[0] else not_timed(device)
            if not untimed:
                return tuple(step._replace(proposed=True) for step in steps)
            why = f"{way} was not timed against it on this GPU, and {untimed}"
            break
    if len(passes) > 1:
        return _by(aten, why, problem, outputs, device)
    wrong, instead = aten.wrong_here(problem, passes, device)
    if not wrong and not reasons_against(aten, problem, passes, device):
        return _by(aten, why, problem, passes, device)
    usable = {b.name: b for b in backends().values() if not reasons_against(b, problem, passes, device)}
    if not usable:
        raise BackendError(_refusal(None, problem, passes, device))
    first = next((usable[n] for n in instead if n in usable), next(iter(usable.values())))
    why = f"PyTorch's kernel is wrong here: {wrong}" if wrong else "the first that can"
    return _by(first, why, problem, passes, device)


def _refusal(requested: str | None, problem: ConvProblem, outputs: Outputs, device: torch.device) -> str:
    """The message: the reasons of the backend that was requested, else of each."""
    who, there = "no backend can", backends()
    if requested is not None:
        who, there[requested] = f"backend {requested!r} cannot", get_backend(requested)  # over a padded copy, perhaps
    found = {n: reasons_against(b, problem, outputs, device) for n, b in there.items()}
    lines = [f"  {n}: {'; '.join(against)}" for n, against in found.items() if against and requested in (None, n)]
    can = [n for n, against in found.items() if not against]
    these = [f"  these can: {', '.join(can)}"] if can else []
    return "\n".join([f"{who} compute {'+'.join(outputs)} of {problem} on {device}:", *lines, *these])
