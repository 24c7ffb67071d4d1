"""A first check of a backend, before the engine times it: is it right for this problem?"""

from __future__ import annotations

import torch

from .._compat import out_of_memory
from ..backends import Backend
from ..problem import ConvProblem, Outputs
from .problem_set import shrunk
from .property_check import Failed, PropertyCheck, Skipped, described

#: Training waits for the reference: instead of a large problem a smaller one of its kind is checked, as small as the
#: backend takes one.
_FLOPS = 300_000
_MOST_FLOPS = 100_000_000


def first_look(backend: Backend, problem: ConvProblem, outputs: Outputs, device: torch.device) -> str:
    """Return what is wrong with these outputs, computed in one call; empty if nothing is.

    Integers must be exact, real numbers within the bound; the other properties are the conformance suite's.

    Raises:
        RuntimeError, MemoryError: there is no memory.

    Equivalent to:
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> first_look(ReferenceBackend(), ConvProblem.parse("ic3ih8oc4kh3"), ("forward",), torch.device("cpu"))
        ''
    """

    def usable(p: ConvProblem) -> bool:
        return not (backend.against(p, outputs, device) or backend.wrong_here(p, outputs, device)[0])

    small = shrunk(problem, _FLOPS, usable)
    if small.flops <= _MOST_FLOPS and usable(small):
        for output in outputs:
            if why := _wrong(PropertyCheck(backend, small, output, device), outputs):
                return f"{output} of {small}: {why}"
    return ""


def _wrong(check: PropertyCheck, outputs: Outputs) -> str:
    passes = check.passes(outputs)
    for integers in (True, False) if check.problem.dtype.is_floating_point else (True,):
        try:
            operands = check.integers(*passes) if integers else check.reals(*passes)
            check.compare(check.call(outputs, operands), operands, integers=integers)
        except Skipped:  # mostly zeros
            continue
        except Failed as error:
            return str(error)
        except Exception as error:  # a user's function may raise anything
            if out_of_memory(error):
                raise
            return described(error)
    return ""
