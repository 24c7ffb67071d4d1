"""A training step of a model, stock and accelerated: measured, and made into a profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..engine import Event, observing
from ..engine.ab_timer import Comparison, Ratio, compare, second_call
from ..models import (
    NO_COPY,
    accelerate_,
    copied,
    observe_aten,
    spatial_convolutions,
    to_channels_last,
    training_step,
    why_it_fails,
)
from ..problem import ConvProblem
from .calls import Call, Usage, limited, reasoned, rounded
from .capture import Running, module_names
from .costs import costs_of_layout, costs_of_rows
from .page import shown
from .profile import Profile, Variant
from .roofline import Limits

Stage = Callable[[str], object]
_OBSERVED = 3  # steps; of a slow one a single one
_TELLING = 1.25  # an interval with 1 in it whose ends are further apart says nothing
_CALLS = 9  # of each form of the step that a comparison makes at least


def quiet(_: str) -> None:
    """Say nothing about a stage."""


def profile_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    what: str = "",
    tune: str = "convgrad.measure() before the training loop",
    seconds: float = 10.0,
    stage: Stage = quiet,
) -> Profile:
    """Measure a training step of a model by PyTorch and by convgrad, and each of its convolutions.

    The step is forward and backward, without an optimizer. It runs on copies: the model stays as it is.

    Args:
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keyword arguments.
        what: its name.
        tune: what would measure it ahead of time.
        seconds: about how long all of it may take. A slow step is timed seven times at least, however long that takes.
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
    models, left = _forms(model, example_inputs)
    steps: dict[str, Callable[[], object]] = {name: training_step(one, example_inputs) for name, one in models.items()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        began = time.perf_counter()
        names = _layers(models["convgrad"], steps["convgrad"])
        first = time.perf_counter() - began
        stage("timing a training step, PyTorch's and convgrad's alternately")
        seen = _compared(steps, 0.4 * seconds, first, device)
        stage("timing each convolution")
        rounds = 1 if seen.median("PyTorch") > 0.04 * seconds else _OBSERVED
        rows, limits, timeline = _observed(steps, names, rounds)
    variants = [Variant("PyTorch", rounded(seen.seconds("PyTorch") * 1e3))]
    for name in list(seen.samples)[1:]:
        variants.append(Variant(name, rounded(seen.seconds(name) * 1e3), *map(rounded, seen.speedup(name))))
    stage("timing other backends for the most expensive convolutions")
    now, whole = time.perf_counter(), variants[1].milliseconds
    until = max(start + 0.85 * seconds, now + 0.15 * seconds)
    costs, looked = costs_of_rows(rows, whole, until, tune, layout=False, stock=False)
    notes = [
        f"A step is forward and backward, without an optimizer. {left}",
        f"PyTorch and convgrad alternated, {len(seen.samples['PyTorch'])} rounds; intervals are at 95 %.",
        f"A row's time is the median over {'one step' if rounds == 1 else f'{rounds} steps'}; watching costs a little.",
    ]
    if len(seen.samples) == 2:
        notes.append("channels_last was not timed: the step is slow, is there already, or does not run there.")
    return Profile.of(
        rows, [*costs_of_layout(seen), *costs], notes, limits, device, kind="step", what=what or type(model).__name__,
        finding=_finding(seen), looked=looked, milliseconds=whole, variants=tuple(variants),
        timeline=timeline,
    )  # fmt: skip


def _layers(model: nn.Module, step: Callable[[], object]) -> dict[ConvProblem, list[str]]:
    """The names of the modules that compute each convolution in a step.

    Raises:
        ValueError: no convolution ran.
    """
    running: list[Running] = []
    names: dict[ConvProblem, list[str]] = {}

    def note(event: Event) -> None:
        if running and event.outputs == (event.problem.bias_pass,):
            now = running[-1]
            names.setdefault(_plain(event.problem), []).append(now.name or type(now.module).__name__)

    with module_names(model, running), observe_aten(), observing(note):
        step()
    if not names:
        raise ValueError(f"no convolution ran in this {type(model).__name__}")
    return names


def _plain(problem: ConvProblem) -> ConvProblem:
    """Without what a forward and its backward may have different: a bias, a name."""
    return problem.replace(name="", has_bias=False)


def _forms(model: nn.Module, inputs: Any) -> tuple[dict[str, nn.Module], str]:
    """Name -> a copy of the model that computes in this form; and what `accelerate_` said.

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
    as_it_is = all(t.is_contiguous() for t in tree_leaves(inputs) if isinstance(t, Tensor))
    if spatial_convolutions(model) and as_it_is:
        models["PyTorch, channels_last"] = last = twin()
        to_channels_last(last)
        models["convgrad, channels_last"] = both = twin()
        accelerate_(both, "channels_last", example_inputs=inputs)
    said = f"convgrad.accelerate_ replaced {len(report.replaced)} of {len(report.replaced) + len(report.left)} layers; "
    return models, said + "PyTorch's own kernels stay where nothing else is expected to be faster."


def _compared(steps: dict[str, Callable[[], object]], seconds: float, first: float, device: torch.device) -> Comparison:
    """All forms timed alternately; of a slow step only the first two, and where a model does not run in channels_last.

    Args:
        first: seconds of the very first step, which is slower than those that follow.
    """
    if (
        first > seconds / _CALLS
        or any(map(why_it_fails, list(steps.values())[2:]))
        or _CALLS * sum(second_call(step, device) for step in steps.values()) > seconds
    ):
        steps = dict(list(steps.items())[:2])
    return compare(steps, "PyTorch", seconds=seconds, device=device)


def _finding(seen: Comparison) -> str:
    """The result in a sentence or two, also where it is nothing."""
    ratio = seen.speedup("convgrad")
    times = f"{shown(seen.seconds('convgrad'))} instead of {shown(seen.seconds('PyTorch'))}"
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


def _observed(
    steps: dict[str, Callable[[], object]], names: dict[ConvProblem, list[str]], rounds: int
) -> tuple[list[Call], list[Limits], tuple[tuple[int, float, float], ...]]:
    """The calls of a step by convgrad, with PyTorch's time of the same; the limits of their machines; a timeline."""
    stock, ours = Usage(), Usage()
    for _ in range(rounds):
        for usage, name in ((stock, "PyTorch"), (ours, "convgrad")):
            with observe_aten(), usage:
                steps[name]()
            usage.end_step()
    pytorch = {_same(call): call.milliseconds for call in stock.rows}
    seen, limits = limited([*map(reasoned, ours.rows)])
    rows = []
    for call in seen:
        layers, share = tuple(names.get(_plain(call.convolution), ())), call.calls / rounds
        one = replace(call, layers=layers, calls=max(1, round(share)), pytorch=pytorch.get(_same(call)))
        rows.append(one.normal(total=call.milliseconds * share))
    rows.sort(key=lambda call: -call.total)
    return rows, limits, ours.timeline(rows)


def _same(call: Call) -> tuple[object, ...]:
    """Return the key of calls that compute the same; the gradient of a bias costs next to nothing."""
    return (_plain(call.convolution), tuple(o for o in call.passes if o != "grad_bias"), call.device)
