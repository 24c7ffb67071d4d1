"""The conformance suite: is this backend, function or module right?

`check_problem` checks one output of one problem, property after property, `check_backend` many problems, and
`first_look` a problem before the engine times it. A backend is only ever compared with the reference, with itself, and
with the error bound of the arithmetic that it declares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from .._compat import out_of_memory
from ..backends import Backend
from ..engine import get_backend
from ..problem import OUTPUTS, ConvProblem, Output, Outputs
from .problem_set import default_problems, drawn, parsed, shrunk
from .properties import ALL_PROPERTIES, PROPERTIES, Outcome, PropertyCheck, calls_of, skipped
from .results import CheckReport, CheckResult
from .unregistered import ConvModule, backend_of
from .user_backend import CustomBackend, as_tuple


def outputs_of(backend: Backend) -> Outputs:
    """Return all outputs that a backend can compute, alone or in a sweep."""
    return tuple(o for o in OUTPUTS if calls_of(backend, o))


def accepts(backend: Backend, problem: ConvProblem, device: torch.device, output: Output | None = None) -> bool:
    """Whether a backend can compute an output of a problem, or any of its outputs."""
    return not all(backend.against(problem, call, device) for call in calls_of(backend, output))


def check_problem(
    backend: Backend | str,
    problem: ConvProblem | str,
    output: Output,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    repeats: int = 20,
    threads: int = 0,
    properties: Iterable[str] | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[CheckResult]:
    """Check every property of one output of one problem.

    Args:
        backend: a backend, or the name of a registered one.
        problem: a problem, or its text.
        output: a pass, or ``grad_bias`` (which only sweeps compute).
        device: where to run.
        seed: of the operands.
        repeats: how many runs must agree bit by bit.
        threads: with how many threads of PyTorch the repeated runs compute, which must be right with any number; 0: as
            many as now.
        properties: one or several to check, names out of ``PROPERTIES`` and ``STRESS``; all of ``PROPERTIES`` if not
            given.
        progress: called with the name of each property before it is checked, and before each call of the backend.

    Returns:
        One result for each property, skipped where it would repeat the message of an earlier failure; a single skipped
        one if the backend has reasons against the problem.

    Raises:
        ValueError: an unknown output or property, a text that is not a problem, or a device that is not here.
        KeyError: no backend has this name.

    Equivalent to:
        >>> results = check_problem("reference", "g2ic4iw9oc6kw3", "grad_weight")
        >>> {r.status for r in results} <= {"passed", "skipped"}
        True
    """
    if output not in OUTPUTS:
        raise ValueError(f"unknown output {output!r}; outputs are {', '.join(OUTPUTS)}")
    names = list(PROPERTIES if properties is None else as_tuple("properties", properties))
    if unknown := [name for name in names if name not in ALL_PROPERTIES]:
        raise ValueError(f"unknown property {unknown[0]!r}; properties are {', '.join(ALL_PROPERTIES)}")
    backend = get_backend(backend) if isinstance(backend, str) else backend
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where PyTorch was built without it
        raise ValueError(f"there is no device {device} here: {error}") from None
    check = PropertyCheck(backend, parsed(problem), output, torch.device(device), seed, repeats, threads)
    check.progress = progress or check.progress
    results: list[CheckResult] = []
    failed: dict[str, str] = {}

    def add(name: str, outcome: Outcome) -> None:
        message = str(outcome)
        if outcome.status == "failed" and failed.setdefault(message, name) != name:
            outcome, message = skipped(""), f"it fails as {failed[message]} does"
        given = check.given if outcome.status == "failed" else ""
        found = outcome.status, message, outcome.worst, outcome.bound
        results.append(CheckResult(backend.name, check.problem, output, name, *found, seed, str(check.device), given))

    if reasons := check.reasons_against():
        add("usable", skipped("; ".join(reasons)))
    for name in names if not reasons else ():
        add(name, check.outcome(name))
    refused = [why for call in check.calls for why in backend.against(check.problem, call, check.device)]
    if backend.checks_itself and refused:  # since then PyTorch's kernels compute in its place
        add("usable", Outcome(f"it found itself wrong: {refused[0]}", inf))
    return results


def check_backend(
    what: Backend | str | nn.Module | Callable[..., Any],
    problems: Iterable[ConvProblem | str] | ConvProblem | str | None = None,
    *,
    args: Sequence[Any] | None = None,
    accepts: Callable[[ConvProblem], bool | str] | None = None,
    device: torch.device | str = "cpu",
    outputs: Iterable[Output] | Output | None = None,
    seconds: float | None = None,
    progress: Callable[[int, int, ConvProblem], None] | None = None,
    seed: int = 0,
    repeats: int = 20,
    properties: Iterable[str] | str | None = None,
) -> CheckReport:
    """Check a backend, a function or a module on many problems.

    Args:
        what: a backend, or the name of a registered one; a forward function; or a convolution module, whose forward and
            autograd gradients are checked with its own channels, kernel, stride and padding.
        problems: one or several to compute; by default `default_problems`, for a module inputs of several sizes, and
            for a function or a registered kernel problems drawn for it.
        args, accepts: for a function, as in `convgrad.register`.
        outputs: one or several of its outputs; all that it has if not given.
        seconds: stop when this much time has passed; the report says so.
        progress: called with (problems done, problems in all, the next problem).
        device, seed, repeats, properties: as for `check_problem`.

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
    todo = [parsed(p) for p in as_tuple("problems", given)]
    chosen = outputs_of(backend) if outputs is None else as_tuple("outputs", outputs)
    names = None if properties is None else as_tuple("properties", properties)
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


def problems_for(backend: Backend, output: Output | None = None, device: str = "") -> list[ConvProblem]:
    """Return the problems of a check that names none: those of the list, of a module, or drawn for a user's kernel.

    Those of a kernel are of one ``output`` if it is given; those that it was registered with come first.
    """
    if not isinstance(backend, CustomBackend):
        return list(default_problems())
    if isinstance(backend.own, ConvModule):
        return list(backend.own.problems())
    place = torch.device(device or next(iter(backend.devices or ("cpu",))))

    def computes(p: ConvProblem) -> bool:
        return accepts(backend, p, place, output)

    named = [p for p in dict.fromkeys(backend.named) if computes(p)]
    return [*named, *drawn(computes, named, backend.padding_modes)]


#: Training waits for the reference: instead of a large problem a smaller one of its kind is checked, as small as the
#: backend takes one.
_FLOPS = 300_000
_MOST_FLOPS = 100_000_000


def first_look(backend: Backend, problem: ConvProblem, outputs: Outputs, device: torch.device) -> str:
    """Return what is wrong with these outputs, computed in one call; empty if nothing is.

    Integers must be exact, real numbers within the bound; that there is no memory is raised.
    """

    def usable(p: ConvProblem) -> bool:
        return not (backend.against(p, outputs, device) or backend.wrong_here(p, outputs, device)[0])

    small = shrunk(problem, _FLOPS, usable)
    for output in outputs if small.flops <= _MOST_FLOPS and usable(small) else ():
        check = PropertyCheck(backend, small, output, device)
        check.calls = [outputs]
        for outcome in map(check.outcome, ("exact", "bound")):
            error = outcome.__cause__
            if error is not None and out_of_memory(error):
                raise error
            if outcome.status in ("failed", "differs"):
                return f"{output} of {small}: {outcome}"
    return ""
