"""The conformance suite on a user's kernel, before anybody can use it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch

from ..check import PROPERTIES, CheckResult, check_problem, default_problems
from ..errors import CheckError
from ..problem import ConvProblem, Output
from .backend import CustomBackend
from .search import admitted_problems

__all__ = ["repeat", "verify"]

#: What a user's kernel is not held to: how much memory it takes beside its result is its own affair, and that two
#: passes contradict each other does not say which one is wrong; each is compared with the reference anyway.
_REQUIRED = tuple(p for p in PROPERTIES if p not in ("workspace", "adjoint"))
#: Runs that must agree bit by bit; `convgrad.testing` asks for more, which a registration cannot wait for.
_REPEATS = 5
#: How many ways in which one problem fails are told; a kernel that writes where it may not fails in every way.
_SHOWN = 3

_ROUNDING = (
    "the result of real numbers is further off than sums in float32 (of float64: in float64) can be; a kernel that "
    'sums otherwise says so: arithmetic="tf32", "transform" or "low-precision accumulation"'
)


def verify(backend: CustomBackend, extra: Sequence[ConvProblem], seconds: float, command: str) -> str:
    """Check every pass on problems that the backend accepts.

    Args:
        extra: problems that the user named, checked first.
        seconds: no problem is begun after this much time.
        command: what repeats a check, with ``{problem}``, ``{output}`` and ``{device}``.

    Returns:
        What was checked, as a sentence.

    Raises:
        CheckError: the first problem that fails, or nothing could be checked.
    """
    devices = [d for d in ("cpu", "cuda") if backend.runs_on(d) and (d == "cpu" or torch.cuda.is_available())]
    if not devices:
        return f"not verified: no {' or '.join(backend.devices or ())} is here"
    todo: list[tuple[str, ConvProblem, Output]] = [
        (d, p, o) for d in devices for p, o in _todo(backend, torch.device(d), extra)
    ]
    end, checked = float("inf"), 0
    for device, problem, output in todo:
        if time.monotonic() > end:
            break
        results = check_problem(backend, problem, output, device=device, repeats=_REPEATS, properties=_REQUIRED)
        failures = [r for r in results if r.status == "failed"]
        if failures:
            raise CheckError(_failure(backend, failures, checked, command))
        if not checked:  # the first one also waits for what PyTorch and the kernel load when first called
            end = time.monotonic() + seconds
        checked += 1
    left = len(todo) - checked
    rest = f"; {left} more were not reached in {seconds:g} s" if left else ""
    return f"verified on {checked} problems{rest}"


def repeat(backend: CustomBackend, problem: str, output: Output, device: str = "cpu", seed: int = 0) -> bool:
    """Check one problem again in every respect, and print what came out; whether nothing failed."""
    results = check_problem(backend, problem, output, device=device, seed=seed)
    for r in results:
        print(f"{r.status}: {r.property_name}{': ' if r.message else ''}{r.message}")
    return all(r.status != "failed" for r in results)


def _todo(
    backend: CustomBackend, device: torch.device, extra: Sequence[ConvProblem]
) -> Iterable[tuple[ConvProblem, Output]]:
    """Problems for each pass, the passes in turn.

    Raises:
        CheckError: a pass for which no problem was found.
    """
    lists: list[list[tuple[ConvProblem, Output]]] = []
    for pass_ in backend.passes:

        def accepts(p: ConvProblem, pass_: Output = pass_) -> bool:
            return not p.empty and not backend.reasons_against(p, (pass_,), device)

        problems = list(dict.fromkeys([*(p for p in extra if accepts(p)), *admitted_problems(accepts)]))
        if not problems:
            raise CheckError(_nothing(backend, pass_, device))
        lists.append([(p, pass_) for p in problems])
    return [entry for row in zip_longest(*lists) for entry in row if entry is not None]


def _failure(backend: CustomBackend, failures: list[CheckResult], checked: int, command: str) -> str:
    first = failures[0]
    lines = [
        f"{first.backend!r} is refused: its {first.output} of {first.problem} is wrong ({checked} problems passed)"
    ]
    for r in sorted(failures, key=lambda r: "it wrote" not in r.message)[:_SHOWN]:
        lines.append(f"  {r.property_name}: {r.message}")
        if r.worst != float("inf"):
            what = f"worst error {r.worst:.6g}, allowed {r.bound:.6g}"
            lines[-1] += f"\n    {f'{r.worst:.0f} where 0 are allowed' if r.bound == 0 else what}"
    if {r.property_name for r in failures} == {"bound"}:  # right on integers, so only the rounding is in question
        lines.append(f"  {_ROUNDING}")
    elif first.problem.channels_last and "channels_last" in backend.layouts and "it raised" not in first.message:
        lines.append(
            "  this problem is in channels_last; a function that needs contiguous tensors says so: "
            'layouts=("contiguous",)'
        )
    problem = str(first.problem.replace(name="")).replace('"', "")
    line = command.format(problem=problem, output=first.output, device=first.device)
    return "\n".join([*lines, f"  repeat: {line}"])


def _nothing(backend: CustomBackend, pass_: Output, device: torch.device) -> str:
    """That no problem was accepted, with the reasons that were given most often."""
    counts = Counter(r for p in default_problems() for r in backend.reasons_against(p, (pass_,), device))
    lines = [
        f"{backend.name!r} cannot be verified: its {pass_} accepts none of the problems tried on {device}; "
        'name some that it does, problems=["g32mb1ic32ih112oc32kh3ph1"]',
        *(f"  {reason} (x{n})" for reason, n in counts.most_common(5)),
    ]
    return "\n".join(lines)
