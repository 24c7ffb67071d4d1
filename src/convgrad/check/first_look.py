"""A first check of a backend, before the engine times it: is it right for this problem?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .._compat import out_of_memory
from ..backends import Backend
from ..problem import ConvProblem, Outputs
from .problems import changed
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


# ---- the same convolution, smaller ------------------------------------------------------------------


def shrunk(
    problem: ConvProblem, most_flops: int, accepts: Callable[[ConvProblem], bool] = lambda p: True
) -> ConvProblem:
    """Return a problem of at most about ``most_flops``, with equal kernel, stride, dilation, border and kind of groups.

    First a smaller batch, then fewer groups, fewer channels in each, and fewer rows; what cannot be reduced stays. Each
    size keeps its remainder modulo the stride, so that rows that no kernel reads are still there.

    Args:
        accepts: what it does not accept is not tried.
    """
    p = problem
    if p.flops <= most_flops or p.empty:
        return p
    steps = (_batch, (2, 1)), (fewer_groups, (16, 5, 3, 2)), (_channels, (16, 7, 3)), (_rows, (16, 9, 5, 2, 1))
    for fewer, limits in steps:
        for most in limits:
            if p.flops > most_flops and accepts(small := fewer(p, most).canonical()):
                p = small
    return p


def _batch(p: ConvProblem, most: int) -> ConvProblem:
    return p.replace(batch=min(p.batch, most))


def fewer_groups(p: ConvProblem, most: int) -> ConvProblem:
    """Return the problem with at most ``most`` groups of the same size."""
    n = min(p.groups, most)
    return p.replace(groups=n, in_channels=p.in_channels // p.groups * n, out_channels=p.out_channels // p.groups * n)


def _channels(p: ConvProblem, most: int) -> ConvProblem:
    per_in, per_out = (min(n // p.groups, most) for n in (p.in_channels, p.out_channels))
    return p.replace(in_channels=per_in * p.groups, out_channels=per_out * p.groups)


def _rows(p: ConvProblem, rows: int) -> ConvProblem:
    """Return the problem with at most ``rows`` output positions in each dimension."""
    sizes = []
    for i, out in enumerate(p.output_size):
        cut = min(max(0, out - rows), max(0, (p.input_size[i] - 1) // p.stride[i]))
        sizes.append(p.input_size[i] - cut * p.stride[i])
    return changed(p, input_size=tuple(sizes), name=p.name) or p
