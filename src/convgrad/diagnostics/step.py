"""A training step of a model, stock and accelerated: measured as a whole and in its parts, and made into a profile."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..backends import built_in
from ..engine import backends, reasons_against
from ..engine.measure import Comparison, Ratio, call_seconds, compare, median_interval
from ..models import (
    NO_COPY,
    accelerate_,
    copied,
    is_lazy,
    observe_aten,
    random_states_restored,
    spatial_convolutions,
    to_channels_last,
    training_step,
    why_it_fails,
)
from ..problem import PASSES
from .layers import layer_ranges
from .measure import Load
from .parts import PARTS, watched
from .profile import Kernel, Part, Profile, Variant
from .records import Call, Moment, Usage, computed, limited, reasoned, together
from .roofline import Limits
from .savings import costs_of_layout, costs_of_rows
from .screen import shown

Stage = Callable[[str], object]
_TELLING = 1.25  # an interval with 1 in it whose ends are further apart says nothing
_SHORT = 50  # steps in the time that there is
_ROUNDS = 7  # that give an interval and may hold a disturbed one
_MOST_ROUNDS = 101


def profile_model(
    model: nn.Module, example_inputs: Any, *, what: str = "", tune: str = "convgrad.measure() before the training loop",
    seconds: float = 10.0, stage: Stage = lambda _: None,
) -> Profile:  # fmt: skip
    """Measure a training step of a model by PyTorch and by convgrad, and each of its convolutions.

    The step is forward, backward and an update by SGD. It runs on copies: the model stays as it is.

    Args:
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        what: its name.
        tune: what would measure it ahead of time.
        seconds: how long all of it may take, about. A slow step is timed three times at least, however long that takes.
        stage: called with a description of each stage.

    Raises:
        TypeError: the model is not a module.
        ValueError: the model has no convolution, or cannot be copied.

    Equivalent to:
        >>> import torch, convgrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.ReLU())
        >>> profile = convgrad.report.profile_model(model, torch.randn(1, 4, 9, 9), seconds=0.5)
        >>> [v.name for v in profile.variants][:2], {row.direction for row in profile.rows} >= {"forward", "backward"}
        (['PyTorch', 'convgrad'], True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"profile_model takes a torch.nn.Module, got {type(model).__name__}")
    start = time.perf_counter()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    stage("preparing copies of the model")
    with random_states_restored(device):
        models, replaced, no_last = _forms(model, example_inputs)
        steps = {name: _step(one, example_inputs) for name, one in models.items()}
        with observe_aten(), Usage() as first:  # before any work
            steps["convgrad"]()
        steps["PyTorch"]()  # what a first step does more is no part of a step
        if not first.rows:
            raise ValueError("no convolution ran in this model")
        load = Load()
        stage("timing a training step, PyTorch's and convgrad's alternately")
        steps, no_last = _that_fit(steps, no_last, start, seconds, device)
        left = max(0.0, start + 0.45 * seconds - time.perf_counter())
        seen = compare(steps, "PyTorch", seconds=left, device=device, least_rounds=3, host=True)
        stage("timing each convolution")
        rows, limits, timeline = _observed(steps, start + 0.65 * seconds)
        warnings = load.warnings(device, rows[0].convolution.dtype)
        # On a busy machine there is time for it nevertheless where a step is short.
        compared = time.perf_counter() < start + 0.8 * seconds or _SHORT * seen.seconds("PyTorch") < seconds
        error = _error(models, example_inputs) if compared else "gradients: not compared, for --seconds was too short."
        parts, *whole = _whole(steps, seen, rows, device)
    stock, ours, ratio = _best(seen)
    forms = "; ".join(f"{name} {shown(seen.seconds(name))}" for name in seen.samples)
    best = "" if warnings else f". {ours} against {stock}: {_words(ratio)}"
    whole = [error, *whole, *[f"channels_last was not timed: {no_last}."] * bool(no_last), f"step: {forms}{best}."]
    stage("timing other backends for the most expensive convolutions")
    until = max(start + 0.9 * seconds, time.perf_counter() + 0.05 * seconds)
    costs, looked = [], "No other backend was timed, for the machine was busy."
    if not warnings:
        ms = seen.seconds("convgrad") * 1e3
        found, looked = costs_of_rows(rows, ms, until, tune, layout=False, stock=False)
        costs = [*costs_of_layout(seen), *found]
    notes = [
        f"A step is forward, backward and SGD. {replaced}",
        f"The forms of the step alternated, {len(seen.samples['PyTorch'])} rounds; intervals are at 95 %, or where "
        "there are fewer than six rounds the whole range.",
        "A row's time is its median over steps in which every call was watched, which costs a little.",
    ]
    variants = tuple(
        Variant(name, seen.seconds(name) * 1e3, *(_ratio(seen, name) if name != "PyTorch" else ()))
        for name in seen.samples
    )
    return Profile.of(
        rows, costs, notes, limits, device, kind="step", what=what or type(model).__name__,
        finding=_finding(seen, warnings), looked=looked, milliseconds=variants[1].milliseconds, warnings=warnings,
        variants=variants, parts=parts, kernels=_kernels(rows, device), whole=tuple(whole), timeline=timeline,
    )  # fmt: skip


def _step(model: nn.Module, inputs: Any) -> Callable[[], object]:
    """A training step: forward, backward and an update by SGD, whose rate of 0 leaves the parameters as they are."""
    gradients, parameters = training_step(model, inputs), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.0) if parameters else None

    def step() -> None:
        for parameter, gradient in zip(parameters, gradients(), strict=False):  # those of inputs follow
            parameter.grad = gradient
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _forms(model: nn.Module, inputs: Any) -> tuple[dict[str, nn.Module], str, str]:
    """Name -> a copy of the model that computes in this form; what `accelerate_` said; why none is in channels_last."""

    def twin() -> nn.Module:
        one = copied(model)
        if one is None:
            raise ValueError(NO_COPY + " before its first call" * is_lazy(model))
        return one

    if is_lazy(model):  # its first call draws the weights that all copies need to share
        model = twin()
        training_step(model, inputs)()
    stock, ours = twin(), twin()
    report = accelerate_(ours, example_inputs=inputs)
    models, why = {"PyTorch": stock, "convgrad": ours}, ""
    if not spatial_convolutions(model):
        why = "the model has no layer that convolves images or volumes"
    elif not all(t.is_contiguous() for t in tree_leaves(inputs) if isinstance(t, Tensor)):
        why = "the inputs are in another layout already"
    else:
        models["PyTorch, channels_last"] = last = twin()
        to_channels_last(last)
        models["convgrad, channels_last"] = both = twin()
        accelerate_(both, "channels_last", example_inputs=inputs)
    every = len(report.replaced) + len(report.left)
    return models, f"convgrad.accelerate_ replaced {len(report.replaced)} of {every} layers.", why


def _that_fit(
    steps: dict[str, Callable[[], object]], why: str, start: float, seconds: float, device: torch.device
) -> tuple[dict[str, Callable[[], object]], str]:
    """Return the forms that run, and in the time there is; and why none of them is in channels_last."""
    first = dict(list(steps.items())[:2])
    if not why:
        # As many rounds as give an interval, of all forms; the other layout takes about as long as this one.
        needed = 2 * _ROUNDS * sum(call_seconds(step, device) for step in first.values())
        missing = needed - (start + 0.45 * seconds - time.perf_counter())
        if missing > 0:
            return first, f"there was no time for it; {math.ceil(2.5 * missing)} seconds more (--seconds) are enough"
        failed = next(filter(None, map(why_it_fails, list(steps.values())[2:])), "")
        why = f"the model does not run there ({failed})" if failed else ""
    return first if why else steps, why


def _interval(ratios: Sequence[float]) -> Ratio:
    """Return the median of ratios with its interval; of too few their range."""
    low, high = median_interval(ratios)
    return Ratio(median(ratios), max(low, min(ratios)), min(high, max(ratios)))


def _ratio(seen: Comparison, name: str, base: str = "PyTorch") -> Ratio:
    """Return the speedup of one form over another, with its interval."""
    return _interval([a / b for a, b in zip(seen.samples[base], seen.samples[name], strict=True)])


def _best(seen: Comparison) -> tuple[str, str, Ratio]:
    """Return the faster form of PyTorch, that of convgrad, and the speedup of this over that."""
    stock, ours = (min(filter(lambda form: form.startswith(who), seen.samples), key=seen.median)
                   for who in ("PyTorch", "convgrad"))  # fmt: skip
    return stock, ours, _ratio(seen, ours, stock)


def _finding(seen: Comparison, warnings: Sequence[str] = ()) -> str:
    """The best of PyTorch against the best of convgrad in a sentence or two, also where there is nothing to say."""
    if warnings:
        return "No comparison is made, for this machine was busy while the step was timed."
    *forms, ratio = _best(seen)
    last = ", channels_last"
    base, took = (shown(seen.seconds(form)) + " in channels_last" * form.endswith(last) for form in forms)
    times = f"{took} instead of {base}"
    if not ratio.differs and ratio.high > _TELLING * ratio.low:
        return f"What convgrad brings here cannot be told, for the times vary too much: {_words(ratio)}."
    if not ratio.differs:
        return f"convgrad makes no measurable difference to this training step here: {_words(ratio)}, {times}."
    slower = "" if ratio.value > 1 else "slower here, "
    return f"With convgrad the training step is {slower}{_words(ratio)} as fast: {times}."


def _words(ratio: Ratio) -> str:
    return f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"


def _observed(
    steps: dict[str, Callable[[], object]], until: float
) -> tuple[list[Call], list[Limits], tuple[Moment, ...]]:
    """Return the calls of a step by convgrad with PyTorch's time of the same layers, the limits, and a timeline."""
    rounds: list[dict[str, Usage]] = []
    while not rounds or (len(rounds) < _MOST_ROUNDS and time.perf_counter() < until):
        rounds.append({name: Usage() for name in ("PyTorch", "convgrad")})
        for name, usage in rounds[-1].items():
            with layer_ranges(), observe_aten(), usage:
                steps[name]()
            usage.end_step()
    calls = []
    for call in together([call for one in rounds for call in one["convgrad"].rows]):
        count = max(1, call.calls // len(rounds))
        calls.append(replace(call, calls=count, total=count * call.milliseconds))
    calls, limits = limited([*map(reasoned, calls)])
    times = [(_by_layer(one["PyTorch"]), _by_layer(one["convgrad"])) for one in rounds]
    alone = Counter((call.layers, call.direction) for call in calls)
    rows = [_against(call, times, alone[call.layers, call.direction] == 1) for call in calls]
    rows.sort(key=lambda call: -call.total)
    return rows, limits, rounds[-1]["convgrad"].timeline(rows)


_Times = dict[tuple[str, str], float]


def _by_layer(usage: Usage) -> _Times:
    """Return (layer, direction) -> milliseconds."""
    result: _Times = defaultdict(float)
    for call in usage.rows:
        for layer in call.layers:
            result[layer, call.direction] += call.total / len(call.layers)
    return result


def _against(call: Call, times: Sequence[tuple[_Times, _Times]], alone: bool) -> Call:
    """Return a row compared with PyTorch's time of the same direction of the same layers, of which it may be a part."""
    keys = [(layer, call.direction) for layer in call.layers]
    if not keys or not all(key in stock for stock, _ in times for key in keys):
        return call
    value, *interval = _interval(
        [sum(stock[key] for key in keys) / sum(own[key] for key in keys) for stock, own in times]
    )
    low, high = interval if len(times) > 2 else (None, None)
    return replace(call, pytorch=value * call.milliseconds if alone else None, speedup=value, low=low, high=high)


def _whole(
    steps: dict[str, Callable[[], object]], seen: Comparison, rows: Sequence[Call], device: torch.device
) -> tuple[Any, ...]:
    """Return the parts of the step, which add up to it, and what else is to be said of it as a whole."""
    ours, stock = (watched(steps[name], device) for name in ("convgrad", "PyTorch"))
    mine, theirs = seen.seconds("convgrad") * 1e3, seen.seconds("PyTorch") * 1e3
    parts = tuple(
        Part(name, ours.parts[name] / ours.seconds * mine, stock.parts[name] / stock.seconds * theirs) for name in PARTS
    )
    said = [f"memory: {ours.peak / 1e6:,.3g} MB at most in a step; PyTorch {stock.peak / 1e6:,.3g} MB."]
    if all(row.least is not None for row in rows):
        took, least = sum(row.total for row in rows), sum((row.least or 0) * row.calls for row in rows)
        whole = max(0.0, mine - parts[0].milliseconds) + least
        said.append(
            f"limit: the convolutions, {shown(took / 1e3)} when watched one by one, would take {shown(least / 1e3)} at "
            f"this machine's limit; the step, the rest as it is, {shown(whole / 1e3)}."
        )
    if not 0.67 < ours.seconds * 1e3 / mine < 1.5:
        said.append(
            f"the parts are those of one watched step of {shown(ours.seconds)}, scaled to {shown(mine / 1e3)}: these "
            "two do not agree."
        )
    return parts, *said


def _error(models: dict[str, nn.Module], inputs: Any) -> str:
    """The largest error of a gradient, beside PyTorch's own, against the same step in float64."""
    unknown = "gradients: not compared, for this model does not run in a wider dtype."
    try:
        exact = copied(models["PyTorch"])
        if exact is None or any(p.is_complex() or p.dtype == torch.float64 for p in exact.parameters()):
            return unknown
        wide = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)
        each = []
        for model, given in ((exact.double(), wide), (models["PyTorch"], inputs), (models["convgrad"], inputs)):
            torch.manual_seed(0)
            each.append(training_step(model, given)())
    except Exception:  # of the model's own: it does not run in float64
        return unknown
    worst = (0.0, 0.0, "")
    names = [name for name, p in models["PyTorch"].named_parameters() if p.requires_grad]
    for name, right, *both in zip(names, *each, strict=False):
        size = 0.0 if right is None else float(right.norm())
        if size and all(g is not None for g in both):
            theirs, ours = (float((g.double() - right).norm()) / size for g in both)
            if theirs < 0.01:  # of another one PyTorch's own is wrong: it is zero but for rounding, or random
                worst = max(worst, (ours, theirs, name))
    if not worst[2]:
        return "gradients: none, or zero but for rounding, or random."
    return f"gradients: {worst[0]:.1e} is the largest error, of {worst[2]}; PyTorch's own there {worst[1]:.1e}."


def _kernels(rows: Sequence[Call], device: torch.device) -> tuple[Kernel, ...]:
    """For each kernel that the user registered, the layers that it computes, and those that it refuses and why."""
    layers_of, result = {computed(row.convolution): row.layers for row in rows}, []
    ours = {backend.name for backend in built_in()}
    for name, backend in ((name, one) for name, one in backends().items() if name not in ours):
        refused: dict[str, tuple[str, ...]] = {}
        runs = [row for row in rows if row.backend_name == name]
        for problem, layers in layers_of.items():
            against = [reasons_against(backend, problem, (output,), device) for output in PASSES]
            if all(against):
                reason = min((reasons[0] for reasons in against), key=lambda text: "compute" in text)
                refused[reason] = (*refused.get(reason, ()), *layers)
        result.append(Kernel(name, tuple(dict.fromkeys(x for row in runs for x in row.layers)), refused))
    return tuple(result)
