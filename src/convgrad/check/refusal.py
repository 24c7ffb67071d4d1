"""Messages for a kernel that is refused: what is wrong, with which tensors, of which problem, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .._compat import channels_last_of
from ..problem import ConvProblem, Output
from ..tables import counted
from .kernels import NO, CustomBackend, Functions
from .loading import loading
from .properties import ALL_PROPERTIES
from .report import CheckResult
from .suite import check_problem

#: How many of the properties that a problem lacks are shown.
_SHOWN = 3
_EXPLAINS_THE_REST = ("it wrote", "it changed")
_DTYPES = "a kernel for some dtypes only says which: dtypes=(torch.float32, ...)"
_NO_GPU = (
    'Triton compiles for a GPU: devices="cuda" keeps the kernel to it, and with TRITON_INTERPRET=1 in the environment '
    "Triton interprets it on the CPU"
)
#: Words of a failure's message, and what to change.
_HINTS = {
    "not implemented for": _DTYPES,
    "active drivers": _NO_GPU,  # Triton's words, as the next
    "cpu tensor?": _NO_GPU,
    "it changed the number of threads": "a library with OpenMP sets PyTorch's number of threads too; numba, at its "
    "first parallel call: set NUMBA_NUM_THREADS to torch.get_num_threads() before numba is imported",
    "does not require grad": "a backward pass runs without recording gradients: what differentiates does so in "
    "torch.enable_grad()",
}
_ATOMICS = "a kernel that sums in another order each time, as atomic additions do, says so: deterministic=False"
_TRANSPOSED = (
    "the problem of a transposed convolution is the plain one of which it is the grad_input, with the roles of its "
    "channels exchanged: what computes its output is registered as grad_input"
)
_ROUNDING = (
    "the result of real numbers is further off than sums in float32 (of float64: in float64) can be; a kernel that "
    'sums otherwise says so: arithmetic="tf32", "transform" or "low-precision accumulation"'
)


def nothing_accepted(backend: CustomBackend, output: Output, reasons: Sequence[tuple[str, int]], device: str) -> str:
    lines = [
        f"{backend.name!r} cannot be verified: no problem was found that its {output} accepts on {device}; "
        'name some that it does, problems=["g32mb1ic32ih112oc32kh3ph1"]',
        *(f"  {reason} ({n:,} times)" for reason, n in reasons),
    ]
    if all(reason == NO for reason, _ in reasons):
        lines.append(
            "  padding is a pair for each dimension, p.padding == ((1, 1), (1, 1)) in 2-D; kernel_size, stride and "
            "dilation are tuples, (3, 3)"
        )
    return "\n".join(lines)


def lost(backend: CustomBackend, output: Output, problem: ConvProblem | None, passed: int, name: str, how: str) -> str:
    """Return the message for a kernel that crashed or hung; without a problem, while one was searched for."""
    if problem is None:
        return f"{backend.name!r} is refused: its accepts, called for {output}, {how}"
    meaning = (ALL_PROPERTIES[name].__doc__ or "").strip().splitlines()
    return "\n".join(
        [
            f"{backend.name!r} is refused: its {output} {how} ({counted(passed)} passed)",
            f"  the property being checked, {name}: {' '.join(line.strip() for line in meaning)}",
            f"  the problem: {problem}",
            *([] if problem.dtype == torch.float32 else [f"  {_DTYPES}"]),
            *_repeat(backend.name, problem, output, "cpu", name),
        ]
    )


def wrong(failures: Sequence[CheckResult], hints: Sequence[str], when: str) -> str:
    """Return the message for a wrong kernel: the failures, its operands, and the problem; ``when`` it was found."""
    failures = [r for r in failures if r.message.startswith(_EXPLAINS_THE_REST)] or failures
    first = failures[0]
    raised = next((r for r in failures if r.message.startswith("it raised")), None)
    if raised is not None:
        what = raised.message.removeprefix("it ")
        failures, first = [], raised
    else:
        what = "is wrong"
    lines = [f"{first.backend!r} is refused: its {first.output} {what} ({when})"]
    distinct = {r.message: r for r in reversed(failures)}  # the first of each
    for r in [*reversed(distinct.values())][:_SHOWN]:
        lines.append(f"  {r.property_name}: {r.message}")
        if r.bound:
            lines[-1] += f"\n    worst error {r.worst:.6g}, allowed {r.bound:.6g}"
    if first.operands:
        lines.append(f"  it was called with {first.operands}")
    lines.append(f"  the problem: {first.problem}")
    lines += [f"  {hint}" for hint in hints]
    return "\n".join([*lines, *_repeat(first.backend, first.problem, first.output, first.device, first.property_name)])


def advice(backend: CustomBackend, failures: Sequence[CheckResult], repeats: int) -> Iterator[str]:
    """Yield what to change, where that is known."""
    failure, names = failures[0], {r.property_name for r in failures}
    p = failure.problem
    if known := [hint for words, hint in _HINTS.items() if any(words in r.message for r in failures)]:
        yield known[0]
    elif all("gave other bits" in r.message for r in failures):
        yield _ATOMICS
    elif p.transposed and failure.output == "forward" and failure.message.startswith(("it raised", "forward of")):
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
    elif failure.message.startswith("it raised") and isinstance(backend.own, Functions):
        yield from backend.own.unsaid(failure.output)


def _right_layout(backend: CustomBackend, failure: CheckResult, repeats: int) -> str:
    """Return the layout in which the problem passes, of two that the backend takes; empty if there is none."""
    p = failure.problem
    if p.ndim == 1 or not {"channels_last", "contiguous"} <= {*backend.layouts}:
        return ""
    other = p.replace(memory_format=torch.contiguous_format if p.channels_last else channels_last_of(p.ndim))
    where, names = {"device": failure.device, "repeats": repeats}, [failure.property_name]
    # Twice: a kernel that fails now and then is not told of layouts.
    found = [check_problem(backend, q, failure.output, properties=names, **where)[0].status for q in (other, p) * 2]
    return ("contiguous" if p.channels_last else "channels_last") if found == ["passed", "failed"] * 2 else ""


def _repeat(name: str, problem: ConvProblem, output: Output, device: str, property_name: str) -> list[str]:
    result = CheckResult(name, problem, output, property_name, "failed", device=device)
    source = loading.get()
    if source is not None:  # a command, which registers the kernels of --kernels without checking them
        return [f"  repeat: {result.repeat(source.source)}"]
    return ["  to repeat it, register it with verify=False and call", f"    {result.repeat(None)}"]
