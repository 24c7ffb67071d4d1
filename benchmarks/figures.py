"""The figures in the tables of README.md and docs/, from the files of ``benchmarks/results`` that their rows name.

python benchmarks/figures.py           write them
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path

from draw import LAYOUTS, cells_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("mobilenet_v2", "efficientnet_b0", "convnext_tiny", "resnet50", "regnet_y")


@cache
def results(name: str) -> tuple[dict[str, str], ...]:
    """Return the rows of a file."""
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def steps(file: str) -> list[str]:
    """Return a cell for each model: the speedup of a step, contiguous / channels_last."""
    speeds = {(r["model"], r["layout"]): f"{float(r['speed']):.2f}x" for r in results(file) if r["speed"]}
    return [" / ".join(speeds[key] for key in product((model,), LAYOUTS) if key in speeds) for model in MODELS]


def best_steps(file: str) -> list[str]:
    """Return a cell for each model: the best of PyTorch over the best of convgrad, per image, / contiguous."""
    cells = []
    for model in MODELS[:4]:
        rows = {r["layout"]: r for r in results(file) if r["model"] == model and r["layout"] in LAYOUTS}
        stock, ours = (min(float(r[side]) / int(r["batch"]) for r in rows.values()) for side in ("stock_ms", "ours_ms"))
        cells.append(f"{stock / ours:.2f}x / {float(rows['contiguous']['speed']):.2f}x")
    return cells


def layers(file: str, who: str) -> list[str]:
    """Return the number of rows, then for each layout and pass the speedup: geometric mean / worst."""
    timed = [r for r in results(file) if r["measured_speed"]]
    return [str(len(timed)), *cells_of(timed, who)]


def networks(name: str) -> list[str]:
    """Return the speedups of a step of a network on two threads and on one, contiguous / channels_last."""
    rows = [r for r in results("networks-zen4.csv") if r["model"] == f"networks:{name}" and r["layout"] in LAYOUTS]
    return [" / ".join(f"{float(r['speed']):.2f}x" for r in rows if r["threads"] == n) for n in "21"]


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with its figures written anew."""
    performance, kernels, readme = ROOT / "docs/performance.md", ROOT / "docs/kernels.md", ROOT / "README.md"
    measured, rules = performance.read_text(encoding="utf-8").split("**By the rules alone:**")
    measured = _filled(measured, r"\| .*`(steps-.*)` \|", steps)
    measured = _filled(measured, r"\| .*`(layers-.*)` \|", lambda file: layers(file, "measured"))
    rules = _filled(rules, r"\| .*`(layers-.*)` \|", lambda file: layers(file, "rules"))
    yield performance, f"{measured}**By the rules alone:**{rules}"
    yield kernels, _filled(kernels.read_text(encoding="utf-8"), r"\| `(\w+)`: [^|]*\|", networks)
    yield readme, _filled(readme.read_text(encoding="utf-8"), r"\| \[.*\]\(.*/(steps-.*)\) \|", best_steps)


def _filled(text: str, row: str, cells: Callable[[str], list[str]]) -> str:
    """Write the cells behind the beginning of each row of a table."""

    def write(match: re.Match[str]) -> str:
        return match[1] + "".join(f" {cell} |" if cell else " |" for cell in cells(match[2]))

    return re.sub(rf"^({row}).*$", write, text, flags=re.MULTILINE)


def main() -> int:
    for path, text in pages():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
