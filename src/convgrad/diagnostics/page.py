"""The page of a profile: one file of HTML that needs nothing else, with its data inside."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..problem import ConvProblem
from .calls import without_figures
from .pictures import Point, by_pytorch, draw_roofline, svg
from .roofline import Limits

#: A `Profile`, or a part of it, as plain data.
Data = dict[str, Any]

_HERE = Path(__file__).parent
_CHANGES = 20  # that are shown of all
_NAMED = 8  # points of the roofline, if there is room
_TIMES = "\N{MULTIPLICATION SIGN}"


def page_of(profile: Data, changes: Sequence[Data]) -> str:
    """The page of a profile, with the changes since the run before.

    Raises:
        ImportError: what the extra ``[report]`` brings is missing.
    """
    try:
        import matplotlib  # noqa: F401 - what draws the page needs it; said before anything is drawn
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(f"the page needs {error.name}; install it with: pip install 'convgrad[report]'") from None
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"times": _times, "day": _day}
    text = {name: Markup((_HERE / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    data = json.dumps(profile, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    rows, variants = profile["rows"], profile["variants"]
    reasons = Counter(without_figures(r["reason"]) for r in rows if r["reason"])
    return environment.get_template("page.html").render(
        **text,
        p=profile,
        data=Markup(data),
        wide=Markup(_plot(profile, 5.6, 4.6)),
        narrow=Markup(_plot(profile, 3.7, 3.7)),
        layers=any(r["layers"] for r in rows),
        reasons=reasons.most_common(),
        ends=max((m["start"] + m["milliseconds"] for m in profile["timeline"]), default=0.0),
        direction=_direction,
        short=_shortened(rows),
        changes=changes[:_CHANGES],
        finding=profile["finding"].partition(". "),
        convolutions=sum(r["total"] for r in rows),
        slowest=max((v["milliseconds"] for v in variants), default=1.0),
        pytorch=any(r["pytorch"] is not None for r in rows),
        limit=any(r["of_limit"] is not None for r in rows),
        ms_title={"step": "ms a step", "run": "ms in all"}.get(profile["kind"], "ms"),
        ms=f"{{:,.{_decimals(rows)}f}}".format,
        time=lambda milliseconds: shown(milliseconds / 1e3),
        described=described,
        side=_side,
        ratio=_ratio,
        change=_change,
    )


def _plot(profile: Data, width: float, height: float) -> str:
    short, points = _shortened(profile["rows"]), []
    for i, r in enumerate(profile["rows"]):
        name = f"{short(r) or described(r['problem']).partition(',')[0]} {_direction(r)}" if i < _NAMED else ""
        share = r["total"] / profile["rows"][0]["total"]
        points.append(
            Point(name, r["flops"], r["bytes"], r["milliseconds"] * 1e-3, _side(r["backend"]) == "ours", share)
        )
    label = f"Roofline of {len(points)} rows: operations per second against operations per byte"
    try:
        figure = draw_roofline(points, [Limits(**limits) for limits in profile["limits"]], width=width, height=height)
    except ValueError:
        return "<p>No call has a time.</p>"
    return svg(figure, label)


# ---- words ------------------------------------------------------------------------------------------


def _side(backend: str) -> str:
    return "theirs" if by_pytorch(backend) else "ours"


def described(problem: str) -> str:
    """A convolution in words, as short as they go."""
    p = ConvProblem.parse(problem)
    kind = "depthwise" if p.depthwise else "dense" if p.groups == 1 else f"{p.groups} groups"
    words = [f"{'transposed ' if p.transposed else ''}{kind} {_sizes(p.kernel_size)}"]
    ends = (p.out_channels, p.in_channels) if p.transposed else (p.in_channels, p.out_channels)
    words.append(f"{ends[0]} channels" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]} channels")
    words.append(_sizes(p.output_size if p.transposed else p.input_size))
    if set(p.stride) != {1}:
        words.append(f"stride {_sizes(p.stride)}")
    if set(p.dilation) != {1}:
        words.append(f"dilation {_sizes(p.dilation)}")
    words.append(f"batch {p.batch}")
    uneven = [str(pair) for pair in dict.fromkeys(p.padding) if pair[0] != pair[1]]
    words += [f"padding {' '.join(uneven)}"] if uneven else []
    words += [f"{p.padding_mode} padding"] if p.padding_mode != "zeros" else []
    words += [str(p.dtype).removeprefix("torch.")] if str(p.dtype) != "torch.float32" else []
    words += ["channels_last"] if p.channels_last else []
    return ", ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words)


def _sizes(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else _TIMES.join(map(str, sizes))


def _times(text: str) -> str:
    """With the sign that a page has, not the letter, and an interval on one line with its ratio."""
    return re.sub(r"(\d)x(?: (\[[\d.]+), )?(?= |\.|,|:|$|\d)", _joined, text)


def _joined(result: re.Match[str]) -> str:
    return (
        f"{result[1]}{_TIMES}\N{NO-BREAK SPACE}{result[2]},\N{NO-BREAK SPACE}" if result[2] else f"{result[1]}{_TIMES}"
    )


def _shortened(rows: Sequence[Data]) -> Callable[[Data], str]:
    """Return what names the first layer of a row, without the last word where all layers have the same."""
    names = [row["layers"][0] for row in rows if row["layers"]]
    ends = {name.rpartition(".")[2] for name in names}
    drop = f".{ends.pop()}" if len(ends) == 1 and all("." in name for name in names) else ""
    return lambda row: row["layers"][0].removesuffix(drop) if row["layers"] else ""


def _direction(row: Data) -> str:
    return "forward" if row["outputs"] == [ConvProblem.parse(row["problem"]).bias_pass] else "backward"


def _day(text: str) -> str:
    return datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M %Z").strip()


def _decimals(rows: Sequence[Data]) -> int:
    """Return one number of decimals for all rows, so that their digits stand below each other."""
    most = max((r["total"] for r in rows), default=0.0)
    return 0 if most >= 10_000 else 1 if most >= 1000 else 2 if most >= 10 else 3


def shown(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"


def _ratio(variant: Data) -> tuple[str, str]:
    """The ratio, and its interval."""
    speed, low, high = (variant[name] for name in ("speedup", "low", "high"))
    if speed is None:
        return "", ""
    said = "" if low > 1 or high < 1 else ", no difference"
    return f"{speed:.2f}{_TIMES}", f"[{low:.2f}, {high:.2f}]{said}"


def _change(before: float | None, after: float | None) -> str:
    """Return the speed-up as text."""
    if not before or not after:
        return "only before" if before else "only after"
    return f"{before / after:.2f}{_TIMES}"
