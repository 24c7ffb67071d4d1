"""The check: is a backend's output right, for this problem, in every respect that the engine relies on?

`check_problem` looks at one output of one problem, aspect after aspect (`aspects.ASPECTS`); `check_backend` does so for
many problems and reports. A backend is only ever compared with the reference, with itself, and with the error bound of
the arithmetic that it declares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import extract_tb

import torch

from ..backends.base import Backend
from ..engine.registry import get
from ..problem import OUTPUTS, ConvProblem, Output
from .problems import default_problems
from .properties import ASPECTS, Case, Differs, Failed, Skipped
from .report import CheckReport, CheckResult, Status

__all__ = ["check_backend", "check_problem", "outputs_of"]


def outputs_of(backend: Backend) -> tuple[Output, ...]:
    """Everything that a backend can compute, alone or in a sweep.

    Equivalent to:
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> outputs_of(ReferenceBackend())
        ('forward', 'grad_input', 'grad_weight')
    """
    swept = {output for sweep in backend.sweeps for output in sweep}
    return tuple(o for o in OUTPUTS if o in backend.passes or o in swept)


def check_problem(
    backend: Backend | str,
    problem: ConvProblem | str,
    output: Output,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    repeats: int = 20,
    aspects: Iterable[str] | None = None,
) -> list[CheckResult]:
    """Check one output of one problem in every aspect.

    Args:
        backend: a backend, or the name of a registered one.
        problem: a problem, or its text.
        output: a pass, or ``grad_bias`` (which only sweeps compute).
        device: where to run.
        seed: of the operands.
        repeats: how many runs must agree bit by bit.
        aspects: which to check, names out of ``ASPECTS``; all of them if not given.

    Returns:
        One result for each aspect; a single skipped one where the backend has reasons against the problem.

    Equivalent to:
        >>> results = check_problem("reference", "g2ic4iw9oc6kw3", "grad_weight")
        >>> {r.status for r in results} <= {"passed", "skipped"}
        True
    """
    backend = get(backend) if isinstance(backend, str) else backend
    problem = ConvProblem.parse(problem) if isinstance(problem, str) else problem
    case = Case(backend, problem, output, torch.device(device), seed, repeats)
    reasons = case.reasons_against()
    if reasons:
        return [_result(case, "usable", "skipped", message="; ".join(reasons))]
    return [_check_aspect(case, name, ASPECTS[name]) for name in (ASPECTS if aspects is None else aspects)]


def _check_aspect(case: Case, name: str, aspect: Callable[[Case], tuple[float, float]]) -> CheckResult:
    try:
        worst, bound = aspect(case)
    except Skipped as e:
        return _result(case, name, "skipped", message=str(e))
    except Failed as e:
        status = "differs" if isinstance(e, Differs) else "failed"
        return _result(case, name, status, message=str(e), worst=e.worst, bound=e.bound)
    except Exception as e:  # whatever a backend raises is its failure, not ours
        message = f"it raised {type(e).__name__}: {e}{_where(e)}"
        return _result(case, name, "failed", message=message, worst=float("inf"))
    return _result(case, name, "passed", worst=worst, bound=bound)


def _where(error: Exception) -> str:
    """The line of the backend's own code at which an error was raised, where there is one."""
    theirs = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    lines = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(theirs)]
    return f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""


def _result(
    case: Case, aspect: str, status: Status, *, message: str = "", worst: float = 0.0, bound: float = 0.0
) -> CheckResult:
    return CheckResult(
        backend=case.backend.name,
        problem=case.problem,
        output=case.output,
        aspect=aspect,
        status=status,
        message=message,
        worst=worst,
        bound=bound,
        seed=case.seed,
        device=str(case.device),
    )


def check_backend(
    backend: Backend | str,
    problems: Iterable[ConvProblem | str] | None = None,
    *,
    device: torch.device | str = "cpu",
    outputs: Iterable[Output] | None = None,
    seconds: float | None = None,
    progress: Callable[[int, int, ConvProblem], None] | None = None,
    seed: int = 0,
    repeats: int = 20,
    aspects: Iterable[str] | None = None,
) -> CheckReport:
    """Check a backend on many problems.

    Args:
        backend: a backend, or the name of a registered one.
        problems: what to compute; `default_problems` if not given.
        device: where to run.
        outputs: which of its outputs; all that it has if not given.
        seconds: stop when this much time has passed; the report says so.
        progress: called with (problems done, problems in all, the next problem).
        seed: of the operands.
        repeats: how many runs must agree bit by bit.
        aspects: which to check, names out of ``ASPECTS``; all of them if not given.

    Equivalent to:
        >>> report = check_backend("reference", ["ic2iw5oc3kw3", "g2ic2ih4oc4kh3ph1 float64"])
        >>> report.ok
        True
    """
    backend = get(backend) if isinstance(backend, str) else backend
    todo = [
        ConvProblem.parse(p) if isinstance(p, str) else p
        for p in (default_problems() if problems is None else problems)
    ]
    asked = tuple(outputs) if outputs is not None else outputs_of(backend)
    chosen = None if aspects is None else tuple(aspects)
    end = None if seconds is None else time.monotonic() + seconds
    results: list[CheckResult] = []
    for done, problem in enumerate(todo):
        if end is not None and time.monotonic() > end:
            return CheckReport(backend.name, tuple(results), finished=False)
        if progress is not None:
            progress(done, len(todo), problem)
        for output in asked:
            results += check_problem(
                backend, problem, output, device=device, seed=seed, repeats=repeats, aspects=chosen
            )
    return CheckReport(backend.name, tuple(results))
