"""Draws the pictures of these pages: steps, networks and gpu from measured figures, the path of a call, the rooms.

    python docs/drawings.py

A test compares the pictures with what this script draws.
"""

from __future__ import annotations

import csv
import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
LAYOUTS = {"contiguous": "#4c72b0", "channels_last": "#dd8452"}
WIDTH = 720


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(words)}</text>'


def picture(height: float, title: str, parts: list[str]) -> str:
    """Return an SVG on white, which is readable on a dark page, too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" font-family="sans-serif"'
    back = f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
    return "\n".join(
        [f'{head} font-size="13" fill="#222">', f"<title>{escape(title)}</title>", back, *parts, "</svg>\n"]
    )


def steps(file: str) -> list[dict[str, str]]:
    """Return the rows of a file of `benchmarks/time_steps.py`, on two threads."""
    with (RESULTS / file).open(encoding="utf-8", newline="") as lines:
        return [r for r in csv.DictReader(lines) if r["layout"] in LAYOUTS and r["threads"] == "2"]


def gpu() -> list[dict[str, str]]:
    """Return the speed of each row of gpu.md's table in each layout."""
    rows, subject, dtype = [], "", ""
    for line in (DOCS / "gpu.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[3].isdigit():
            subject, dtype = cells[0].split(",")[0] or subject, cells[1] or dtype
            for layout, ours, theirs in zip(LAYOUTS, cells[3:5], cells[5:7], strict=True):
                if ours and theirs:
                    speed = f"{int(theirs) / int(ours):.2f}"
                    rows.append({"model": f"{subject}, {dtype}, {cells[2]}", "layout": layout, "speed": speed})
    return rows


def bars(rows: list[dict[str, str]], title: str, left: int = 150, scale: float = 220) -> str:
    """Return a bar for each model and layout, ``scale`` wide where convgrad is as fast as PyTorch."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    parts, y = [text(10, 22, title, 'font-weight="bold"')], 40
    for model in models:
        own = [r for r in rows if r["model"] == model]
        parts.append(text(left - 8, y + 4 + 6 * len(own), model.removeprefix("networks:"), 'text-anchor="end"'))
        for row in own:
            wide, color = float(row["speed"]) * scale, LAYOUTS[row["layout"]]
            parts.append(f'<rect x="{left}" y="{y}" width="{wide:.0f}" height="10" fill="{color}"/>')
            parts.append(text(left + wide + 5, y + 10, f"{float(row['speed']):.2f}x", 'font-size="11"'))
            y += 12
        y += 8
    one = left + scale
    parts.append(f'<line x1="{one}" x2="{one}" y1="34" y2="{y}" stroke="#222" stroke-dasharray="4 3"/>')
    parts.append(text(one, y + 14, "PyTorch", 'text-anchor="middle"'))
    for x, (layout, color) in zip((480, 590), LAYOUTS.items(), strict=True):
        parts.append(f'<rect x="{x}" y="{y + 4}" width="10" height="10" fill="{color}"/>')
        parts.append(text(x + 15, y + 14, layout))
    return picture(y + 24, title, parts)


def box(x: float, y: float, wide: float, lines: list[str], color: str = "#eef2f8") -> str:
    high = 18 * len(lines) + 12
    frame = f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="6" fill="{color}" stroke="#4c72b0"/>'
    shown = [text(x + wide / 2, y + 20 + 18 * i, line, 'text-anchor="middle"') for i, line in enumerate(lines)]
    return "\n".join([frame, *shown])


def arrow(x1: float, y1: float, x2: float, y2: float, label: str = "") -> str:
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#222" marker-end="url(#head)"/>'
    return line + text((x1 + x2) / 2 + 6, (y1 + y2) / 2 - 4, label, 'font-size="12"')


def path() -> str:
    """Return the path of a call: one look-up in the table, and what happens the first time."""
    head = '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    return picture(330, "The path of a call", [
        head + '<path d="M0,0 L8,4 L0,8 z" fill="#222"/></marker></defs>',
        box(10, 20, 200, ["convgrad.conv2d(x, w)", "a layer, takeover()", "and their backward"]),
        arrow(210, 53, 258, 53),
        box(260, 29, 170, ["the table of calls", "(compiled)"]),
        arrow(430, 53, 498, 53, "seen"),
        box(500, 20, 210, ["CPU kernels, GPU launches", "or PyTorch's own:", "no Python"], "#e8f4ea"),
        arrow(345, 77, 345, 108, "the first time: Python"),
        box(220, 110, 250, ["validation, geometry, layout"]),
        arrow(345, 140, 345, 158),
        box(220, 160, 250, ["ConvProblem: plain integers"]),
        arrow(345, 190, 345, 208),
        box(220, 210, 250, ["choose a backend by: your request,", "your kernel, a measurement, the rules"]),
        arrow(345, 258, 345, 276),
        box(220, 278, 250, ["a plan, and its entry of the table"]),
        arrow(470, 293, 605, 293),
        arrow(605, 293, 605, 88),
    ])  # fmt: skip


def rooms() -> str:
    """Return the floors of architecture.md's table, the highest on top."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    floors: dict[str, list[str]] = {}
    for floor, cell in re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE):
        floors.setdefault(floor, []).extend(re.findall(r"`([\w/.]+)`", cell))
    parts, y = [text(10, 22, "A room imports from its own floor or from one below", 'font-weight="bold"')], 36
    for floor in sorted(floors, reverse=True):
        names, x, row = [name.rstrip("/") for name in floors[floor]], 40, []
        top = y
        for name in names:
            wide = 7.4 * len(name) + 18
            if x + wide > WIDTH - 10:
                x, y = 40, y + 36
            row.append(box(x, y, wide, [name], "#eef2f8" if not name.endswith(".py") else "#f6f6f6"))
            x += wide + 8
        parts += [text(14, top + 20, floor, 'font-weight="bold"'), *row]
        y += 44
        parts.append(f'<line x1="10" x2="{WIDTH - 10}" y1="{y - 7}" y2="{y - 7}" stroke="#ccc"/>')
    return picture(y, "The rooms of the package, by floor", parts)


def drawings() -> dict[str, str]:
    """Return each picture's name and content."""
    return {
        "steps.svg": bars(
            steps("steps-xeon-2t.csv"), "Training steps, times as fast as PyTorch: Xeon with AMX, 2 threads"
        ),
        "networks.svg": bars(steps("networks-zen4.csv"), "Training steps, times as fast as PyTorch: Zen 4, 2 threads"),
        "gpu.svg": bars(gpu(), "Depthwise layers, times as fast as PyTorch in the same layout: H100", 290, 19),
        "path.svg": path(),
        "rooms.svg": rooms(),
    }


if __name__ == "__main__":
    for name, content in drawings().items():
        (DOCS / name).write_text(content, encoding="utf-8")
