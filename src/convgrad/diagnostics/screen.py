"""A step on one screen: the layers that cost most, who computes them, against PyTorch, and what it adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..tables import Table, counted, wrapped
from .calls import Call
from .page import described

if TYPE_CHECKING:
    from .profile import Kernel, Profile

_FIRST = 5
_UNSURE = 1.5  # times the lower end of an interval


class _Side:
    """The output or the gradients of a group of equal layers: the calls that compute them together."""

    def __init__(self, calls: Sequence[Call], kernels: Sequence[Kernel], step: float | None, busy: bool) -> None:
        self.first, self.layers, self.busy = calls[0], calls[0].layers, busy
        names = list(dict.fromkeys(call.backend for call in calls))
        full = ", ".join(names)
        self.by = full if len(full) < 20 else ", ".join(dict.fromkeys(name.split(" ")[0] for name in names))
        self.total = sum(call.total for call in calls)
        least = [call.least * call.calls for call in calls if call.least is not None]
        self.of_limit = sum(least) / self.total if len(least) == len(calls) and self.total else None
        self.step = self.total / step if step else None
        self.kernels = {kernel.name: _of_kernel(kernel, names, self.layers) for kernel in kernels}

    @property
    def unsure(self) -> bool:
        """Whether the machine was busy, or there is no interval, or a wide one with 1 in it."""
        one = self.first
        wide = not one.low or one.low < 1 < (one.high or 0) > _UNSURE * one.low
        return one.speedup is not None and (self.busy or wide)

    @property
    def speed(self) -> str:
        one = self.first
        if one.speedup is None:
            return ""
        interval = f" [{one.low:.2f}, {one.high:.2f}]" if one.low else ""
        return f"{one.speedup:.2f}x{interval}{' ?' * self.unsure}"


def _of_kernel(kernel: Kernel, names: Sequence[str], layers: Sequence[str]) -> str:
    if any(name.split(" ")[0] == kernel.name for name in names):
        return "runs"
    return "refused" if any(set(layers) & set(refused) for refused in kernel.refused.values()) else "-"


def screen(profile: Profile, width: int | None = 100, *, everything: bool = False) -> str:
    """Return a profile as text, no line wider than ``width``; everything: not the first five groups of layers only."""
    groups: dict[tuple[object, ...], list[Call]] = {}
    for row in profile.rows:
        groups.setdefault((row.layers, row.convolution.replace(name="", has_bias=False)), []).append(row)
    ordered = sorted(groups.values(), key=lambda calls: -sum(call.total for call in calls))
    some = ordered if everything else ordered[:_FIRST]
    step = profile.milliseconds if profile.kind == "step" else sum(row.total for row in profile.rows)
    sides = [
        [_Side(calls, profile.kernels, step, bool(profile.warnings))
         for direction in ("forward", "backward") if (calls := [c for c in group if c.direction == direction])]
        for group in some
    ]  # fmt: skip
    of = "of step" if profile.kind == "step" else "of these"
    every = [side for group in sides for side in group]
    table = Table(every, {
        "": (lambda s: "  output" if s.first.direction == "forward" else "  gradients", ""),
        "by": (lambda s: s.by, ""),
        "ms": (lambda s: s.total, ".3g"),
        "PyTorch": (lambda s: s.first.speedup and s.first.speedup * s.total, ".3g"),
        "times as fast": (lambda s: s.speed, ">"),
        "limit": (lambda s: s.of_limit, ".0%"),
        of: (lambda s: s.step, ".1%"),
        **{kernel.name: (lambda s, name=kernel.name: s.kernels[name], "") for kernel in profile.kernels},
    })  # fmt: skip
    texts = table.text().splitlines()
    lines = [*profile.warnings, f"{profile.what}: {profile.finding}", "", *texts[:1]]
    at = 1
    for group in sides:
        lines += [_title(group[0].first), *texts[at : at + len(group)]]
        at += len(group)
    if len(ordered) > len(some):
        rest = sum(call.total for group in ordered[len(some) :] for call in group)
        part = f", {rest / step:.0%} {of}" if step else ""
        lines.append(f"and {counted(len(ordered) - len(some), 'group')} of equal layers more{part}: --all shows them")
    if any(side.unsure for side in every):
        lines.append("?: not to be compared: a busy machine, too few times, or ones that vary too much.")
    lines += [
        "",
        *_kernels(profile.kernels, sum(len(group[0].layers) for group in ordered)),
        *_reasons([call for group in some for call in group]),
    ]
    lines += [f"{cost.what}\n    {cost.remedy}" for cost in profile.costs[:3]]
    if profile.parts:
        lines += ["", _parts(profile)]
    lines += [profile.conditions, *profile.whole]
    return "\n".join(line if width is None else wrapped(line, width) for line in lines)


def _title(call: Call) -> str:
    """The layers of a group, and their convolution in words."""
    names = call.layers or ("",)
    more = f" and {len(names) - 1} more" if names[1:] else ""
    words = described(call.problem).replace("\N{NO-BREAK SPACE}", " ").replace("\N{MULTIPLICATION SIGN}", "x")
    return f"{names[0]}{more}: {words}" if names[0] else words


def _kernels(kernels: Sequence[Kernel], count: int) -> list[str]:
    """What each kernel of the user's computes of the model, and what it refuses."""
    result = []
    for kernel in kernels:
        refused = [f"{len(layers)} refused: {reason}" for reason, layers in kernel.refused.items()]
        result.append("; ".join([f"{kernel.name}: {len(kernel.layers)} of {counted(count, 'layer')}", *refused]))
    return result


def _reasons(calls: Sequence[Call]) -> list[str]:
    """Why each backend runs, each reason once."""
    by: dict[tuple[str, str], list[str]] = {}
    for call in calls:
        reason = call.reason.removesuffix(", in one sweep")
        by.setdefault((call.backend.split(" ")[0], reason), []).append(call.layers[0] if call.layers else call.shown)
    return [
        f"why {name}: {reason} ({', '.join(dict.fromkeys(where))})" for (name, reason), where in by.items() if reason
    ]


def _parts(profile: Profile) -> str:
    """100 % of the step, by kind of operator."""
    parts = [part for part in profile.parts if part.milliseconds or part.pytorch]
    whole = sum(part.milliseconds for part in parts), sum(part.pytorch for part in parts)
    rows = [*((p.name, p.milliseconds, p.pytorch) for p in parts), ("the step", *whole)]
    return Table(rows, {
        "part of the step": (lambda r: r[0], ""),
        "ms": (lambda r: r[1], ".3g"),
        "of it": (lambda r: r[1] / (whole[0] or 1), ".0%"),
        "PyTorch": (lambda r: r[2], ".3g"),
        "of its": (lambda r: r[2] / (whole[1] or 1), ".0%"),
    }).text()  # fmt: skip
