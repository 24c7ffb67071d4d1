"""The conformance suite on a user's kernel, before anybody can use it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

from ..check import PROPERTIES, CheckResult, check_problem, default_problems, outputs_of
from ..errors import CheckError
from ..problem import ConvProblem, Output
from ..sizes import output_length
from .backend import CustomBackend

__all__ = ["problems_for", "verify"]

#: Without the limit on memory, which a user's kernel never declared, and without the comparison of two passes, which
#: does not say which one is wrong; each is compared with the reference anyway.
_REQUIRED = tuple(a for a in PROPERTIES if a not in ("workspace", "adjoint"))
#: Runs that must agree bit by bit; `convgrad.testing` makes more, for which a registration cannot wait.
_REPEATS = 5
#: How many of the properties that a problem lacks are shown; a kernel that writes where it may not lacks them all.
_SHOWN = 3
#: Where fewer problems are accepted, more are made of them.
_ENOUGH = 60
#: Longer than a tile of 128, and no multiple of anything, of 2, of 32.
_LONG = (131, 130, 160)
#: Operations of one pass of a problem made here, unless the kernel takes larger ones only.
_MOST_FLOPS = 4_000_000

_ROUNDING = (
    "the result of real numbers is further off than sums in float32 (of float64: in float64) can be; a kernel that "
    'sums otherwise says so: arithmetic="tf32", "transform" or "low-precision accumulation"'
)


def verify(backend: CustomBackend, named: Sequence[ConvProblem], seconds: float) -> str:
    """Check every pass on problems that the backend accepts.

    Args:
        named: problems that the user names, checked first.
        seconds: no problem is begun after this much time.

    Returns:
        What was checked, as a sentence.

    Raises:
        CheckError: the first problem that fails, or a pass accepts none.
    """
    devices = [d for d in ("cpu", "cuda") if backend.runs_on(d) and (d == "cpu" or torch.cuda.is_available())]
    if not devices:
        return f"not verified: no {' or '.join(backend.devices or ())} is here"
    todo: list[tuple[int, str, Output, ConvProblem]] = [
        (i, device, pass_, problem)
        for device in devices
        for pass_ in outputs_of(backend)
        if pass_ != "grad_bias"  # it comes with the other gradients
        for i, problem in enumerate(_problems(backend, device, pass_, named))
    ]
    todo.sort(key=lambda entry: entry[0])  # the passes in turn
    end, checked = float("inf"), 0
    for _, device, pass_, problem in todo:
        if time.monotonic() > end:
            break
        results = check_problem(backend, problem, pass_, device=device, repeats=_REPEATS, properties=_REQUIRED)
        failures = [r for r in results if r.status == "failed"]
        if failures:
            raise CheckError(_failure(backend, failures, checked))
        if not checked:  # the first one also waits for what PyTorch and the kernel load when first called
            end = time.monotonic() + seconds
        checked += 1
    left = len(todo) - checked
    rest = f"; {left} more were not reached in {seconds:g} s" if left else ""
    return f"verified on {checked} problem{'s'[: checked != 1]}{rest}"


# ---- problems ------------------------------------------------------------------------------------


def _problems(
    backend: CustomBackend, device: str, pass_: Output, named: Sequence[ConvProblem]
) -> Sequence[ConvProblem]:
    reasons: Counter[str] = Counter()

    def accepts(p: ConvProblem) -> bool:
        ways: list[tuple[Output, ...]] = (
            [(pass_,)] if pass_ in backend.passes else [s for s in backend.sweeps if pass_ in s]
        )
        against = [backend.reasons_against(p, way, torch.device(device)) for way in ways]
        reasons.update(against[0])
        return not p.empty and not all(against)

    problems = problems_for(accepts, named)
    if problems:
        return problems
    lines = [
        f"{backend.name!r} cannot be verified: its {pass_} accepts none of the default problems on {device}; "
        'name some that it does, problems=["g32mb1ic32ih112oc32kh3ph1"]',
        *(f"  {reason} (x{n})" for reason, n in reasons.most_common(5)),
    ]
    raise CheckError("\n".join(lines))


def problems_for(accepts: Callable[[ConvProblem], bool], named: Sequence[ConvProblem] = ()) -> list[ConvProblem]:
    """The named problems and the default ones that a kernel accepts; if these are few, mixtures of both; and problems
    that are longer in one respect than a tile.

    Those named come first, the others in an order in which the first few differ in everything.
    """
    first = [p for p in named if accepts(p)]
    default = list(default_problems())
    random.Random(0).shuffle(default)
    found = dict.fromkeys([*first, *filter(accepts, default)])
    bases = sorted(found, key=lambda p: p.flops)
    limit = max(_MOST_FLOPS, 4 * bases[0].flops) if bases else 0

    def accepted(problems: Iterable[ConvProblem | None]) -> dict[ConvProblem, None]:
        return dict.fromkeys(p for p in problems if p is not None and p.flops <= limit and accepts(p))

    for other in default:
        if len(found) < _ENOUGH:
            found |= accepted(m for p in bases if p.ndim == other.ndim for m in _mixtures(p, other))
    smallest = {(p.ndim, p.depthwise, p.pointwise): p for p in sorted(found, key=lambda p: -p.flops)}.values()
    longer = accepted(q for size in _LONG for p in smallest for q in _longer(p, size))
    usual = [p for p in found if p not in first]
    in_turn = [p for pair in zip_longest(usual, longer) for p in pair if p is not None]
    return list(dict.fromkeys([*first, *in_turn]))


def _mixtures(p: ConvProblem, other: ConvProblem) -> Iterator[ConvProblem | None]:
    """The first one's kernel on the other one's image, and the other one with as many channels as the first."""
    image = {name: getattr(other, name) for name in ("batch", "input_size", "dtype", "memory_format")}
    yield _changed(p, **image)
    yield _changed(p, **image, stride=other.stride)
    yield _changed(p, **image, **_channels(p, other.in_channels))
    yield _changed(other, groups=p.groups, in_channels=p.in_channels, out_channels=p.out_channels)


def _longer(p: ConvProblem, size: int) -> Iterator[ConvProblem | None]:
    """More columns, rows, images (half as many) or channels."""
    yield _changed(p, input_size=(*p.input_size[:-1], size))
    yield _changed(p, input_size=(size, *p.input_size[1:]))
    yield _changed(p, batch=size // 2 + 2)
    yield _changed(p, **_channels(p, size))
    if p.groups == 1:
        yield _changed(p, out_channels=size)


def _channels(p: ConvProblem, n: int) -> dict[str, int]:
    """So many input channels, or groups of as many channels as now."""
    if p.groups == 1:
        return {"in_channels": n}
    return {"groups": n, "in_channels": p.in_channels // p.groups * n, "out_channels": p.out_channels // p.groups * n}


def _changed(p: ConvProblem, **changes: Any) -> ConvProblem | None:
    """The problem with other sizes; None where they leave no output."""
    names = ("input_size", "kernel_size", "stride", "padding", "dilation")
    dims = zip(*(changes.get(name, getattr(p, name)) for name in names), strict=True)
    out = tuple(output_length(n, k, s, low, high, d) for n, k, s, (low, high), d in dims)
    return p.replace(output_size=out, **changes).canonical() if min(out) > 0 else None


# ---- messages ------------------------------------------------------------------------------------


def _failure(backend: CustomBackend, failures: list[CheckResult], checked: int) -> str:
    first = failures[0]
    lines = [
        f"{first.backend!r} is refused: its {first.output} of {first.problem} is wrong ({checked} problems passed)"
    ]
    for r in sorted(failures, key=lambda r: "it wrote" not in r.message)[:_SHOWN]:
        lines.append(f"  {r.property_name}: {r.message}")
        if r.bound:
            lines[-1] += f"\n    worst error {r.worst:.6g}, allowed {r.bound:.6g}"
    if {r.property_name for r in failures} == {"bound"}:  # right on integers, so only the rounding is in question
        lines.append(f"  {_ROUNDING}")
    elif first.problem.channels_last and "channels_last" in backend.layouts and "it raised" not in first.message:
        lines.append(
            "  this problem is in channels_last; a function that needs contiguous tensors says so: "
            'layouts=("contiguous",)'
        )
    text = str(first.problem.replace(name=""))
    device = "" if first.device == "cpu" else f', device="{first.device}"'
    lines.append(
        "  to repeat it, register it with verify=False and call\n"
        f'    convgrad.testing.check_problem("{first.backend}", "{text}", "{first.output}"{device})'
    )
    return "\n".join(lines)
