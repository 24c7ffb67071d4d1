"""``convgrad bench steps``: whole training steps of real models, as they are and after `accelerate_`.

Ours is by the rules alone, whatever was measured here before, or with every convolution measured as `convgrad tune`
does it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..diagnostics import Explanation, explain
from ..engine import by_rules_alone, cache
from ..engine.measure import Ratio, compare
from ..models import accelerate_, arguments
from ..tables import Table
from .app import fail, say, say_table
from .bench_results import CONDITIONS, Given, Row, run_rows
from .models import MODELS, build, in_channels_last, model_named, models_named, takes_images
from .options import LAYOUTS, STEP_LAYOUTS
from .tune import jobs_of, measure_all

COLUMNS = (
    "model", "layout", "choice", "batch", "size", "replaced", "convolutions", "stock_ms", "ours_ms", "speed", "low",
    "high", "note", *CONDITIONS,
)  # fmt: skip
_KEY = ("model", "layout", "choice", "threads", "busy")
#: Batches and sizes of images, as long as one step takes little enough; of sequences only the batch counts.
_SCALES = ((2, 64), (2, 128), (4, 128), (2, 224), (4, 224), (8, 224), (16, 224))
_CALLS = 20  # of a step, in one comparison of stock with ours
_SAME = 1e-2  # relative difference of losses that are the same


def run_steps(given: Given, measured: bool, compiled: bool, autocast: bool) -> tuple[int, dict[str, Any]]:
    """Time every model's step and print the tables; the exit status, and all as plain data."""
    wanted = models_named(given.models, MODELS)
    chosen = ("measured" if measured else "rules") + ", compiled" * compiled + ", bfloat16" * autocast

    def all_rows() -> list[Row]:
        return [
            (
                {"model": name, "layout": layout, "choice": chosen},
                partial(_timed, name, layout, given.seconds, measured, compiled, autocast),
            )
            for name in wanted
            for layout in (STEP_LAYOUTS if takes_images(name) else STEP_LAYOUTS[:1])
            if given.layout in ("", layout)
        ]

    def show(rows: Sequence[dict[str, str]]) -> None:
        _show([row for row in rows if row["choice"] == chosen])

    with nullcontext() if measured else by_rules_alone():
        return run_rows("steps", given, COLUMNS, _KEY, all_rows, show)


# ---- timing ------------------------------------------------------------------------------------------


def _timed(name: str, layout: str, seconds: float, measured: bool, compiled: bool, autocast: bool) -> dict[str, Any]:
    """The columns of a row that are found by running it."""
    torch.manual_seed(0)
    made, x = build(name, "cpu")
    stock = copy.deepcopy(made).train()  # the user's may be one for all layouts
    x = _scaled(stock, name, x, layout == "channels_last", seconds, autocast)
    ours = copy.deepcopy(stock)
    with _autocast(autocast):
        if measured:
            _measure(stock, x, LAYOUTS if layout == "auto" else (layout,))
        report = accelerate_(ours, "auto" if layout == "auto" else None, example_inputs=x)
    if compiled:
        torch.compiler.reset()
        stock.compile()
        ours.compile()
    calls = {"stock": _step(stock, x, autocast), "ours": _step(ours, x, autocast)}
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


def _scaled(stock: nn.Module, name: str, given: Any, channels_last: bool, seconds: float, autocast: bool) -> Any:
    """Return the given inputs; else the largest batch and images that can be compared in the time there is."""
    images = (model_named(name).sample(*scale) for scale in _SCALES)
    result, error = None, None
    for inputs in images if given is None else (given,):
        stock, x = in_channels_last(stock, inputs) if channels_last else (stock, inputs)
        step = _step(stock, x, autocast)
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
        raise fail(f"{name!r} raised {type(error).__name__}: {error}", "return (nn.Module, example_inputs)") from error
    return result


def _autocast(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def _step(net: nn.Module, x: Any, autocast: bool) -> Callable[[], float]:
    """Forward, backward and SGD; the loss is the mean square of all results."""
    args, kwargs = arguments(x)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> float:
        with _autocast(autocast):
            results = [t for t in tree_leaves(net(*args, **kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        loss = torch.stack([t.float().square().mean() for t in results]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


# ---- showing -----------------------------------------------------------------------------------------


def _show(rows: Sequence[dict[str, str]]) -> None:
    """For each layout a table."""
    for layout in STEP_LAYOUTS:
        timed = [r for r in rows if r["layout"] == layout and r["speed"]]
        if timed:
            say_table(Table(timed, {
                layout: (itemgetter("model"), ""),
                "input": (lambda r: f"{r['batch']} x {r['size']}", ""),
                "stock ms": (itemgetter("stock_ms"), ">"),
                "ours ms": (itemgetter("ours_ms"), ">"),
                "speed": (lambda r: str(Ratio(*(float(r[c]) for c in ("speed", "low", "high")))), ""),
            }))  # fmt: skip
            speeds = [float(r["speed"]) for r in timed]
            say(f"{statistics.geometric_mean(speeds):.2f}x on geometric average, at worst {min(speeds):.2f}x")
    for r in rows:
        if r["note"]:
            say(f"{r['model']} in {r['layout']}: {r['note']}")
