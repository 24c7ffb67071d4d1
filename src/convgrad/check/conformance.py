"""The conformance suite on many problems: is this backend, function or module right?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..backends import Backend
from ..engine import get_backend
from ..problem import ConvProblem, Output
from .kernels import CustomBackend
from .modules import ConvModule, backend_of
from .problem_set import default_problems, drawn
from .report import CheckReport, CheckResult
from .suite import accepts as accepts_any
from .suite import check_problem, outputs_of
from .verify import SEARCH


def check_backend(
    what: Backend | str | nn.Module | Callable[..., Any],
    problems: Iterable[ConvProblem | str] | None = None,
    *,
    args: Sequence[Any] | None = None,
    accepts: Callable[[ConvProblem], bool | str] | None = None,
    device: torch.device | str = "cpu",
    outputs: Iterable[Output] | None = None,
    seconds: float | None = None,
    progress: Callable[[int, int, ConvProblem], None] | None = None,
    seed: int = 0,
    repeats: int = 20,
    properties: Iterable[str] | None = None,
) -> CheckReport:
    """Check a backend, a function or a module on many problems.

    Args:
        what: a backend, or the name of a registered one; a forward function; or a convolution module, whose forward and
            autograd gradients are checked with its own channels, kernel, stride and padding.
        problems: what to compute; by default `default_problems`, for a module inputs of several sizes, and for a
            function or a registered kernel problems drawn for it.
        args, accepts: for a function, as in `convgrad.register`.
        device, seed, repeats, properties: as for `check_problem`.
        outputs: which of its outputs; all that it has if not given.
        seconds: stop when this much time has passed; the report says so.
        progress: called with (problems done, problems in all, the next problem).

    Raises:
        TypeError: ``what`` is none of these.

    Equivalent to:
        >>> check_backend("reference", ["ic2iw5oc3kw3", "g2ic2ih4oc4kh3ph1 float64"]).ok
        True
        >>> check_backend(nn.Conv2d(4, 6, 3, stride=2, groups=2), properties=["exact", "bound"]).ok
        True
        >>> check_backend(torch.mul, ["ic2iw5oc3kw3"], args=("input", 2)).ok
        False
    """
    if not isinstance(what, (Backend, str)):
        what = backend_of(what, args, accepts)
    elif args is not None or accepts is not None:
        raise TypeError("args and accepts belong to a function; a backend states them itself")
    backend = get_backend(what) if isinstance(what, str) else what
    given = problems_for(backend) if problems is None else problems
    todo = [ConvProblem.parse(p) if isinstance(p, str) else p for p in given]
    chosen = outputs_of(backend) if outputs is None else tuple(outputs)
    names = None if properties is None else tuple(properties)
    end = float("inf") if seconds is None else time.monotonic() + seconds
    results: list[CheckResult] = []
    for done, problem in enumerate(todo):
        if time.monotonic() > end:
            return CheckReport(backend.name, tuple(results), finished=False)
        if progress is not None:
            progress(done, len(todo), problem)
        for output in chosen:
            results += check_problem(
                backend, problem, output, device=device, seed=seed, repeats=repeats, properties=names
            )
    return CheckReport(backend.name, tuple(results))


def problems_for(backend: Backend) -> list[ConvProblem]:
    """Return the problems on which a backend is checked where none are named.

    They are `default_problems`; for a module its own, and for a user's kernel those drawn for it.
    """
    if not isinstance(backend, CustomBackend):
        return list(default_problems())
    if isinstance(backend.own, ConvModule):
        return list(backend.own.problems())
    place = torch.device(next(iter(backend.devices or ("cpu",))))
    return [*backend.named, *drawn(lambda p: accepts_any(backend, p, place), backend.named, seconds=SEARCH)]
