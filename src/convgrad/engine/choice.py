"""The choice of a backend for each output.

What decides is the first of these: a request by name; a kernel that the user registered; what was measured of this
problem on this machine; where measuring is on, a measurement now; the rules; and where no rule applies, ATen. On a GPU
a rule only proposes: the first call of what it chose is a measurement.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

from ..backends import Backend, PaddedCopy, padded, warn_of
from ..errors import BackendError
from ..problem import ConvProblem, Outputs, Pass, passes_of
from ..settings import determinism_demanded
from .cache import invalidate
from .measure.measurements import SETTLED, find
from .measure.measurer import measure_now, not_timed, steps_of, worth_measuring
from .registry import backends, computed_at_once, get_backend, reasons_against
from .request import Request
from .rules import by_rule, proposals
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


Steps = tuple[Step, ...]


def choose(
    problem: ConvProblem,
    outputs: Outputs,
    device: torch.device,
    request: Request | None = None,
    *,
    now: bool = False,
    stored: bool = True,
) -> Steps:
    """Return the steps that compute ``outputs``; the engine computes a ``grad_bias`` that no step yields, a sum.

    Several gradients come from one call if the backend that is chosen for all of them has one, else each is chosen by
    itself.

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
    return _choose(_Asked(problem, outputs, device, {}), request, now, stored)


class _Asked:
    """Some outputs of a problem, about which each backend is asked once: the next answer may not be the same."""

    def __init__(self, problem: ConvProblem, outputs: Outputs, device: torch.device, answers: dict[Any, Any]) -> None:
        self.problem, self.outputs, self.device = problem, outputs, device
        self.passes = passes_of(outputs)
        self._answers = answers
        #: The choice is to be made again once there is time to measure.
        self.unsettled = False

    def one_by_one(self) -> list[_Asked]:
        """Return the same question for each pass."""
        return [_Asked(self.problem, (pass_,), self.device, self._answers) for pass_ in self.passes]

    def given(self, backend: Backend, requested: bool = False) -> Outputs | None:
        """Return what one call of a backend gives: all outputs, or all but the gradient of the bias; else None."""
        key = backend.name, self.outputs, requested
        if key not in self._answers:
            there = self.problem, self.outputs, self.device
            self._answers[key] = computed_at_once(backend, *there, requested=requested)
        return self._answers[key]

    def steps(self, name: str, reason: str, requested: bool = False) -> Steps | None:
        """Return one call of a backend; no step if it computes some of several passes, each by itself; else None."""
        backend = get_backend(name)
        given = self.given(backend, requested)
        if given is None:
            apart = self.one_by_one() if len(self.passes) > 1 else ()
            return () if any(one.given(backend, requested) for one in apart) else None
        if requested:
            warn_of(backend.wrong_here(self.problem, given, self.device)[0])
        together = ", in one sweep" if len(passes_of(given)) > 1 and backend.name != "aten" else ""
        words = filter(None, (reason, backend.remark(given)))
        return (Step(backend, given, f"{', '.join(words)}{together}"),)

    def first(self, ways: Iterable[tuple[str, str]]) -> Steps | None:
        """Return the steps of the first of these backends that computes any of the passes; each comes with a reason."""
        found = (self.steps(*way) for way in ways)
        return next((steps for steps in found if steps is not None), None)


def _choose(asked: _Asked, request: Request | None, now: bool, stored: bool) -> Steps:
    """Return the steps of the first source that has some; where it computes passes by themselves, choose for each."""
    if not asked.passes:  # a gradient of a bias alone
        return ()
    name, *others = {_name_for(p, request, alone=len(asked.passes) == 1) for p in asked.passes}
    if others:
        steps = ()
    elif name is not None:
        steps = asked.steps(name, "requested by name", requested=True)
    else:
        mine = (b.name for b in reversed(backends().values()) if b.preferred)
        steps = asked.first((name, "registered by the user") for name in mine)
        if steps is None and stored and not _by_rules_alone[0] and not determinism_demanded(asked.device):
            steps = _measured(asked, now)
        if steps is None:
            steps = asked.first((way, BY_RULE + why) for way, why in by_rule(asked.problem, asked.passes, asked.device))
        if steps is None:
            steps = _pytorchs(asked)
    if steps:
        return tuple(step._replace(unsettled=asked.unsettled) for step in steps)
    if len(asked.passes) == 1:
        raise BackendError(_refusal(name, asked))
    return tuple(step for one in asked.one_by_one() for step in _choose(one, request, now, stored))


# ---- the sources: steps, no step for each pass by itself, or None ------------------------------------


def _name_for(pass_: Pass, request: Request | None, alone: bool) -> str | None:
    """Return the backend requested for a pass; None if it has the pass only with others, and none is needed."""
    name = getattr(request, pass_) if request else None
    if name is None or not alone or pass_ in get_backend(name).passes:
        return name
    return None if any(pass_ in sweep for sweep in get_backend(name).sweeps) else name


def _measured(asked: _Asked, now: bool) -> Steps | None:
    """Return the fastest usable steps by what was measured before, or is now."""
    there = asked.problem, asked.outputs, asked.device
    known = find(*there)
    if now and worth_measuring(asked.problem, asked.device, known):
        known = measure_now(*there) or known
        asked.unsettled = known is None or known.count < SETTLED
    if known:
        for way, _ in known.ranked():
            if steps := steps_of(way, *there):
                return tuple(s._replace(reason=known.reason(way)) for s in steps)
    return None


def _pytorchs(asked: _Asked) -> Steps:
    """Return PyTorch's steps, or those proposed to be timed against them; where it is wrong, what replaces it."""
    aten = get_backend("aten")
    steps = asked.steps("aten", "no rule prefers another backend")
    if steps:  # else there is nothing to time a proposal against
        for way, reason in proposals(asked.problem, asked.device):
            proposed = asked.steps(way, _PROPOSED + reason)
            if proposed is None:
                continue
            untimed = "rules alone decide" if _by_rules_alone[0] else not_timed(asked.device)
            if not untimed:
                return tuple(step._replace(proposed=True) for step in proposed)
            return asked.steps("aten", f"{way} was not timed against it on this GPU, and {untimed}") or ()
    if steps or len(asked.passes) > 1:
        return steps or ()
    wrong, instead = aten.wrong_here(asked.problem, asked.passes, asked.device)
    why = f"PyTorch's kernel is wrong here: {wrong}" if wrong else "the first that can"
    there = backends()
    return asked.first((name, why) for name in dict.fromkeys((*instead, *there)) if name in there) or ()


def _refusal(requested: str | None, asked: _Asked) -> str:
    """Return the message: the reasons of the backend that was requested, else of each."""
    who, there = "no backend can", backends()
    if requested is not None:
        who, there[requested] = f"backend {requested!r} cannot", get_backend(requested)  # over a padded copy, perhaps
    found = {n: reasons_against(b, asked.problem, asked.passes, asked.device) for n, b in there.items()}
    lines = [f"  {n}: {'; '.join(against)}" for n, against in found.items() if against and requested in (None, n)]
    can = [n for n, against in found.items() if not against]
    these = [f"  these can: {', '.join(can)}"] if can else []
    head = f"{who} compute {'+'.join(asked.passes)} of {asked.problem} on {asked.device}:"
    return "\n".join([head, *lines, *these])
