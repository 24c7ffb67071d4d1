"""What the engine asks before it times a backend for the first time: is it right for this problem?"""

from __future__ import annotations

import torch

from ..backends import Backend
from ..problem import PASSES, ConvProblem, Output
from .property_check import Failed, PropertyCheck, Skipped, described
from .shrink import shrunk

__all__ = ["first_look"]

#: The reference takes its time: training waits, so a large problem is looked at in a smaller one of its kind, and at
#: its own size only where the backend does not take the smaller one.
_FLOPS = 300_000
_MOST_FLOPS = 100_000_000


def first_look(backend: Backend, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> str:
    """What is wrong with these outputs, computed in one call; empty where nothing is.

    Integers must be exact, real numbers within the bound; the other properties are the conformance suite's.

    Equivalent to:
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> first_look(ReferenceBackend(), ConvProblem.parse("ic3ih8oc4kh3"), ("forward",), torch.device("cpu"))
        ''
    """
    for candidate in dict.fromkeys((shrunk(problem, _FLOPS), problem)):
        if candidate.flops <= _MOST_FLOPS and not backend.reasons_against(candidate, outputs, device):
            for output in outputs:
                why = _wrong(PropertyCheck(backend, candidate, output, device), outputs)
                if why:
                    return f"{output} of {candidate}: {why}"
            break
    return ""


def _wrong(check: PropertyCheck, outputs: tuple[Output, ...]) -> str:
    try:
        for integers in (True, False) if check.problem.dtype.is_floating_point else (True,):
            passes = PASSES if len(outputs) > 1 else (check.pass_,)
            operands = check.integers(*passes) if integers else check.reals(*passes)
            result = check.sweep(outputs, operands) if len(outputs) > 1 else check.run(operands)
            check.compare(result, operands, integers=integers)
    except Skipped:
        return ""
    except Failed as error:
        return str(error)
    except Exception as error:  # whatever a user's function raises
        return described(error)
    return ""
