"""Training steps of whole models: as they are, and after `accelerate_`.

Ours is by the rules alone, whatever was measured here before, or with every convolution measured as `convgrad tune`
does it.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..diagnostics import Explanation, explain
from ..engine import by_rules_alone, cache
from ..engine.ab_timer import compare, conditions
from ..models import accelerate_, arguments
from ..tables import Columns, Table, csv_text
from .app import say, say_table
from .bench_problems import shown_ratio
from .models import errors_of, has_images, in_channels_last, with_inputs
from .options import LAYOUTS, STEP_LAYOUTS
from .tune import jobs_of, measure_all

COLUMNS = (
    "model", "layout", "choice", "batch", "size", "replaced", "convolutions", "stock_ms", "ours_ms", "speed", "low",
    "high", "note",
)  # fmt: skip
_SAME = 1e-2  # relative difference of losses that are the same
_SHOWN: Columns[dict[str, Any]] = {
    "model": (itemgetter("model"), ""),
    "layout": (itemgetter("layout"), ""),
    "input": (lambda r: f"{r['batch']} x {r['size']}", ""),
    "stock ms": (itemgetter("stock_ms"), ".4g"),
    "ours ms": (itemgetter("ours_ms"), ".4g"),
    "speed": (lambda r: shown_ratio(r, "low", "high"), ""),
}


def choice_named(measured: bool, compiled: bool, autocast: bool) -> str:
    """Return the column ``choice`` of a row."""
    return ("measured" if measured else "rules") + ", compiled" * compiled + ", bfloat16" * autocast


def run_steps(
    models: Sequence[str],
    layout: str,
    shape: str,
    seconds: float,
    measured: bool,
    compiled: bool,
    autocast: bool,
    as_csv: Path | None,
) -> tuple[int, dict[str, Any]]:
    """Time every model's step and print the table; the exit status, and all as plain data."""
    rows: list[dict[str, Any]] = []
    interrupted, choice = False, choice_named(measured, compiled, autocast)
    try:
        for name in models:
            model, inputs = with_inputs(name, "cpu", shape=shape)
            for one in [layout] if layout else STEP_LAYOUTS if has_images(inputs) else LAYOUTS[:1]:
                with errors_of(name):
                    found = timed_step(model, inputs, one, seconds, measured, compiled, autocast)
                about = {"model": name, "layout": one, "choice": choice}
                rows.append({**dict.fromkeys(COLUMNS), "note": "", **about, **found})
    except KeyboardInterrupt:
        interrupted = True
        say("convgrad: interrupted", sys.stderr)
    timed = [row for row in rows if not row["note"]]
    if timed:
        say_table(Table(timed, _SHOWN))
        speeds = [row["speed"] for row in timed]
        say(f"{statistics.geometric_mean(speeds):.2f}x on geometric average, at worst {min(speeds):.2f}x")
    for row in rows:
        if row["note"]:
            say(f"{row['model']} in {row['layout']}: {row['note']}")
    say(conditions())
    if as_csv is not None:
        as_csv.write_text(csv_text([COLUMNS, *(row.values() for row in rows)]), encoding="utf-8")
    return 130 if interrupted else int(len(timed) < len(rows)), {"conditions": conditions(), "steps": rows}


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
