"""A training step of a model, stock and accelerated, and a script as it runs: measured, and made into a profile."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import __version__
from ..diagnostics import Limits, Machine, limits_of, module_names
from ..engine import Event, active, choose, observers
from ..engine.ab_timer import Comparison, Ratio, compare, conditions
from ..models import (
    NO_COPY,
    Usage,
    UsageRow,
    accelerate_,
    copied,
    inputs_to_channels_last,
    is_convolution,
    is_spatial,
    observe_aten,
    run_script,
    training_step,
    weights_to_channels_last,
)
from ..problem import ConvProblem
from ..settings import current
from .costs import costs_of_layout, costs_of_rows
from .profile import Cost, Profile, Row, Variant
from .rows import device_of, read_table, row_of

__all__ = ["profile_model", "profile_script", "profile_table"]

Call = Callable[[], object]
Stage = Callable[[str], object]

_OBSERVED = 3  # steps; of a slow one a single one
_TELLING = 1.25  # an interval with 1 in it whose ends are further apart says nothing
_CALLS = 9  # of each way that a comparison makes at least


_BUSY = (
    "More than 100 % of the limit: it was measured while this machine was busy, or the operands came from a cache. "
    "convgrad info --measure measures it again."
)


def _quiet(_: str) -> None:
    """Nobody waits."""


# ---- a model -----------------------------------------------------------------------------------------


def profile_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    what: str = "",
    tune: str = "",
    seconds: float = 10.0,
    stage: Stage = _quiet,
) -> Profile:
    """A training step of a model by PyTorch and by convgrad, and each of its convolutions.

    The step is forward and backward, without an optimizer. It runs on copies: the model stays as it is.

    Args:
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        what: its name.
        tune: the command that would measure it.
        seconds: for all of it, about. A slow step is timed seven times at least, however long that takes.
        stage: told what is being done.

    Raises:
        ValueError: the model has no convolution, or cannot be copied.

    Equivalent to:
        >>> import torch, convgrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.ReLU())
        >>> profile = convgrad.report.profile_model(model, torch.randn(1, 4, 9, 9), seconds=0.5)
        >>> [v.name for v in profile.variants][:2], {row.direction for row in profile.rows} >= {"forward", "backward"}
        (['PyTorch', 'convgrad'], True)
    """
    start = time.perf_counter()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    limits = _Limits()
    stage("preparing copies of the model")
    models, left = _ways(model, example_inputs)
    steps: dict[str, Call] = {name: training_step(one, example_inputs) for name, one in models.items()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        began = time.perf_counter()
        names = _layers(models["PyTorch"], steps["PyTorch"])
        first = time.perf_counter() - began
        stage("timing a training step, PyTorch's and convgrad's alternately")
        seen = _compared(steps, 0.4 * seconds, first, device)
        stage("timing each convolution")
        slow = seen.median("PyTorch") > 0.04 * seconds
        rounds = 1 if slow else _OBSERVED
        rows = _observed(steps, names, limits, rounds)
    variants = _variants(seen)
    whole = variants[1].milliseconds
    stage("timing other backends for the most expensive convolutions")
    now = time.perf_counter()
    until = max(start + 0.85 * seconds, now + 0.15 * seconds)
    costs, looked = costs_of_rows(rows, whole, until, tune or _MEASURE, layout=False, stock=False)
    notes = [
        f"A step is forward and backward, without an optimizer. {left}",
        f"PyTorch and convgrad took turns, {len(seen.samples['PyTorch'])} rounds; intervals are at 95 %.",
        f"A row's time is the median over {'one step' if slow else f'{rounds} steps'}; watching costs a little.",
        *(["channels_last was not tried: the step is slow, or there already."] if len(seen.samples) == 2 else []),
    ]  # fmt: skip
    return _profile("step", what or type(model).__name__, _finding(seen), whole, variants, rows,
                    [*costs_of_layout(seen), *costs], looked, notes, device, limits)  # fmt: skip


#: The remedy where no command is known that could measure.
_MEASURE = "convgrad.measure() before the training loop"


class _Layers:
    """Observes one step of a model, and notes which modules compute each convolution."""

    synchronize = False

    def __init__(self) -> None:
        self.running: list[tuple[str, nn.Module]] = []
        self.names: dict[ConvProblem, list[str]] = {}

    def __call__(self, event: Event) -> None:
        if self.running and event.outputs == (event.problem.bias_pass,):
            name, module = self.running[-1]
            self.names.setdefault(_plain(event.problem), []).append(name or type(module).__name__)


def _layers(model: nn.Module, step: Call) -> dict[ConvProblem, list[str]]:
    """The names of the modules that compute each convolution in a step.

    Raises:
        ValueError: no convolution ran.
    """
    seen = _Layers()
    observers.append(seen)
    try:
        with module_names(model, seen.running), observe_aten():
            step()
    finally:
        observers.remove(seen)
    if not seen.names:
        raise ValueError(f"no convolution ran in this {type(model).__name__}")
    return seen.names


def _plain(problem: ConvProblem) -> ConvProblem:
    """Without what a forward and its backward may have different: a bias, a name."""
    return problem.replace(name="", has_bias=False)


def _ways(model: nn.Module, inputs: Any) -> tuple[dict[str, nn.Module], str]:
    """Name -> a copy of the model that computes in this way; and what `accelerate_` said.

    Raises:
        ValueError: the model cannot be copied.
    """

    def twin() -> nn.Module:
        one = copied(model)
        if one is None:
            raise ValueError(NO_COPY)
        return one

    stock, ours = twin(), twin()
    report = accelerate_(ours, example_inputs=inputs)
    models = {"PyTorch": stock, "convgrad": ours}
    spatial = [m for m in model.modules() if is_convolution(m) and is_spatial(m)]
    as_it_is = all(t.is_contiguous() for t in tree_leaves(inputs) if isinstance(t, Tensor))
    if spatial and as_it_is:
        turned = twin()
        weights_to_channels_last(m for m in turned.modules() if is_convolution(m) and is_spatial(m))
        turned.register_forward_pre_hook(inputs_to_channels_last, prepend=True, with_kwargs=True)
        both = twin()
        accelerate_(both, "channels_last", example_inputs=inputs)
        models |= {"PyTorch, channels_last": turned, "convgrad, channels_last": both}
    said = f"convgrad.accelerate_ replaced {len(report.replaced)} of {len(report.replaced) + len(report.left)} layers; "
    said += "PyTorch's own kernels stay where nothing else is expected to be faster."
    return models, said


def _compared(steps: dict[str, Call], seconds: float, first: float, device: torch.device) -> Comparison:
    """All ways timed alternately; of a slow step only the first two, in the layout that it has.

    Args:
        first: seconds of the very first step, which is slower than those that follow.
    """
    if first > seconds / _CALLS:
        return compare(dict(list(steps.items())[:2]), "PyTorch", seconds=seconds, device=device)
    once: dict[str, float] = {}
    for name, step in steps.items():
        step()  # the first call allocates, compiles, plans
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        once[name] = time.perf_counter() - start
    if _CALLS * sum(once.values()) > seconds:
        steps = dict(list(steps.items())[:2])
    return compare(steps, "PyTorch", seconds=seconds, device=device)


def _variants(seen: Comparison) -> list[Variant]:
    found = [Variant("PyTorch", _ms(seen.seconds("PyTorch")))]
    for name in list(seen.samples)[1:]:
        ratio = seen.speedup(name)
        found.append(
            Variant(name, _ms(seen.seconds(name)), *(float(f"{x:.4g}") for x in (ratio.value, ratio.low, ratio.high)))
        )
    return found


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")


def _finding(seen: Comparison) -> str:
    """The result in a sentence or two, also where it is nothing."""
    ratio = seen.speedup("convgrad")
    times = f"{_shown(seen.seconds('convgrad'))} instead of {_shown(seen.seconds('PyTorch'))}"
    if not ratio.differs and ratio.high > _TELLING * ratio.low:
        said = f"What convgrad brings here cannot be told, for the times vary too much: {_words(ratio)}."
    elif not ratio.differs:
        said = f"convgrad makes no measurable difference to this training step here: {_words(ratio)}."
    else:
        slower = "" if ratio.value > 1 else "slower here, "
        said = f"With convgrad the training step is {slower}{_words(ratio)} as fast: {times}."
    last = "PyTorch, channels_last"
    if last not in seen.samples or seen.speedup(last).low <= 1:
        return said
    ratio = Comparison(last, seen.samples).speedup("convgrad, channels_last")
    more = f"{_words(ratio)} as fast as PyTorch" if ratio.differs else f"no different from it, {_words(ratio)}"
    return f"{said} In channels_last PyTorch is faster, and convgrad {'is ' if ratio.differs else ''}{more}."


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _observed(steps: dict[str, Call], names: dict[ConvProblem, list[str]], limits: _Limits, rounds: int) -> list[Row]:
    """The calls of a step by convgrad, and PyTorch's time of the same."""
    stock, ours = Usage(), Usage()
    for _ in range(rounds):
        for usage, name in ((stock, "PyTorch"), (ours, "convgrad")):
            with observe_aten(), usage:
                steps[name]()
    pytorch = {_same(row): row.median_seconds for row in stock.rows}
    rows = [
        row_of(
            row,
            limits.of(row),
            layers=names.get(_plain(row.problem), ()),
            pytorch=pytorch.get(_same(row)),
            calls=row.calls / rounds,
        )
        for row in map(_reasoned, ours.rows)
    ]
    return sorted(rows, key=lambda row: -row.total)


def _reasoned(row: UsageRow) -> UsageRow:
    """With the reason for which the engine leaves a call to PyTorch, in place of the plain fact."""
    if row.backend.split(" ")[0] == "aten":
        steps = choose(row.problem, row.outputs, torch.device(row.device), current(), active())
        if [step.backend.name for step in steps] == ["aten"]:
            return replace(row, reason=steps[0].reason)
    return row


def _same(row: UsageRow) -> tuple[object, ...]:
    """What two calls for the same have in common; the gradient of a bias costs next to nothing."""
    return (_plain(row.problem), tuple(o for o in row.outputs if o != "grad_bias"), row.device)


class _Limits:
    """What each device can do at best: known from an earlier measurement, or measured now, once for each dtype."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, torch.dtype], Limits | None] = {}

    def of(self, row: UsageRow) -> Limits | None:
        key = (row.device, row.problem.dtype)
        if key not in self.known:
            try:
                self.known[key] = limits_of(Machine.here(torch.device(row.device)), row.problem.dtype, measured=True)
            except (ValueError, RuntimeError):
                self.known[key] = None
        return self.known[key]

    def found(self) -> tuple[dict[str, Any], ...]:
        return tuple(asdict(limits) for limits in dict.fromkeys(self.known.values()) if limits)


# ---- a script, a table ---------------------------------------------------------------------------------


def profile_script(
    script: str, args: Sequence[str] = (), *, stock: bool = False, seconds: float = 10.0, stage: Stage = _quiet
) -> tuple[Profile, int]:
    """A script run unmodified, with every convolution taken over, and its exit status.

    Args:
        stock: let PyTorch's own kernels compute.
        seconds: for what follows when the script has ended.
        stage: told what is being done.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: it computed no convolution.
    """
    usage, start = Usage(), time.perf_counter()
    with usage:
        status = run_script(script, args, stock=stock, measure=False, out=io.StringIO())
    wall, limits = time.perf_counter() - start, _Limits()
    if not usage.rows:
        raise ValueError(f"{script} computed no convolution (its exit status is {status})")
    stage("measuring what this machine can do at best")
    seen = usage.rows if stock else map(_reasoned, usage.rows)
    rows = sorted((row_of(row, limits.of(row)) for row in seen), key=lambda row: -row.total)
    stage("timing other backends for the most expensive convolutions")
    until = time.perf_counter() + 0.9 * seconds
    tune = shlex.join(["convgrad", "tune", script, *args])
    costs, looked = costs_of_rows(rows, wall * 1e3, until, tune, layout=True, stock=stock)
    who = "PyTorch" if stock else "convgrad"
    calls = sum(row.calls for row in rows)
    finding = (
        f"{_shown(wall)} in all, {_shown(usage.seconds)} of it ({usage.seconds / wall:.0%}) in {calls} calls of "
        f"convolutions, by {'PyTorch' if stock else 'convgrad'}'s choice of kernels."
    )
    notes = [
        "One run tells nothing about its spread. Run it again with --stock, and compare the two with --against.",
        "A row's time for one call is the median of its last hundred calls.",
        *([f"The script's exit status was {status}."] if status else []),
    ]
    profile = _profile(
        "run",
        script,
        finding,
        _ms(wall),
        [Variant(who, _ms(wall))],
        rows,
        costs,
        looked,
        notes,
        device_of(rows),
        limits,
    )
    return profile, status


def profile_table(path: str | Path) -> Profile:
    """What a CSV file says that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none of these.
    """
    rows = read_table(path)
    total = sum(row.total for row in rows)
    calls = sum(row.calls for row in rows)
    finding = f"{calls} calls of convolutions, {_shown(total * 1e-3)} in all."
    notes = ["A table does not say what its machine can do at best, so the roofline has no roof."]
    found = _profile("table", str(path), finding, None, [], rows, [], "", notes, None, _Limits())
    return replace(found, conditions="not in the file")


def _profile(
    kind: str,
    what: str,
    finding: str,
    milliseconds: float | None,
    variants: Sequence[Variant],
    rows: Sequence[Row],
    costs: Sequence[Cost],
    looked: str,
    notes: Sequence[str],
    device: torch.device | None,
    limits: _Limits,
) -> Profile:
    if any((row.of_limit or 0) > 1.05 for row in rows):
        notes = [*notes, _BUSY]
    ordered = sorted(costs, key=lambda cost: -(cost.milliseconds or 0.0))
    return Profile(
        kind, what, finding, milliseconds, tuple(variants), tuple(rows), tuple(ordered), looked, tuple(notes),
        limits.found(), conditions(device or "cpu"), datetime.now(timezone.utc).isoformat(timespec="seconds"),
        __version__,
    )  # fmt: skip
