"""What the engine asks before it times a backend for the first time: is it right for this problem?"""

from __future__ import annotations

import torch

from ..backends import Backend
from ..problem import ConvProblem, Output
from .shrink import shrunk
from .suite import check_problem

__all__ = ["first_look"]

#: The reference takes its time: training waits, so a large problem is looked at in a smaller one of its kind, and at
#: its own size only where the backend does not take the smaller one.
_FLOPS = 300_000
_MOST_FLOPS = 100_000_000


def first_look(backend: Backend, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> str:
    """What is wrong with these outputs, computed in one call; empty where nothing is.

    Equivalent to:
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> first_look(ReferenceBackend(), ConvProblem.parse("ic3ih8oc4kh3"), ("forward",), torch.device("cpu"))
        ''
    """
    properties = ("exact", "bound") if len(outputs) == 1 else ("sweeps",)
    for candidate in (shrunk(problem, _FLOPS), problem):
        if candidate.flops > _MOST_FLOPS:
            break
        looked = False
        for output in outputs:
            results = check_problem(backend, candidate, output, device=device, repeats=2, properties=properties)
            failed = [r for r in results if r.status == "failed"]
            if failed:
                return f"{failed[0].output} of {candidate}: {failed[0].message}"
            looked |= any(r.status == "passed" for r in results)
        if looked:
            break
    return ""
