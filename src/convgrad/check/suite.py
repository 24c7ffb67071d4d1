"""One output of one problem, property after property; `testing.check_backend` does so for many problems.

A backend is only ever compared with the reference, with itself, and with the error bound of the arithmetic that it
declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent import futures
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from ..backends import Backend
from ..engine import get_backend
from ..problem import OUTPUTS, ConvProblem, Output, Outputs
from .properties import ALL_PROPERTIES, PROPERTIES
from .property_check import Differs, Failed, PropertyCheck, Skipped, calls_with, described
from .report import CheckResult, Status


def outputs_of(backend: Backend) -> Outputs:
    """Return all outputs that a backend can compute, alone or in a sweep."""
    return tuple(o for o in OUTPUTS if calls_with(backend, o))


def accepts(backend: Backend, problem: ConvProblem, device: torch.device) -> bool:
    """Whether a backend can compute anything of a problem."""
    return not all(backend.against(problem, call, device) for o in OUTPUTS for call in calls_with(backend, o))


def check_problem(
    backend: Backend | str,
    problem: ConvProblem | str,
    output: Output,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    repeats: int = 20,
    threads: int = 0,
    properties: Iterable[str] | None = None,
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
        properties: which to check, names out of ``PROPERTIES`` and ``STRESS``; all of ``PROPERTIES`` if not given.
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
    names = list(PROPERTIES if properties is None else properties)
    if unknown := [name for name in names if name not in ALL_PROPERTIES]:
        raise ValueError(f"unknown property {unknown[0]!r}; properties are {', '.join(ALL_PROPERTIES)}")
    backend = get_backend(backend) if isinstance(backend, str) else backend
    problem = ConvProblem.parse(problem) if isinstance(problem, str) else problem
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where PyTorch was built without it
        raise ValueError(f"there is no device {device} here: {error}") from None
    name = ""

    def doing() -> None:
        if progress is not None:
            progress(name)

    check = PropertyCheck(backend, problem, output, torch.device(device), seed, repeats, threads, doing)
    reasons = check.reasons_against()
    if reasons:
        return [_result(check, "usable", "skipped", "; ".join(reasons))]
    results: list[CheckResult] = []
    failed: dict[str, str] = {}
    for name in names:
        doing()
        found = _check_property(check, name)
        if found.status == "failed" and failed.setdefault(found.message, name) != name:
            found = _result(check, name, "skipped", f"it fails as {failed[found.message]} does")
        results.append(found)
    return results


def _check_property(check: PropertyCheck, name: str) -> CheckResult:
    try:
        worst, bound = max(ALL_PROPERTIES[name](check), default=(0.0, 0.0))
    except Skipped as e:
        return _result(check, name, "skipped", str(e))
    except Failed as e:
        return _result(check, name, "differs" if isinstance(e, Differs) else "failed", str(e), e.worst, e.bound)
    except (Exception, SystemExit) as e:  # whatever a backend raises is its failure
        return _result(check, name, "failed", f"{described(e)}{_where(e)}", float("inf"))
    return _result(check, name, "passed", "", worst, bound)


def _where(error: BaseException) -> str:
    """Return the line of the backend's own code at which an error was raised; empty if there is none."""
    others = (str(Path(torch.__file__).parent), str(Path(futures.__file__).parent), str(Path(__file__).parents[1]))
    lines = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    return f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""


def _result(check: PropertyCheck, name: str, status: Status, *found: Any) -> CheckResult:
    what = (check.backend.name, check.problem, check.output, name, status)
    given = check.given if status == "failed" else ""
    return CheckResult(*what, *found, seed=check.seed, device=str(check.device), operands=given)
