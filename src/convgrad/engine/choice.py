"""The choice of a backend for each output.

What decides is the first of these: a request by name; a kernel that the user registered; what was measured of this
problem on this machine; where measuring is on, a measurement now; the rules; and where no rule applies, ATen. On a GPU
a rule only proposes: the first call of what it chose is a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from ..backends import PaddedCopy, padded, warn_of
from ..errors import BackendError
from ..problem import ConvProblem, Outputs, Pass, passes_of
from ..settings import determinism_demanded
from .measure.measurements import SETTLED, find
from .measure.measurer import measure_now, not_timed, steps_of, worth_measuring
from .plan import Step
from .registry import backends, computed_at_once, get_backend, reasons_against, registered
from .request import Request
from .rules import by_rule, proposals

#: How the reasons of such choices begin.
BY_RULE, BY_USER = "by rule: ", "registered by the user"
_PROPOSED = "proposed by rule, and timed against PyTorch's own at its first call: "

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

    ``now``: they are about to run, so they may be measured. ``stored``: use what was measured on this machine.

    Raises:
        BackendError: a requested backend cannot, or none can; the message holds the reasons.
    """
    if problem.padding_mode != "zeros":  # what is best for the padded copy, and no copy where it can do without
        steps = choose(padded(problem), outputs, device, request, now=now, stored=stored)
        copying = [PaddedCopy.where_needed(s.backend, problem, s.outputs, device) for s in steps]
        return tuple(s._replace(backend=b, proposed=False) for s, b in zip(steps, copying, strict=True))
    return _Choice(problem, device, request, now, stored).of(outputs)


class _Choice:
    """One choice. Each source of it returns steps, no step where each pass is to be chosen by itself, or None."""

    def __init__(
        self, problem: ConvProblem, device: torch.device, request: Request | None, now: bool, stored: bool
    ) -> None:
        self.problem, self.device, self.request, self.now = problem, device, request, now
        self.stored = stored and not determinism_demanded(device)
        #: Of outputs that are to be chosen again, once there is time to measure.
        self.unsettled: set[Outputs] = set()
        #: What one call of a backend gives of some outputs; asked once, for the next answer may not be the same.
        self.given: Any = cache(self._given)

    def of(self, outputs: Outputs) -> Steps:
        """Return the steps of the first source that has some; where it leaves each pass by itself, choose for each."""
        passes = passes_of(outputs)
        if not passes:  # a gradient of a bias alone
            return ()
        names = {self._requested(pass_, alone=len(passes) == 1) for pass_ in passes}
        name, several = next(iter(names)), len(names) > 1
        steps: Steps | None = None
        if name is not None and not several:
            steps = self._steps(name, outputs, "requested by name", requested=True)
        elif not several:
            steps = next((found for found in self._sources(outputs) if found is not None), None)
        if steps:
            return tuple(step._replace(unsettled=outputs in self.unsettled) for step in steps)
        if len(passes) == 1:
            raise BackendError(self._refusal(name, outputs))
        return tuple(step for pass_ in passes for step in self.of((pass_,)))

    def _requested(self, pass_: Pass, alone: bool) -> str | None:
        """Return the backend requested for a pass; None if it has the pass only with others, and none is needed."""
        name = getattr(self.request, pass_) if self.request else None
        if name is None or not alone or pass_ in get_backend(name).passes:
            return name
        return None if any(pass_ in sweep for sweep in get_backend(name).sweeps) else name

    def _sources(self, outputs: Outputs) -> Iterator[Steps | None]:
        mine = (name for name, entry in reversed(registered().items()) if entry.preferred)
        yield self._first(((name, BY_USER) for name in mine), outputs)
        yield self._measured(outputs) if self.stored else None
        ruled = by_rule(self.problem, passes_of(outputs), self.device)
        yield self._first(((way, BY_RULE + why) for way, why in ruled), outputs)
        yield self._pytorchs(outputs)

    def _measured(self, outputs: Outputs) -> Steps | None:
        """Return the fastest usable steps by what was measured before, or is now."""
        there = self.problem, outputs, self.device
        known = find(*there)
        if self.now and worth_measuring(self.problem, self.device, known):
            known = measure_now(*there) or known
            if known is None or known.count < SETTLED:
                self.unsettled.add(outputs)
        if known:
            for way, _ in known.ranked():
                if steps := steps_of(way, *there):
                    return tuple(s._replace(reason=known.reason(way)) for s in steps)
        return None

    def _pytorchs(self, outputs: Outputs) -> Steps | None:
        """Return PyTorch's steps, or those proposed to be timed against them; where it is wrong, what replaces it."""
        steps = self._steps("aten", outputs, "no rule prefers another backend")
        for way, reason in proposals(self.problem, self.device) if steps else ():
            proposed = self._steps(way, outputs, _PROPOSED + reason)
            if proposed is None:
                continue
            if not (untimed := not_timed(self.device)):
                return tuple(step._replace(proposed=True) for step in proposed)
            return self._steps("aten", outputs, f"{way} was not timed against it on this GPU, and {untimed}")
        passes = passes_of(outputs)
        if steps or len(passes) > 1:
            return steps
        wrong, instead = get_backend("aten").wrong_here(self.problem, passes, self.device)
        why, there = f"PyTorch's kernel is wrong here: {wrong}" if wrong else "the first that can", backends()
        return self._first(((name, why) for name in dict.fromkeys((*instead, *there)) if name in there), outputs)

    # ---- one backend -------------------------------------------------------------------------------------

    def _given(self, name: str, outputs: Outputs, requested: bool = False) -> Outputs | None:
        """Return what one call of a backend gives: all outputs, or all but the gradient of the bias; else None."""
        return computed_at_once(get_backend(name), self.problem, outputs, self.device, requested=requested)

    def _steps(self, name: str, outputs: Outputs, reason: str, requested: bool = False) -> Steps | None:
        """Return one call of a backend; no step if it computes some of several passes, each by itself; else None."""
        given = self.given(name, outputs, requested)
        if given is None:
            passes = passes_of(outputs)
            apart = len(passes) > 1 and any(self.given(name, (pass_,), requested) for pass_ in passes)
            return () if apart else None
        backend = get_backend(name)
        if requested:
            warn_of(backend.wrong_here(self.problem, given, self.device)[0])
        together = ", in one sweep" if len(passes_of(given)) > 1 and name != "aten" else ""
        words = filter(None, (reason, backend.remark(given)))
        return (Step(backend, given, f"{', '.join(words)}{together}"),)

    def _first(self, ways: Iterable[tuple[str, str]], outputs: Outputs) -> Steps | None:
        """Return the steps of the first of these backends that computes any of the passes; each comes with a reason."""
        found = (self._steps(name, outputs, reason) for name, reason in ways)
        return next((steps for steps in found if steps is not None), None)

    def _refusal(self, requested: str | None, outputs: Outputs) -> str:
        """Return the message: the reasons of the backend that was requested, else of each."""
        who, there, asked = "no backend can", backends(), passes_of(outputs)
        if requested is not None:
            who, there[requested] = f"backend {requested!r} cannot", get_backend(requested)  # over a copy, perhaps
        found = {n: reasons_against(b, self.problem, asked, self.device) for n, b in there.items()}
        lines = [f"  {n}: {'; '.join(against)}" for n, against in found.items() if against and requested in (None, n)]
        can = [n for n, against in found.items() if not against]
        these = [f"  these can: {', '.join(can)}"] if can else []
        return "\n".join([f"{who} compute {'+'.join(asked)} of {self.problem} on {self.device}:", *lines, *these])
