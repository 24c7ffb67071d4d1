"""A profile on one screen, the layers that cost most first, and as a page: one file of HTML that needs nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..engine.measure import Ratio
from ..problem import ConvProblem
from ..tables import Table, counted, wrapped
from .pictures import by_pytorch, draw_roofline, short_names, svg
from .records import Call, without_figures
from .roofline import BEYOND, TOO_LOW

if TYPE_CHECKING:
    from .profile import Change, Kernel, Profile

_FIRST = 5
_HERE = Path(__file__).parent
_CHANGES = 20  # that are shown of all
_GLUE = "\N{NO-BREAK SPACE}"
_UNSURE = 1.5  # times the lower end of an interval


class _Side:
    """The output or the gradients of a group of equal layers: the calls that compute them together."""

    def __init__(self, calls: Sequence[Call], busy: bool) -> None:
        self.calls, self.first = calls, calls[0]
        self.backends = list(dict.fromkeys(call.backend_name for call in calls))
        full = ", ".join(dict.fromkeys(call.backend for call in calls))
        self.by = full if len(full) < 22 else ", ".join(self.backends)
        self.output = "  output" if self.first.direction == "forward" else "  gradients"
        self.total = sum(call.total for call in calls)
        least = [call.least * call.calls for call in calls if call.least is not None]
        self.least = sum(least) if len(least) == len(calls) else None
        one, self.speed = self.first, ""
        wide = not one.low or one.low < 1 < (one.high or 0) > _UNSURE * one.low
        self.unsure = one.speedup is not None and (busy or wide)
        if one.speedup is not None:  # over PyTorch, with its interval
            interval = f" [{_short(one.low)}, {_short(one.high or 0)}]" if one.low else ""
            self.speed = f"{_short(one.speedup)}x{interval}{' ?' * self.unsure}"


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.3g}"


class Layers:
    """Calls by groups of equal layers, the most expensive group first: what `explain` and a profile show of a model.

    ``whole`` is milliseconds of which each row is a share, and their name; on a busy machine no row is to be compared.
    """

    def __init__(
        self, rows: Sequence[Call], kernels: Sequence[Kernel] = (), whole: tuple[float, str] = (0.0, ""),
        busy: bool = False,
    ) -> None:  # fmt: skip
        self.kernels, self.whole = kernels, whole
        groups: dict[tuple[object, ...], dict[str, list[Call]]] = {}
        for row in sorted(rows, key=lambda row: row.direction, reverse=True):
            group = groups.setdefault((row.layers, row.convolution.replace(name="", has_bias=False)), {})
            group.setdefault(row.direction, []).append(row)
        sides = [[_Side(calls, busy) for calls in group.values()] for group in groups.values()]
        self.groups = sorted(sides, key=lambda group: -sum(side.total for side in group))

    def _table(self, groups: Sequence[Sequence[_Side]], without: Sequence[str] = ()) -> Table[_Side]:
        measured, (whole, of) = any(side.total for group in groups for side in group), self.whole

        def of_kernel(kernel: Kernel, side: _Side) -> str:
            refused = any(set(side.first.layers) & set(layers) for layers in kernel.refused.values())
            return "runs" if kernel.name in side.backends else "refused" if refused else "-"

        columns: dict[str, tuple[Callable[[_Side], Any], str]] = {
            "layers": (lambda s: _named(s.first), ""),
            "convolution": (lambda s: described(s.first.problem).replace(_GLUE, " "), ""),
            "": (lambda s: s.output, ""),
            "by": (lambda s: s.by, ""),
            "ms": (lambda s: milliseconds(s.total), ">"),
            "PyTorch": (lambda s: milliseconds((s.first.speedup or 0) * s.total), ">"),
            "times as fast": (lambda s: s.speed, ">"),
            "limit" if measured else "ms at best": (
                (lambda s: s.least and s.least / s.total, ".0%") if measured else (lambda s: s.least, ".3g")),
            of or "share": (lambda s: s.total / whole if whole else None, ".1%"),
            **{kernel.name: (lambda s, kernel=kernel: of_kernel(kernel, s), "") for kernel in self.kernels},
        }  # fmt: skip
        sides = [side for group in groups for side in group]
        return Table(sides, {title: column for title, column in columns.items() if title not in without})

    def lines(self, width: int | None, first: int | None = None, *, texts: bool = False) -> list[str]:
        """Return the table of the first groups, with or without the texts of their problems, and what belongs below it.

        Columns that would exceed the width are left out, the share first and then PyTorch's time.
        """
        groups, (whole, of) = self.groups[:first], self.whole
        without = ["layers", "convolution"]
        rows = self._table(groups, without).text().splitlines()
        for title in (of or "share", "PyTorch"):
            if width is not None and max(map(len, rows)) > width:
                without.append(title)
                rows = self._table(groups, without).text().splitlines()
        result, rest = rows[:1], iter(rows[1:])
        for group in groups:
            one = group[0].first
            named = f"{one.layer}: " if one.layer else ""
            result += [f"{named}{described(one.problem)}", *[f"  {one.problem}"] * texts]
            result += [next(rest) for _ in group]
        if more := self.groups[len(groups) :]:
            part = f", {sum(s.total for group in more for s in group) / whole:.0%} {of}" if whole else ""
            result.append(f"and {counted(len(more), 'group')} of equal layers more{part}: --all shows them")
        if any(side.unsure for group in groups for side in group):
            result.append("?: not to be compared: a busy machine, too few times, or ones that vary too much.")
        if any(side.total and (side.least or 0) / side.total > BEYOND for group in groups for side in group):
            result.append(TOO_LOW)
        count = counted(sum(len(group[0].first.layers) for group in self.groups), "layer")
        for kernel in self.kernels:
            refused = [f"{len(layers)} refused: {reason}" for reason, layers in kernel.refused.items()]
            result.append("; ".join([f"{kernel.name}: {len(kernel.layers)} of {count}", *refused]))
        by: dict[tuple[str, str], dict[str, None]] = {}
        for call in (call for group in groups for side in group for call in side.calls if call.reason):
            by.setdefault((call.backend_name, without_figures(call.reason)), {})[_named(call).split(" ")[0]] = None
        for (name, reason), where in by.items():
            others = f" and {len(where) - 3} more" if len(where) > 3 else ""
            result.append(f"why {name}: {reason} ({', '.join([*where][:3])}{others})")
        return result

    def html(self) -> str:
        """Return the table for a notebook."""
        return self._table(self.groups).html()


def _named(call: Call) -> str:
    return call.layer or call.shown


def screen(profile: Profile, width: int | None = 100, *, everything: bool = False) -> str:
    """Return a profile as text, no line wider than ``width``; everything: not the first five groups of layers only."""
    step, rows = profile.kind == "step" and profile.milliseconds, profile.rows
    every = sum(row.total for row in rows)  # which may be more than a short step, in which no call was watched
    whole = (max(step, every), "of step") if step else (every, "of these")
    layers = Layers(rows, profile.kernels, whole, bool(profile.warnings))
    lines = [profile.finding, *profile.warnings, f"{profile.what}, on {profile.conditions}", ""]
    lines += layers.lines(width, None if everything else _FIRST)
    lines += [f"{cost.what}\n    {cost.remedy}" for cost in profile.costs[:3]]
    if profile.parts:
        lines += ["", parts_of(profile).text()]
    lines += profile.whole
    return text_of(lines, width)


def text_of(lines: Sequence[str], width: int | None) -> str:
    """Return lines as text, none of them wider than ``width``."""
    return "\n".join(line if width is None else wrapped(line, width) for line in lines).replace(_GLUE, " ")


def parts_of(profile: Profile) -> Table[tuple[str, float, float]]:
    """Return 100 % of the step, by kind of operator."""
    parts = [(p.name, p.milliseconds, p.pytorch) for p in profile.parts if p.milliseconds or p.pytorch]
    mine, theirs = sum(part[1] for part in parts), sum(part[2] for part in parts)
    return Table([*parts, ("the step", mine, theirs)], {
        "part of the step": (lambda p: p[0], ""),
        "ms": (lambda p: milliseconds(p[1]), ">"),
        "of it": (lambda p: p[1] / (mine or 1), ".0%"),
        "PyTorch": (lambda p: milliseconds(p[2]), ">"),
        "of its": (lambda p: p[2] / (theirs or 1), ".0%"),
    })  # fmt: skip


def page_of(profile: Profile, changes: Sequence[Change]) -> str:
    """Return the page of a profile, with the changes since the run before."""
    try:
        import matplotlib  # noqa: F401 - what draws the page needs it; said before anything is drawn
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(f"the page needs {error.name}; install it with: pip install 'convgrad[report]'") from None
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    text = {name: Markup((_HERE / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    data = json.dumps(profile.to_dict(), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    rows = profile.rows
    try:
        figure = draw_roofline(rows, profile.limits, width=5.6, height=4.4)
        roofline = svg(figure, f"Roofline of {len(rows)} rows: operations per second against operations per byte")
    except ValueError:
        roofline = "<p>No call has a time.</p>"
    return environment.get_template("page.html").render(
        **text,
        p=profile,
        data=Markup(data),
        roofline=Markup(roofline),
        forms=_forms(profile),
        parts=parts_of(profile).cells() if profile.parts else [],
        changes=_changes(profile, changes),
        names=short_names(rows),
        reasons=Counter(without_figures(r.reason) for r in rows if r.reason).most_common(),
        ends=max((m.start + m.milliseconds for m in profile.timeline), default=0.0),
        finding=profile.finding.partition(". "),
        convolutions=sum(r.total for r in rows) or 1.0,
        pytorch=any(r.pytorch is not None for r in rows),
        limit=any(r.of_limit is not None for r in rows),
        ms_title={"step": "ms a step", "run": "ms in all"}.get(profile.kind, "ms"),
        time=lambda ms: shown(ms / 1e3),
        described=described,
        ms=milliseconds,
        side=lambda backend: "theirs" if by_pytorch(backend) else "ours",
    )


def _forms(profile: Profile) -> list[tuple[str, str, str]]:
    """Return the cells of a table of the whole in each of its forms."""
    cells = [("computed by", "time", "against PyTorch")]
    for v in profile.variants:
        speed = str(Ratio(v.speedup, v.low or 0, v.high or 0)) if v.speedup else ""
        cells.append((v.name, shown(v.milliseconds / 1e3), speed + " ?" * bool(speed and profile.warnings)))
    if profile.kind == "run":
        cells.append(("of it in convolutions", shown(sum(r.total for r in profile.rows) / 1e3), ""))
    return cells


def _changes(profile: Profile, changes: Sequence[Change]) -> list[tuple[str, str, str, str]]:
    """Return the cells of a table of the largest changes since the run before, the whole first."""
    cells = [("convolution", "ms before", "ms after", "speed-up")]
    each = [(f"{described(c.problem)}, {c.direction}", c.before, c.after) for c in changes[:_CHANGES]]
    if profile.before and profile.before.milliseconds and profile.milliseconds:
        each.insert(0, ("the whole", profile.before.milliseconds, profile.milliseconds))
    for name, before, after in each:
        speed = f"{before / after:.2f}x" if before and after else "only before" if before else "only after"
        cells.append((name.replace(_GLUE, " "), milliseconds(before), milliseconds(after), speed))
    return cells


def described(problem: str) -> str:
    """Return a convolution in words, as short as they go."""
    p, by = ConvProblem.parse(problem), "x".join
    kind = "depthwise" if p.depthwise else "dense" if p.groups == 1 else f"{p.groups} groups"
    channels = list(dict.fromkeys((p.out_channels, p.in_channels) if p.transposed else (p.in_channels, p.out_channels)))
    uneven = [str(pair) for pair in dict.fromkeys(p.padding) if pair[0] != pair[1]]
    words = [
        f"{'transposed ' if p.transposed else ''}{kind} {by(map(str, p.kernel_size))}",
        f"{' to '.join(map(str, channels))} channel{'s' * (channels != [1])}",
        by(map(str, p.output_size if p.transposed else p.input_size)),
        f"stride {by(map(str, p.stride))}" if set(p.stride) != {1} else "",
        f"dilation {by(map(str, p.dilation))}" if set(p.dilation) != {1} else "",
        f"batch {p.batch}",
        f"padding {' '.join(uneven)}" if uneven else "",
        f"{p.padding_mode} padding" if p.padding_mode != "zeros" else "",
        str(p.dtype).removeprefix("torch.") if p.dtype != torch.float32 else "",
        "channels_last" if p.channels_last else "",
    ]
    return ", ".join(word.replace(" ", _GLUE) for word in words if word)


def milliseconds(value: float | None) -> str:
    """Three digits; empty where nothing was measured."""
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
