"""The choice of a backend for each output.

What decides is the first of these: a request by name; a kernel that the user registered; what was measured of this
problem on this machine; the rules; and where no rule applies, ATen. Where measuring is on, or a rule proposes a backend
for a GPU, the choice is not final: a call measures it (`measure.measurer.watched`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from ..backends import PaddedCopy, padded, warn_of
from ..errors import BackendError
from ..problem import ConvProblem, Outputs, Pass, passes_of
from ..settings import determinism_demanded
from .measure.measurements import find
from .measure.measurer import not_timed, steps_of, worth_measuring
from .plan import Step
from .registry import backends, computed_at_once, get_backend, reasons_against, registered
from .request import Request
from .rules import by_rule, proposals

#: How the reasons of such choices begin.
BY_RULE, BY_USER = "by rule: ", "registered by the user"
_PROPOSED = "proposed by rule, and timed against PyTorch's own at its first call: "

Steps = tuple[Step, ...]


def choose(
    problem: ConvProblem, outputs: Outputs, device: torch.device, request: Request | None = None, *,
    stored: bool = True, without: str = "",
) -> Steps:  # fmt: skip
    """Return the steps that compute ``outputs``; the engine computes a ``grad_bias`` that no step yields, a sum.

    ``stored``: use what was measured on this machine. ``without``: as if no backend had this name.

    Raises:
        BackendError: a requested backend cannot, or none can; the message holds the reasons.
    """
    if problem.padding_mode != "zeros":  # what is best for the padded copy, and no copy where it can do without
        steps = choose(padded(problem), outputs, device, request, stored=stored, without=without)
        copying = [PaddedCopy.where_needed(s.backend, problem, s.outputs, device) for s in steps]
        return tuple(s._replace(backend=b, proposed=()) for s, b in zip(steps, copying, strict=True))
    return _Choice(problem, device, request, stored and not determinism_demanded(device), without).of(outputs)


class _Choice:
    """One choice. Steps are None where a backend cannot, and empty where it can compute each pass by itself."""

    def __init__(
        self, problem: ConvProblem, device: torch.device, request: Request | None, stored: bool, without: str
    ) -> None:
        self.problem, self.device, self.request = problem, device, request
        self.stored, self.without = stored, without
        #: The sets of outputs that a call may measure.
        self.unsettled: set[Outputs] = set()

        def given(name: str, outputs: Outputs, requested: bool = False) -> Outputs | None:
            backend = get_backend(name) if name != without else None
            return backend and computed_at_once(backend, problem, outputs, device, requested=requested)

        #: The outputs of a set that one call of a backend gives; asked once, for the next answer may be another.
        self.given: Any = cache(given)

    def of(self, outputs: Outputs) -> Steps:
        """Return the first steps that a source gives; where a backend has each pass by itself, choose for each."""
        passes = passes_of(outputs)
        if not passes:  # a gradient of a bias alone
            return ()
        name, *others = {self._requested(pass_, alone=len(passes) == 1) for pass_ in passes}
        sources = () if others else self._sources(outputs, name)
        if steps := next((steps for steps in sources if steps is not None), None):
            return tuple(s._replace(unsettled=outputs) for s in steps) if outputs in self.unsettled else steps
        if len(passes) == 1:
            raise BackendError(self._refusal(name, outputs))
        return tuple(step for pass_ in passes for step in self.of((pass_,)))

    def _requested(self, pass_: Pass, alone: bool) -> str | None:
        """Return the backend requested for a pass; None if it has the pass only with others, and none is needed."""
        name = getattr(self.request, pass_) if self.request else None
        if name is None or not alone or pass_ in get_backend(name).passes:
            return name
        return None if any(pass_ in sweep for sweep in get_backend(name).sweeps) else name

    def _sources(self, outputs: Outputs, request: str | None) -> Iterator[Steps | None]:
        """Yield the steps of backends in the order in which they are tried; None for one that cannot."""
        problem, device, passes = self.problem, self.device, passes_of(outputs)
        if request is not None:
            yield self._steps(request, outputs, "requested by name", requested=True)
            return
        for name, entry in reversed(registered().items()):
            if entry.preferred:
                yield self._steps(name, outputs, BY_USER)
        if self.stored:
            known = find(problem, outputs, device)
            if worth_measuring(problem, device, known):
                self.unsettled.add(outputs)
            if known is not None:
                for name, _ in known.ranked():
                    steps = steps_of(name, problem, outputs, device) if self.without not in name.split(", ") else None
                    yield steps and tuple(s._replace(reason=known.reason(name)) for s in steps)
        for name, why in by_rule(problem, passes, device):
            yield self._steps(name, outputs, BY_RULE + why)
        pytorchs = self._steps("aten", outputs, "no rule prefers another backend")
        proposed = proposals(problem, device) if pytorchs else ()
        found = {name: self._steps(name, outputs, _PROPOSED + why) for name, why in proposed}
        if able := {name: steps for name, steps in found.items() if steps is not None}:
            name, first = next(iter(able.items()))
            if untimed := not_timed(device):
                yield self._steps("aten", outputs, f"{name} was not timed against it on this GPU, and {untimed}")
            # All that compute these outputs in one call are timed together.
            together = tuple(step for steps in able.values() for step in steps)
            yield tuple(step._replace(proposed=together) for step in first)
        yield pytorchs
        if len(passes) == 1:
            wrong, instead = get_backend("aten").wrong_here(problem, passes, device)
            why = f"PyTorch's kernel is wrong here: {wrong}" if wrong else "the first that can"
            for name in dict.fromkeys((*instead, *backends())):
                yield self._steps(name, outputs, why) if name in backends() else None

    # ---- one backend -------------------------------------------------------------------------------------

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
        return (Step(backend, given, ", ".join(filter(None, (reason, backend.remark(given))))),)

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
