"""The roofline as a picture: what each call reached, below what the machine can do at best.

Drawn by matplotlib, which is imported when something is drawn. As SVG for a page, its colors are the page's variables,
its text is text, and each point says which one it is (``data-row``), so that the page can find it.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from .roofline import Limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .records import Call

_NAMED = 8  # points, where there is room
_FAR = (9, 20, 34, 50, 70)  # points from its mark to a label; a line leads there

_MARKERS = {"ours": "o", "theirs": "s"}
#: Variable of a page -> the color that stands for it in the drawing.
_COLORS = {"ink": "#1b1f23", "muted": "#59636e", "rule": "#dfe3e8", "ours": "#0b6e63", "theirs": "#a04a0c"}
#: The same where no page has such a variable: readable on any background, as in a notebook.
_ELSEWHERE = dict(zip(_COLORS, ("currentColor", "currentColor", "#88888855", "#1a9584", "#c9691b"), strict=True))


def by_pytorch(backend: str) -> bool:
    """Whether a backend, its name with or without a kernel's behind it, runs kernels of PyTorch's."""
    return re.match(r"aten\b", backend) is not None


def draw_roofline(
    calls: Sequence[Call], limits: Sequence[Limits], *, width: float = 6.8, height: float = 4.2
) -> Figure:
    """Return the picture, ``width`` by ``height`` inches: a point for each call, the larger the more time it takes.

    The first calls are named; one without a time is drawn on the roof, as what could be. There is a roof for each of
    the limits. It is a ValueError if there is nothing to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure((width, height), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    most = max((call.total for call in calls), default=0.0) or 1.0
    drawn, sides = dict[Any, str](), set[str]()  # a call's point -> its name
    for i, (call, name) in enumerate(zip(calls, short_names(calls), strict=True)):
        flops, moved = call.work
        # Of what was not measured, the time at best.
        took = call.milliseconds or (call.against(limits[0]).least if limits else None)
        if flops and moved and took:
            sides.add(side := "theirs" if by_pytorch(call.backend) else "ours")
            face, alpha = (_COLORS[side], 0.8) if call.milliseconds else ("none", None)
            point = axes.scatter(
                [flops / moved], [flops / took / 1e6], s=16 + 150 * call.total / most, marker=_MARKERS[side],
                linewidths=1.2, edgecolors=_COLORS[side], zorder=3, gid=f"row-{i}", facecolors=face, alpha=alpha,
            )  # fmt: skip
            label = f"{name or call.name} {call.direction if ',' in call.shown else call.shown}"
            drawn[point] = label if i < _NAMED else ""
    if not drawn:
        raise ValueError("there is nothing to draw: no call was measured, and what this machine can do is not known")
    xs, ys = ([point.get_offsets()[0][i] for point in drawn] for i in (0, 1))
    xs += [one.flops_per_second / one.bytes_per_second for one in limits]
    left, right = min(xs) / 1.7, max(xs) * 1.7
    top = max(ys + [one.flops_per_second / 1e9 for one in limits])
    axes.set(xlim=(left, right), ylim=(min(ys) / 1.8, top * 1.9))
    said = {"color": _COLORS["muted"], "fontsize": 9, "textcoords": "offset points", "ha": "right"}
    for one in limits:
        peak, slope = one.flops_per_second / 1e9, one.bytes_per_second / 1e9
        ridge = peak / slope
        axes.plot([left, ridge, right], [left * slope, peak, peak], color=_COLORS["ink"], linewidth=1.3, zorder=2)
        axes.annotate(f"{peak:,.3g} GFLOP/s {one.dtype}", (right, peak), (-3, 5), **said)
        if ridge > left * 2.5:
            middle = math.sqrt(left * ridge)
            axes.annotate(f"{slope:,.3g} GB/s", (middle, middle * slope), (-5, 5), **said)
    for side, name in (("ours", "convgrad"), ("theirs", "PyTorch")):
        if side in sides:
            axes.scatter([], [], s=40, marker=_MARKERS[side], color=_COLORS[side], label=name)
    figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=_COLORS["ink"], handletextpad=0.2)
    axes.grid(which="major", color=_COLORS["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=_COLORS["muted"])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axis.label.set_color(_COLORS["muted"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_COLORS["rule"])
    _labels(figure, axes, drawn)
    return figure


def short_names(calls: Sequence[Call]) -> list[str]:
    """Return the first layer of each call, without the last word where all layers have the same; empty for none."""
    names = [call.layers[0] if call.layers else "" for call in calls]
    ends = {name.rpartition(".")[2] for name in names if name}
    drop = f".{ends.pop()}" if len(ends) == 1 and all("." in name for name in names if name) else ""
    return [name.removesuffix(drop) for name in names]


def _labels(figure: Figure, axes: Any, drawn: Mapping[Any, str]) -> None:
    """Name the points that have a label, the most important first, where there is room: on no other mark or text."""
    from matplotlib.path import Path
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # now it is known where everything is
    inside, names, unit = axes.get_window_extent(), [t.get_window_extent() for t in axes.texts], figure.dpi / 72
    lines, marks = [axes.transData.transform_path(line.get_path()) for line in axes.lines], list[Any]()
    for point in drawn:
        (px, py), r = axes.transData.transform(point.get_offsets()[0]), math.sqrt(point.get_sizes()[0]) / 2
        marks.append(Bbox.from_bounds(px - r, py - r, 2 * r, 2 * r))
    for point in sorted(filter(drawn.get, drawn), key=lambda point: -point.get_sizes()[0]):
        text = axes.text(0.5, 0.5, drawn[point], fontsize=9, transform=axes.transAxes)  # to know its size
        place = point.get_offsets()[0]
        size, (px, py) = text.get_window_extent(), axes.transData.transform(place)
        for far, angle in product(_FAR, range(0, 360, 30)):
            dx, dy = far * math.cos(math.radians(angle)), far * math.sin(math.radians(angle))
            side = 0 if angle in (90, 270) else 1 if dx > 0 else -1
            left = px + dx * unit - size.width * (1 - side) / 2
            box = Bbox.from_bounds(left, py + dy * unit - size.height / 2, size.width, size.height)
            leader = Path([(px, py), (px + dx * unit, py + dy * unit)])
            crossed = (line.intersects_bbox(box, filled=False) for line in lines)
            through = (leader.intersects_bbox(name, filled=False) for name in names)
            in_it = inside.contains(*box.min) and inside.contains(*box.max)
            if in_it and not box.count_overlaps(marks + names) and not any(crossed) and not any(through):
                names.append(box)
                lines.append(leader)
                line = {"arrowstyle": "-", "color": _COLORS["muted"], "lw": 0.6, "shrinkA": 0, "shrinkB": 0,
                        "relpos": ((1 - side) / 2, 0.5)}  # fmt: skip
                axes.annotate(
                    drawn[point], place, (dx, dy), textcoords="offset points", fontsize=9, va="center",
                    ha={-1: "right", 0: "center", 1: "left"}[side], color=_COLORS["ink"], zorder=4, arrowprops=line,
                ).set_in_layout(False)  # fmt: skip
                break
        text.remove()


class Drawn:
    """A result with a roofline: of what was measured, or of what is possible at best."""

    def _drawn(self) -> tuple[Sequence[Call], Sequence[Limits]]:
        """Return calls, and the limits of their machines, as far as they are known."""
        raise NotImplementedError

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return the roofline as a figure of matplotlib; also write it to ``path``, as PNG or whatever the ending says.

        Raises:
            ImportError: matplotlib is missing; the extra ``[report]`` brings it.
            ValueError: nothing was measured, and what the machine can do is not known.
        """
        figure = draw_roofline(*self._drawn())
        if path is not None:
            figure.savefig(path, dpi=160)
        return figure

    def _picture(self) -> str:
        """For a notebook; empty where it cannot be drawn, or there is nothing to draw."""
        try:
            return f'<div style="max-width:44rem">{svg(self.plot(), "Roofline")}</div>'
        except (ImportError, ValueError):
            return ""


def svg(figure: Figure, label: str) -> str:
    """Return a figure as an SVG element, whose colors are variables of a page, with a label for screen readers."""
    import matplotlib

    out = io.StringIO()
    size = str(figure.get_size_inches())  # ids of one page must differ
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"convgrad {label} {size}"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for name, value in _COLORS.items():
        text = text.replace(value, f"var(--{name}, {_ELSEWHERE[name]})")
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # it would hold for the whole page
    text = re.sub(r'<g id="row-(\d+)">', r'<g class="point" data-row="\1">', text)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {box[0]} role="img"'
    return re.sub(r"<svg[^>]*>", f'{head} aria-label="{label}">', text, count=1)
