"""A training step of real models (forward, backward, SGD): stock against `accelerate_`, both in the same layout.

    python benchmarks/time_steps.py steps.csv --threads 2 --minutes 10 --resume
    cd benchmarks && python time_steps.py steps.csv networks:unet_2d networks:nnunet_3d --threads 2

With the largest batch and images that can be compared in --seconds; a model of your own is a function that returns it,
or it and what it is called with. In the layout "auto", stock is contiguous, against accelerate_(model, "auto").

The rules choose, whatever was measured here before, or with --measure what is measured now; a file may hold rows of
both, of compiled models and of autocast. The losses are compared first; then steps of the two alternate.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from result_rows import CONDITIONS, Row, models_named, options_of, run_rows, shape_of, takes_images
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import convgrad
from convgrad.cli.models import build, example_input, in_channels_last
from convgrad.cli.options import LAYOUTS
from convgrad.cli.tune import jobs_of, measure_all
from convgrad.diagnostics import Explanation, explain
from convgrad.engine import cache
from convgrad.engine.measure import Ratio, compare
from convgrad.engine.registry import load_recorded
from convgrad.models import accelerate_, arguments
from convgrad.tables import Table

#: In the last, stock is contiguous and ours may be converted to channels_last.
STEP_LAYOUTS = (*LAYOUTS, "auto")
COLUMNS = (
    "model", "layout", "choice", "batch", "size", "replaced", "convolutions", "stock_ms", "ours_ms", "speed", "low",
    "high", "note", *CONDITIONS,
)  # fmt: skip
_KEY = ("model", "layout", "choice", "threads", "busy")
#: Batches and sizes of images, as long as one step takes little enough; of sequences only the batch counts.
_SCALES = ((2, 64), (2, 128), (4, 128), (2, 224), (4, 224), (8, 224), (16, 224))
_CALLS = 20  # of a step, in one comparison of stock with ours
_SAME = 1e-2  # relative difference of losses that are the same


def main(args: Sequence[str] | None = None) -> int:
    parser = options_of(__doc__, seconds=15.0)
    parser.add_argument(
        "--measure", action="store_true", help="first measure each convolution, as `convgrad tune` does"
    )
    parser.add_argument("--compile", action="store_true", help="compile both sides with torch.compile")
    parser.add_argument("--autocast", action="store_true", help="both sides under autocast, in bfloat16")
    options = parser.parse_args(args)
    wanted, how = models_named(options.models), (options.measure, options.compile, options.autocast)
    choice = ("measured" if options.measure else "rules") + ", compiled" * options.compile
    choice += ", bfloat16" * options.autocast

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
    for batch, size in _SCALES:
        x = example_input(name, shape_of(name, batch, size))
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


@contextmanager
def by_rules_alone() -> Iterator[None]:
    """Choose as if nothing had been measured here; what PyTorch was found to get wrong is avoided all the same."""
    load_recorded()
    before = os.environ.get("CONVGRAD_CACHE")
    os.environ["CONVGRAD_CACHE"] = "off"
    cache.invalidate()
    try:
        with convgrad.measure(False):
            yield
    finally:
        if before is None:
            del os.environ["CONVGRAD_CACHE"]
        else:
            os.environ["CONVGRAD_CACHE"] = before
        cache.invalidate()


def timed_step(
    model: nn.Module, x: Any, layout: str, seconds: float, measured: bool, compiled: bool, autocast: bool
) -> dict[str, Any]:
    """Time a training step of a model, which stays as it is, and return the columns of a row that this finds."""
    torch.manual_seed(0)
    stock = copy.deepcopy(model).train()
    if layout == "channels_last":
        stock, x = in_channels_last(stock, x)
    ours = copy.deepcopy(stock)
    with nullcontext() if measured else by_rules_alone():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if measured:
                _measure(stock, x, LAYOUTS if layout == "auto" else (layout,))
            report = accelerate_(ours, "auto" if layout == "auto" else None, example_inputs=x)
        if compiled:
            torch.compiler.reset()
            stock.compile()
            ours.compile()
        calls = {"stock": training_step(stock, x, autocast), "ours": training_step(ours, x, autocast)}
        losses = []
        for call in calls.values():
            torch.manual_seed(0)  # dropout
            losses.append(call())
        sizes = next((t.shape for t in tree_leaves(x) if isinstance(t, Tensor) and t.dim()), (None,))
        result = {"batch": sizes[0], "size": sizes[-1]}
        result["replaced"], result["convolutions"] = report.counts[0]
        if not abs(losses[1] - losses[0]) < _SAME * abs(losses[0]):
            return {**result, "note": f"wrong: the losses are {losses[0]:.6g} and {losses[1]:.6g}"}
        seen = compare(calls, "stock", seconds=seconds, least_rounds=6)
    times = {"stock_ms": seen.seconds("stock") * 1e3, "ours_ms": seen.seconds("ours") * 1e3}
    return {**result, **times, **dict(zip(("speed", "low", "high"), seen.speedup("ours"), strict=True))}


def _measure(stock: nn.Module, x: Any, layouts: Sequence[str]) -> None:
    """Measure every convolution of a model, as `convgrad tune` does it."""
    for layout in layouts:
        net, inputs = in_channels_last(copy.deepcopy(stock), x) if layout == "channels_last" else (stock, x)
        args, kwargs = arguments(inputs)
        result = explain(net, *args, **kwargs)
        layers = [result] if isinstance(result, Explanation) else result
        measure_all([*dict.fromkeys(jobs_of(layer.problem for layer in layers))], torch.device("cpu"))
    cache.invalidate()


def training_step(net: nn.Module, x: Any, autocast: bool = False) -> Callable[[], float]:
    """Return a function that runs forward, backward and SGD; its loss is the mean square of all results."""
    args, kwargs = arguments(x)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results = [t for t in tree_leaves(net(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        loss = torch.stack([t.float().square().mean() for t in results]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


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
