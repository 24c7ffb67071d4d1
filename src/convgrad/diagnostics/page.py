"""The page of a profile: one file of HTML that needs nothing else, with its data inside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.measure import Ratio
from ..tables import Table
from .calls import without_figures
from .pictures import by_pytorch, draw_roofline, short_names, svg
from .screen import described, milliseconds, parts_of, shown

if TYPE_CHECKING:
    from .profile import Change, Profile

_HERE = Path(__file__).parent
_CHANGES = 20  # that are shown of all


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
        forms=_forms(profile).cells(),
        parts=parts_of(profile).cells() if profile.parts else [],
        changes=_changes(profile, changes).cells(),
        names=short_names(rows),
        reasons=Counter(without_figures(r.reason) for r in rows if r.reason).most_common(),
        ends=max((m.start + m.milliseconds for m in profile.timeline), default=0.0),
        finding=profile.finding.partition(". "),
        convolutions=sum(r.total for r in rows),
        pytorch=any(r.pytorch is not None for r in rows),
        limit=any(r.of_limit is not None for r in rows),
        ms_title={"step": "ms a step", "run": "ms in all"}.get(profile.kind, "ms"),
        time=lambda ms: shown(ms / 1e3),
        described=described,
        ms=milliseconds,
        side=lambda backend: "theirs" if by_pytorch(backend) else "ours",
    )


def _forms(profile: Profile) -> Table[tuple[str, float, Any]]:
    """Return the whole in each of its forms."""
    forms = [
        (v.name, v.milliseconds, v.speedup and Ratio(v.speedup, v.low or 0, v.high or 0)) for v in profile.variants
    ]
    forms += [("of it in convolutions", sum(r.total for r in profile.rows), None)] * (profile.kind == "run")
    return Table(forms, {
        "computed by": (lambda form: form[0], ""),
        "time": (lambda form: shown(form[1] / 1e3), ">"),
        "against PyTorch": (lambda form: str(form[2] or ""), ""),
    })  # fmt: skip


def _changes(profile: Profile, changes: Sequence[Change]) -> Table[tuple[str, float | None, float | None]]:
    """Return the largest changes since the run before, the whole first."""
    each = [(f"{described(c.problem)}, {c.direction}", c.before, c.after) for c in changes[:_CHANGES]]
    if profile.before and profile.before.milliseconds and profile.milliseconds:
        each.insert(0, ("the whole", profile.before.milliseconds, profile.milliseconds))
    return Table(each, {
        "convolution": (lambda c: c[0].replace("\N{NO-BREAK SPACE}", " "), ""),
        "ms before": (lambda c: milliseconds(c[1]), ">"),
        "ms after": (lambda c: milliseconds(c[2]), ">"),
        "speed-up": (
            lambda c: f"{c[1] / c[2]:.2f}x" if c[1] and c[2] else "only before" if c[1] else "only after", ">"),
    })  # fmt: skip
