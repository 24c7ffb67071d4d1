"""The page of a profile: one file of HTML that needs nothing else, with its data inside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.ab_timer import Ratio
from ..problem import ConvProblem
from .calls import without_figures
from .pictures import by_pytorch, draw_roofline, short_names, svg

if TYPE_CHECKING:
    from .profile import Change, Profile

_HERE = Path(__file__).parent
_CHANGES = 20  # that are shown of all
_TIMES = "\N{MULTIPLICATION SIGN}"


def page_of(profile: Profile, changes: Sequence[Change]) -> str:
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
    text = {name: Markup((_HERE / f"page.{name}").read_text(encoding="utf-8")) for name in ("css", "js")}
    data = json.dumps(profile.to_dict(), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    rows, variants = profile.rows, profile.variants
    return environment.get_template("page.html").render(
        **text,
        p=profile,
        data=Markup(data),
        roofline=Markup(_roofline(profile)),
        names=short_names(rows),
        reasons=Counter(without_figures(r.reason) for r in rows if r.reason).most_common(),
        ends=max((m.start + m.milliseconds for m in profile.timeline), default=0.0),
        changes=changes[:_CHANGES],
        finding=profile.finding.partition(". "),
        convolutions=sum(r.total for r in rows),
        slowest=max((v.milliseconds for v in variants), default=1.0),
        pytorch=any(r.pytorch is not None for r in rows),
        limit=any(r.of_limit is not None for r in rows),
        ms_title={"step": "ms a step", "run": "ms in all"}.get(profile.kind, "ms"),
        time=lambda milliseconds: shown(milliseconds / 1e3),
        described=described,
        ms=milliseconds,
        side=lambda backend: "theirs" if by_pytorch(backend) else "ours",
        ratio=lambda v: "" if v.speedup is None else str(Ratio(v.speedup, v.low, v.high)),
    )


def _roofline(profile: Profile) -> str:
    try:
        figure = draw_roofline(profile.rows, profile.limits, width=4.8, height=4.4)
    except ValueError:
        return "<p>No call has a time.</p>"
    return svg(figure, f"Roofline of {len(profile.rows)} rows: operations per second against operations per byte")


# ---- words ------------------------------------------------------------------------------------------


def described(problem: str) -> str:
    """A convolution in words, as short as they go."""
    p = ConvProblem.parse(problem)
    kind = "depthwise" if p.depthwise else "dense" if p.groups == 1 else f"{p.groups} groups"
    words = [f"{'transposed ' if p.transposed else ''}{kind} {_sizes(p.kernel_size)}"]
    ends = (p.out_channels, p.in_channels) if p.transposed else (p.in_channels, p.out_channels)
    words.append(f"{ends[0]} channels" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]} channels")
    words.append(_sizes(p.output_size if p.transposed else p.input_size))
    uneven = [str(pair) for pair in dict.fromkeys(p.padding) if pair[0] != pair[1]]
    words += [f"stride {_sizes(p.stride)}"] if set(p.stride) != {1} else []
    words += [f"dilation {_sizes(p.dilation)}"] if set(p.dilation) != {1} else []
    words += [f"batch {p.batch}"]
    words += [f"padding {' '.join(uneven)}"] if uneven else []
    words += [f"{p.padding_mode} padding"] if p.padding_mode != "zeros" else []
    words += [str(p.dtype).removeprefix("torch.")] if str(p.dtype) != "torch.float32" else []
    words += ["channels_last"] if p.channels_last else []
    return ", ".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words)


def _sizes(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else _TIMES.join(map(str, sizes))


def milliseconds(value: float | None) -> str:
    """Three digits; empty where nothing was measured."""
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shown(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
