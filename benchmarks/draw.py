"""The table and picture of docs/performance.md from what `time_layers.py` and `time_steps.py` wrote.

    python benchmarks/draw.py benchmarks/results/layers.csv benchmarks/results/steps.csv
    python benchmarks/draw.py benchmarks/results/*.csv --threads 1 --picture measured.svg --into docs/performance.md

The table goes to the standard output; with ``--into`` also between the first lines ``<!-- measured -->`` and
``<!-- end -->`` of a file. The picture's ending says what it is: .svg, .png or .pdf.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from result_rows import CONDITIONS

from convgrad.cli.options import LAYOUTS

Row = dict[str, str]
STEPS = (*LAYOUTS, "auto")
OUTPUTS = ("forward", "backward")
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"
_COLORS: dict[str, str] = {"contiguous": "#3b6ea5", "channels_last": "#d08a3c", "auto": "#4a9a5b"}


def read(paths: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """Layers and steps that were timed.

    Raises:
        SystemExit: there are none.
    """
    layers: list[Row] = []
    steps: list[Row] = []
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row.get("measured_speed"):
                    layers.append(row)
                elif row.get("replaced") and row.get("speed"):
                    steps.append(row)
    if not layers and not steps:
        raise SystemExit("these files hold nothing of `time_layers.py` or `time_steps.py`")
    return layers, steps


def models_of(layers: Sequence[Row], steps: Sequence[Row]) -> list[str]:
    return [*dict.fromkeys([r["model"] for r in steps] + [m for r in layers for m in r["models"].split()])]


# ---- the table ---------------------------------------------------------------------------------------


def markdown(layers: Sequence[Row], steps: Sequence[Row]) -> Iterator[str]:
    """A line for each model: its layers' geometric mean and worst, and its training step, in each layout."""
    heads = [f"{o}, {layout}" for layout in LAYOUTS for o in OUTPUTS]
    yield f"| model | {' | '.join(heads)} | {' | '.join(f'step, {layout}' for layout in STEPS)} |"
    yield f"|---|{'---:|' * (len(heads) + len(STEPS))}"
    for model in models_of(layers, steps):
        some = [r for r in layers if model in r["models"].split()]
        taken = {r["layout"]: f"{float(r['speed']):.2f}x" for r in steps if r["model"] == model}
        yield _line(model, cells_of(some, "measured"), taken)
    means = {
        layout: f"{statistics.geometric_mean(speeds):.2f}x"
        for layout in STEPS
        if (speeds := [float(r["speed"]) for r in steps if r["layout"] == layout])
    }
    yield _line("**all**", cells_of(layers, "measured"), means)
    yield _line("by rules alone", cells_of(layers, "rules"), {})
    yield ""
    yield conditions([*layers, *steps])


def cells_of(rows: Sequence[Row], who: str) -> list[str]:
    """Return the speedup of layers by the rules or as measured, for each layout and pass: geometric mean / worst."""
    cells = []
    for layout in LAYOUTS:
        for output in OUTPUTS:
            speeds = [float(r[f"{who}_speed"]) for r in rows if (r["layout"], r["output"]) == (layout, output)]
            cells.append(f"{statistics.geometric_mean(speeds):.2f} / {min(speeds):.2f}" if speeds else "")
    return cells


def _line(name: str, cells: Sequence[str], steps: dict[str, str]) -> str:
    return f"| {name} | {' | '.join([*cells, *(steps.get(layout, '') for layout in STEPS)])} |"


def conditions(rows: Sequence[Row]) -> str:
    """What the rows were measured with, each value once."""
    values = {c: ", ".join(dict.fromkeys(r[c] for r in rows if r[c])) for c in CONDITIONS}
    busy = f", {values['busy']} other processes" if values["busy"] != "0" else ""
    threads = f"{values['threads']} thread{'s' * (values['threads'] != '1')}"
    return (
        f"{values['processor']}, {threads}, torch {values['torch']}, "
        f"convgrad {values['convgrad']} ({values['commit']}), {values['memory']}{busy}."
    )


def put(path: Path, between: tuple[str, str], text: str) -> None:
    """Replace what is between two lines of a file.

    Raises:
        SystemExit: the file has no such lines.
    """
    begin, end = between
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{path} has no line {begin.strip()} with {end.strip()} after it")
    path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


# ---- the picture -------------------------------------------------------------------------------------


def draw(layers: Sequence[Row], steps: Sequence[Row], path: Path) -> None:
    """Each layer a dot and each training step a bar of its interval, times as fast as PyTorch, on one scale."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "convgrad", "svg.fonttype": "none", "font.size": 9})
    models = models_of(layers, steps)[::-1]
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(9, 0.32 * len(models) + 1.2), layout="constrained")
    offsets: dict[str, float] = dict(zip(STEPS, (0.15, -0.15, 0), strict=True))
    for row in layers:
        for model in row["models"].split():
            at = models.index(model) + offsets[row["layout"]]
            panels[0].plot(float(row["measured_speed"]), at, ".", color=_COLORS[row["layout"]], alpha=0.5, ms=5, mew=0)
    for row in steps:
        at, color = models.index(row["model"]) + offsets[row["layout"]], _COLORS[row["layout"]]
        panels[1].plot([float(row["low"]), float(row["high"])], [at, at], color=color, lw=1.2, alpha=0.6)
        panels[1].plot(float(row["speed"]), at, "o", color=color, ms=4, mew=0)
    titles = ("each layer, against PyTorch's best layout", "a training step (auto: against contiguous)")
    panels[0].set_xscale("log")
    for panel, title in zip(panels, titles, strict=True):
        panel.axvline(1, color="black", lw=0.8)
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_yticks(range(len(models)), models)
        panel.tick_params(length=0)
        panel.grid(axis="x", which="major", color="#dddddd", lw=0.6)
        panel.set_axisbelow(True)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        panel.spines[["top", "right", "left"]].set_visible(False)
    panels[0].xaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if value in (0.5, 2, 5, 20, 50) else "")
    for layout, color in _COLORS.items():
        panels[1].plot([], [], "o", color=color, ms=4, mew=0, label=layout)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="+", help="of `time_layers.py` and `time_steps.py`")
    parser.add_argument("--threads", type=int, help="only these rows; else the most threads there are")
    parser.add_argument("--busy", action="store_true", help="the rows of a busy machine")
    parser.add_argument("--picture", type=Path, help="draw to this file")
    parser.add_argument("--into", type=Path, help="put the table between the lines of this file")
    options = parser.parse_args()
    layers, steps = read(options.csv)
    measured = [r for r in steps if r.get("choice") == "measured"]  # what the picture is of, where there are such
    steps = measured or steps
    threads = options.threads or max(int(r["threads"]) for r in (*layers, *steps))
    layers, steps = (
        [r for r in rows if int(r["threads"]) == threads and (r["busy"] != "0") == options.busy]
        for rows in (layers, steps)
    )
    if not layers and not steps:
        raise SystemExit(f"there is nothing with {threads} threads{' on a busy machine' * options.busy}")
    table = "\n".join(markdown(layers, steps)) + "\n"
    print(table, end="")
    if options.into:
        put(options.into, (BEGIN, END), table)
    if options.picture:
        draw(layers, steps, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
