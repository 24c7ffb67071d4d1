"""Messages for a kernel that is refused: what is wrong, with which tensors, of which problem, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..problem import ConvProblem, Output
from ..tables import counted
from .loading import loading
from .problem_set import default_problems, in_layouts, real_layers
from .properties import ALL_PROPERTIES, calls_of
from .results import CheckResult
from .suite import check_problem
from .user_backend import NO, CustomBackend, Functions, without_values

#: How many of the properties that a problem lacks are shown.
_SHOWN = 3
_RAISED = "it raised"
_EXPLAINS_THE_REST = ("it wrote", "it changed")
_DTYPES = "a kernel for some dtypes only says which: dtypes=(torch.float32, ...)"
_NO_GPU = (
    'Triton compiles for a GPU: devices="cuda" keeps the kernel to it, and with TRITON_INTERPRET=1 in the environment '
    "Triton interprets it on the CPU"
)
#: Words of a failure's message, and what to change.
_HINTS = {
    "not implemented for": _DTYPES,
    "unsupported ScalarType": _DTYPES,  # numpy has no bfloat16
    "active drivers": _NO_GPU,  # Triton's words, as the next
    "cpu tensor?": _NO_GPU,
    "it changed the number of threads": "a library with OpenMP sets PyTorch's number of threads too; numba, at its "
    "first parallel call: set NUMBA_NUM_THREADS to torch.get_num_threads() before numba is imported",
    "does not require grad": "a backward pass runs without recording gradients: what differentiates does so in "
    "torch.enable_grad()",
}
_THREADS = "threads that it has started are not in the child process in which it is checked: register it before it runs"
_ATOMICS = "a kernel that sums in another order each time, as atomic additions do, says so: deterministic=False"
_TRANSPOSED = (
    "the problem of a transposed convolution is the plain one of which it is the grad_input, with the roles of its "
    "channels exchanged: what computes its output is registered as grad_input"
)
_ROUNDING = (
    "the result of real numbers is further off than sums in float32 (of float64: in float64) can be; a kernel that "
    'sums otherwise says so: arithmetic="tf32", "transform" or "low-precision accumulation"'
)


def nothing_accepted(backend: CustomBackend, output: Output, device: str) -> str:
    reasons = Counter[str]()
    for p in (*default_problems(), *real_layers()):
        against = backend.against(p, calls_of(backend, output)[0], torch.device(device))
        # What it was registered for is said where nothing else is in the way: the user knows that.
        other = [r for r in against if not r.startswith("it was registered for")]
        reasons.update(map(without_values, other or against))
    lines = [
        f"{backend.name!r} cannot be verified: no problem was found that its {output} accepts on {device}; "
        'name some that it does, problems=["g32mb1ic32ih112oc32kh3ph1"]',
        *(f"  {reason} ({n:,} times)" for reason, n in reasons.most_common(5)),
    ]
    if {*reasons} == {NO}:
        lines.append(
            "  padding is a pair for each dimension, p.padding == ((1, 1), (1, 1)) in 2-D; kernel_size, stride and "
            "dilation are tuples, (3, 3)"
        )
    return "\n".join(lines)


def lost(name: str, output: Output, problem: ConvProblem, passed: int, property_name: str, how: str) -> str:
    """Return the message for a kernel that crashed or hung."""
    meaning = " ".join((ALL_PROPERTIES[property_name].__doc__ or "").split())
    hints = [f"the property being checked, {property_name}: {meaning}"]
    hints += [] if problem.dtype == torch.float32 else [_DTYPES]
    hints += [_THREADS] if how.startswith("did not return") else []
    return wrong([CheckResult(name, problem, output, property_name, "failed")], hints, f"{counted(passed)} passed", how)


def wrong(failures: Sequence[CheckResult], hints: Iterable[str], when: str, what: str = "") -> str:
    """Return the message for a wrong kernel, ``when`` it was found, and ``what`` it did if that says all."""
    failures = [r for r in failures if r.message.startswith(_EXPLAINS_THE_REST)] or failures
    first = next((r for r in failures if r.message.startswith(_RAISED)), failures[0])
    if first.message.startswith(_RAISED):
        what = first.message.removeprefix("it ")
    lines = [f"{first.backend!r} is refused: its {first.output} {what or 'is wrong'} ({when})"]
    distinct = {} if what else {r.message: r for r in reversed(failures)}  # the first of each
    for r in [*reversed(distinct.values())][:_SHOWN]:
        lines.append(f"  {r.property_name}: {r.message}")
        lines += [f"    worst error {r.worst:.6g}, allowed {r.bound:.6g}"] if r.bound else []
    lines += [f"  it was called with {first.operands}"] if first.operands else []
    lines += [f"  the problem: {first.problem}", *(f"  {hint}" for hint in hints)]
    source = loading.get()
    if source is not None:  # a command, which registers the kernels of --kernels without checking them
        return "\n".join([*lines, f"  repeat: {first.repeat(source.source)}"])
    return "\n".join([*lines, "  to repeat it, register it with verify=False and call", f"    {first.repeat(None)}"])


def advice(backend: CustomBackend, failures: Sequence[CheckResult], repeats: int) -> Iterator[str]:
    """Yield what to change, where that is known."""
    failure, names = failures[0], {r.property_name for r in failures}
    p, raised = failure.problem, failure.message.startswith(_RAISED)
    if known := [hint for words, hint in _HINTS.items() if any(words in r.message for r in failures)]:
        yield known[0]
    elif all("gave other bits" in r.message for r in failures):
        yield _ATOMICS
    elif p.transposed and failure.output == "forward" and (raised or failure.message.startswith("forward of")):
        yield _TRANSPOSED
    elif "bound" in names <= {"bound", "bias"}:  # right on integers, so only the rounding is in question
        yield _ROUNDING
    elif names <= {"deterministic", "again", "threads"}:  # of several calls, whatever the layout
        return
    elif layout := _right_layout(backend, failure, repeats):
        yield (
            f"it is right where the same tensors are {layout}; a function that needs that says so: "
            f'layouts=("{layout}",)'
        )
    elif raised and isinstance(backend.own, Functions):
        yield from backend.own.unsaid(failure.output)


def _right_layout(backend: CustomBackend, failure: CheckResult, repeats: int) -> str:
    """Return the layout in which the problem passes, of two that the backend takes; empty if there is none."""
    p = failure.problem
    if p.ndim == 1 or not {"contiguous", "channels_last"} <= {*backend.layouts}:
        return ""
    right, wrong = in_layouts(p)[:: 1 if p.channels_last else -1]

    def passes(q: ConvProblem, *more: str) -> bool:
        how: Any = {"device": failure.device, "repeats": repeats, "properties": (failure.property_name, *more)}
        return {r.status for r in check_problem(backend, q, failure.output, **how)} == {"passed"}

    # Each twice, and the right one for later calls too: a kernel that fails now and then is not told of layouts.
    return right.layout if all(passes(right, "again") and not passes(wrong) for _ in range(2)) else ""
