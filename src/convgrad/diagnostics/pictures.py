"""The roofline as a picture: what each call reached, below what the machine can do at best.

Drawn by matplotlib, which is imported when something is drawn. As SVG for a page, its colors are the page's variables,
its text is text, and each point says which one it is (``data-row``), so that the page can find it.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from .roofline import Limits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FAR = (9, 20, 34, 50, 70)  # points from its mark to a label; a line leads there

#: Variable of a page -> the color that stands for it in the drawing.
_COLORS = {"ink": "#1b1f23", "muted": "#59636e", "rule": "#dfe3e8", "ours": "#0b6e63", "theirs": "#a04a0c"}
#: The same where no page has such a variable: readable on any background, as in a notebook.
_ELSEWHERE = dict(zip(_COLORS, ("currentColor", "currentColor", "#88888855", "#1a9584", "#c9691b"), strict=True))


@dataclass(frozen=True)
class Point:
    """One call: its work, what it moves at least, and how long it took.

    Args:
        label: names it; empty for none.
        seconds: None where it was not measured: it stands on the roof, as what could be.
        ours: whether a kernel of this library computes it, not one of PyTorch's.
        weight: the larger, the more it matters, from 0 to 1.
    """

    label: str
    flops: int
    bytes: int
    seconds: float | None = None
    ours: bool = True
    weight: float = 0.1


def by_pytorch(backend: str) -> bool:
    """Whether a backend, its name with or without a kernel's behind it, runs kernels of PyTorch's."""
    return re.match(r"aten\b", backend) is not None


def draw_roofline(
    points: Sequence[Point], limits: Sequence[Limits], *, width: float = 6.8, height: float = 4.2
) -> Figure:
    """The picture, ``width`` by ``height`` inches.

    Args:
        limits: a roof for each; none where what the machine can do is not known.

    Raises:
        ImportError: matplotlib is missing; the extra ``[report]`` brings it.
        ValueError: there is nothing to draw.
    """
    given = [(i, p, p.flops / p.bytes, _reached(p, limits)) for i, p in enumerate(points) if p.flops and p.bytes]
    drawn = [(i, p, x, y) for i, p, x, y in given if y]
    if not drawn:
        raise ValueError("there is nothing to draw: no call was measured, and what this machine can do is not known")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure = Figure((width, height), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    ridges = [one.flops_per_second / one.bytes_per_second for one in limits]
    left, right = min([x for _, _, x, _ in drawn] + ridges) / 1.7, max([x for _, _, x, _ in drawn] + ridges) * 1.7
    top = max([y for *_, y in drawn] + [one.flops_per_second / 1e9 for one in limits])
    axes.set(xlim=(left, right), ylim=(min(y for *_, y in drawn) / 1.8, top * 1.9))
    for one in limits:
        _roof(axes, one, left, right)
    for ours, name, marker in ((True, "convgrad", "o"), (False, "PyTorch", "s")):
        color = _COLORS["ours" if ours else "theirs"]
        of_these = [one for one in drawn if one[1].ours is ours]
        for i, p, x, y in of_these:
            hollow = p.seconds is None
            axes.scatter(
                [x], [y], s=16 + 150 * p.weight, marker=marker, linewidths=1.2, edgecolors=color,
                facecolors="none" if hollow else color, alpha=None if hollow else 0.8, zorder=3,
                gid=f"row-{i}",
            )  # fmt: skip
        if of_these:
            axes.scatter([], [], s=40, marker=marker, color=color, label=name)
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


def _reached(point: Point, limits: Sequence[Limits]) -> float | None:
    """GFLOP/s; of what was not measured, those at the roof."""
    if point.seconds is not None:
        return point.flops / point.seconds / 1e9
    if not limits:
        return None
    return min(limits[0].flops_per_second, point.flops / point.bytes * limits[0].bytes_per_second) / 1e9


def _roof(axes: Any, limits: Limits, left: float, right: float) -> None:
    peak, slope = limits.flops_per_second / 1e9, limits.bytes_per_second / 1e9
    ridge = peak / slope
    axes.plot([left, ridge, right], [left * slope, peak, peak], color=_COLORS["ink"], linewidth=1.3, zorder=2)
    said = {"color": _COLORS["muted"], "fontsize": 9}
    axes.annotate(f"{peak:,.3g} GFLOP/s {limits.dtype}", (right, peak), (-3, 5), textcoords="offset points",
                  ha="right", **said)  # fmt: skip
    if ridge > left * 2.5:
        axes.annotate(f"{slope:,.3g} GB/s", (math.sqrt(left * ridge), math.sqrt(left * ridge) * slope), (-5, 5),
                      textcoords="offset points", ha="right", **said)  # fmt: skip


def _labels(figure: Figure, axes: Any, drawn: Sequence[tuple[int, Point, float, float]]) -> None:
    """Name the points that have a label, the most important first, where there is room: on no other mark or text."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # now it is known where everything is
    inside, names = axes.get_window_extent(), [text.get_window_extent() for text in axes.texts]
    taken: list[Any] = []
    for line in axes.lines:
        for (x0, y0), (x1, y1) in pairwise(axes.transData.transform(line.get_xydata())):
            steps = [(x0 + (x1 - x0) * t / 40, y0 + (y1 - y0) * t / 40) for t in range(41)]
            taken += [Bbox.from_bounds(x - 1, y - 1, 2, 2) for x, y in steps]
    for _, point, x, y in drawn:
        (px, py), r = axes.transData.transform((x, y)), math.sqrt(16 + 150 * point.weight) / 2
        taken.append(Bbox.from_bounds(px - r, py - r, 2 * r, 2 * r))
    for _, point, x, y in sorted((one for one in drawn if one[1].label), key=lambda one: -one[1].weight):
        text = axes.annotate(
            point.label, (x, y), (0, 0), textcoords="offset points", fontsize=9, color=_COLORS["ink"], va="center",
            zorder=4, arrowprops={"arrowstyle": "-", "color": _COLORS["muted"], "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
        text.set_in_layout(False)
        size, (px, py), unit = text.get_window_extent(), axes.transData.transform((x, y)), figure.dpi / 72
        for far, angle in product(_FAR, range(0, 360, 30)):
            dx, dy = far * unit * math.cos(math.radians(angle)), far * unit * math.sin(math.radians(angle))
            side = 0 if angle in (90, 270) else 1 if dx > 0 else -1
            left = px + dx - size.width * (1 - side) / 2
            box = Bbox.from_bounds(left, py + dy - size.height / 2, size.width, size.height)
            steps = [(px + t / 20 * dx, py + t / 20 * dy) for t in range(20)]
            if (inside.contains(*box.min) and inside.contains(*box.max) and not box.count_overlaps(taken + names)
                    and not any(name.contains(*step) for name in names for step in steps)):  # fmt: skip
                names.append(box)
                taken += [Bbox.from_bounds(*step, 1, 1) for step in steps]
                text.set(position=(dx / unit, dy / unit), ha={-1: "right", 0: "center", 1: "left"}[side])
                break
        else:
            text.remove()


class Drawn:
    """A result with a roofline: of what was measured, or of what is possible at best."""

    def _points(self) -> Sequence[Point]:
        raise NotImplementedError

    def _roofs(self) -> Sequence[Limits]:
        """Return the limits of the machines, as far as they are known."""
        raise NotImplementedError

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """The roofline as a figure of matplotlib.

        Args:
            path: also write it there, as PNG or whatever the ending says.

        Raises:
            ImportError: matplotlib is missing; the extra ``[report]`` brings it.
            ValueError: nothing was measured, and what the machine can do is not known.
        """
        figure = draw_roofline(self._points(), self._roofs())
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
    """A figure as an SVG element for a page: its colors are ``var(--ink)``, ``--muted``, ``--rule``, ``--ours``,
    ``--theirs``.

    Args:
        label: what it shows, for those who do not see it.
    """
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
