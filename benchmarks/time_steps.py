"""A training step of real models (forward, backward, SGD): stock against `accelerate_`, both in the same layout.

    python benchmarks/time_steps.py steps.csv --threads 2 --minutes 10 --resume
    cd benchmarks && python time_steps.py steps.csv networks:unet_2d networks:nnunet_3d --threads 2

As `convgrad bench steps` does it, with the largest batch and images that can be compared in --seconds, and into a file
that can be added to: it may hold rows of rules and of measurements, of compiled models and of autocast.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from result_rows import CONDITIONS, Row, models_named, options_of, run_rows
from torch import nn

from convgrad.cli.bench_steps import COLUMNS as STEP_COLUMNS
from convgrad.cli.bench_steps import choice_named, timed_step, training_step
from convgrad.cli.models import MODELS, Model, build, has_images, in_channels_last
from convgrad.cli.options import STEP_LAYOUTS
from convgrad.engine.ab_timer import Ratio
from convgrad.tables import Table

COLUMNS = (*STEP_COLUMNS, *CONDITIONS)
_KEY = ("model", "layout", "choice", "threads", "busy")
#: Batches and sizes of images, as long as one step takes little enough; of sequences only the batch counts.
_SCALES = ((2, 64), (2, 128), (4, 128), (2, 224), (4, 224), (8, 224), (16, 224))
_CALLS = 20  # of a step, in one comparison of stock with ours


def main(args: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__, seconds=15.0)
    parser.add_argument(
        "--measure", action="store_true", help="first measure each convolution, as `convgrad tune` does"
    )
    parser.add_argument("--compile", action="store_true", help="compile both sides with torch.compile")
    parser.add_argument("--autocast", action="store_true", help="both sides under autocast, in bfloat16")
    options = parser.parse_args(args)
    wanted, how = models_named(options.models), (options.measure, options.compile, options.autocast)
    choice = choice_named(*how)

    def all_rows() -> list[Row]:
        return [
            ({"model": name, "layout": layout, "choice": choice}, partial(_timed, name, layout, options.seconds, *how))
            for name in wanted
            for layout in (STEP_LAYOUTS if takes_images(name) else STEP_LAYOUTS[:1])
            if options.layout in ("", layout)
        ]

    def show(rows: Sequence[dict[str, str]]) -> None:
        _show([row for row in rows if row["choice"] == choice])

    return run_rows(options, COLUMNS, _KEY, all_rows, show)


def takes_images(name: str) -> bool:
    """Whether a model can be called in channels_last."""
    if name in MODELS:
        return MODELS[name].image
    inputs = build(name, "meta")[1]
    return inputs is None or has_images(inputs)


def _timed(name: str, layout: str, seconds: float, measured: bool, compiled: bool, autocast: bool) -> dict[str, Any]:
    """The columns of a row that are found by running it."""
    torch.manual_seed(0)
    model, x = build(name, "cpu")
    if x is None:
        x = _scaled(model, name, layout == "channels_last", seconds, autocast)
    return timed_step(model, x, layout, seconds, measured, compiled, autocast)


def _scaled(model: nn.Module, name: str, channels_last: bool, seconds: float, autocast: bool) -> Any:
    """Return the largest batch and images that can be compared in the time there is.

    Raises:
        RuntimeError: the model takes no images.
    """
    result, error = None, None
    for scale in _SCALES:
        x = MODELS.get(name, Model("")).sample(*scale)
        net, inputs = copy.deepcopy(model).train(), x
        if channels_last:
            net, inputs = in_channels_last(net, x)
        step = training_step(net, inputs, autocast)
        try:
            step()
        except Exception as raised:  # the model takes images of another size, perhaps
            error = raised
            continue
        start = time.perf_counter()
        step()
        if result is not None and _CALLS * (time.perf_counter() - start) > seconds:
            break
        result = x
    if result is None:
        raise RuntimeError(f"{name!r} takes no images; its function may return (nn.Module, example_inputs)") from error
    return result


def _show(rows: Sequence[dict[str, str]]) -> None:
    """For each layout a table."""
    for layout in STEP_LAYOUTS:
        timed = [r for r in rows if r["layout"] == layout and r["speed"]]
        if timed:
            print(Table(timed, {
                layout: (itemgetter("model"), ""),
                "input": (lambda r: f"{r['batch']} x {r['size']}", ""),
                "stock ms": (itemgetter("stock_ms"), ">"),
                "ours ms": (itemgetter("ours_ms"), ">"),
                "speed": (lambda r: str(Ratio(*(float(r[c]) for c in ("speed", "low", "high")))), ""),
            }).text())  # fmt: skip
            speeds = [float(r["speed"]) for r in timed]
            print(f"{statistics.geometric_mean(speeds):.2f}x on geometric average, at worst {min(speeds):.2f}x")
    for r in rows:
        if r["note"]:
            print(f"{r['model']} in {r['layout']}: {r['note']}")


if __name__ == "__main__":
    sys.exit(main())
