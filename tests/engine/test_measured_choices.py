"""Measured choices: how candidates are compared, how often, and what is known of other kernels and problems."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch

import convgrad
from convgrad.engine import cache, measurements, register, unregister
from convgrad.engine.measure import Comparison, measurer
from convgrad.engine.measure.measurements import Measurement
from convgrad.problem import ConvProblem

from .measuring import BOTH, CPU, Fake, P, W, X, certainly_known, chosen, everything, forward, known

pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.parametrize("block", [convgrad.measure, partial(torch.backends.cudnn.flags, benchmark=True)])
def test_what_a_block_measured_is_used_behind_it_and_explained(block: Callable[[], AbstractContextManager[object]]):
    register(Fake("fast"))
    layer = convgrad.nn.Conv2d(72, 8, 3, padding=1)
    known = Measurement({"aten": (2e-3,), "fast": (1e-3,)})

    def computed_by() -> list[str]:
        with convgrad.trace() as ran:
            layer(X.clone().requires_grad_()).sum().backward()
        return [record.backend for record in ran.records]

    assert computed_by() == ["aten", "aten"]
    with block():
        for outputs in (("forward",), (*BOTH, "grad_bias")):
            measurements.add(P.replace(has_bias=outputs == ("forward",)), outputs, CPU, known)
    assert computed_by() == ["fast", "fast"]
    explained = convgrad.explain(layer, X).chosen()
    assert [explained[output] for output in ("forward", *BOTH)] == ["fast"] * 3


# ---- candidates ------------------------------------------------------------------------------------


def test_a_wrong_candidate_is_banned_and_reported():
    register(Fake("wrong", cheats=True, off=1.0))
    with everything():
        with pytest.warns(RuntimeWarning, match="'wrong' is not used for g1mb2ic72.* it is wrong there: forward of"):
            assert forward().abs().sum() > 0
        forward()  # said once
    found = certainly_known()
    assert list(found.wrong) == ["wrong"]
    assert "wrong" not in found.times
    assert chosen()[0] == "aten"


def test_a_candidate_that_raises_is_left_out():
    class Raises(Fake):
        def bind(self, problem: ConvProblem, outputs: Any) -> Callable[..., Any]:
            kernel = super().bind(problem, outputs)
            return kernel if problem.flops < 400_000 else lambda *_: {}[0]

    register(Raises("raises"))
    with everything():
        forward()
    assert certainly_known().wrong == {"raises": "it raised KeyError: 0"}


@pytest.mark.parametrize("small", [True, False])
def test_a_candidate_without_memory_is_tried_again(small: bool):
    class Large(Fake):
        def bind(self, problem: ConvProblem, outputs: Any) -> Callable[..., Any]:
            fails = full and (problem.flops < 400_000) == small
            return (lambda *_: torch.empty(1 << 60)) if fails else super().bind(problem, outputs)

    full = True
    register(Large("large"))
    with everything():
        forward()
    assert known() is None if small else "large" not in certainly_known().times
    full = False
    with everything():
        certainly_measured = measurer.measure_now(P, ("forward",), CPU, force=True)
    assert certainly_measured is not None
    assert "large" in certainly_measured.times
    assert not certainly_measured.wrong


def test_a_hopeless_candidate_is_called_a_few_times_and_no_more():
    slow = Fake("slow", 0.05)
    register(slow)
    with everything():
        forward()
    full = [o for o in slow.calls if o == ("forward",)]
    assert len(full) <= 4 + 2  # the two are of the check


def test_what_looked_faster_once_is_compared_with_the_first_again(monkeypatch):
    """Something else ran while the first comparison did."""
    asked = []

    def compare(calls: dict[str, Any], baseline: str, **_: Any) -> Comparison:
        asked.append([*calls])
        lucky = {"native": 0.5, "im2col": 0.8} if len(asked) == 1 else {"native": 1.2, "im2col": 0.9}
        return Comparison(baseline, {name: (lucky.get(name, 1.0),) * 7 for name in calls})

    monkeypatch.setattr(measurer, "compare", compare)
    times, _ = measurer._times({name: lambda: time.sleep(1e-3) for name in ("aten", "native", "im2col")}, CPU)
    assert times == pytest.approx({"aten": 1.0, "native": 1.2, "im2col": 0.9})
    assert asked == [["aten", "native", "im2col"], ["aten", "native"], ["aten", "im2col"]]


@pytest.mark.parametrize("worst", [0.5, 2.5])
@pytest.mark.parametrize("rounds", [3, 9])
def test_what_is_not_clearly_faster_is_not(monkeypatch, worst: float, rounds: int):
    """Of few rounds all must be faster, of many most: with nine, the interval leaves one out at each end."""

    def compare(calls: dict[str, Any], baseline: str, **_: Any) -> Comparison:
        own = (worst, *(0.5,) * (rounds - 1))
        return Comparison(baseline, {name: own if name == "native" else (1.0,) * rounds for name in calls})

    monkeypatch.setattr(measurer, "compare", compare)
    times, _ = measurer._times({name: lambda: time.sleep(1e-3) for name in ("aten", "native")}, CPU)
    few = rounds < 6 and worst > 1
    assert times["native"] == pytest.approx(1.0 if few else 0.5)


def test_the_hopeless_one_may_be_the_first() -> None:
    seconds = {"aten": 0.01, "native": 1e-3, "im2col": 1e-3}
    times, _ = measurer._times({name: partial(time.sleep, took) for name, took in seconds.items()}, CPU)
    assert times["aten"] == 1 > 2 * max(times["native"], times["im2col"])


@pytest.mark.parametrize("looks", [4, 6])
def test_disturbed_looks_do_not_decide(looks: int) -> None:
    """While PyTorch's way was looked at, other processes had the core, so that ours seemed ten times as fast."""
    calls = {"aten": 0, "native": 0}

    def way(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            calls[name] += 1
            disturbed = name == "aten" and calls[name] <= looks
            time.sleep(0.02 if disturbed else seconds)

        return call

    times, _ = measurer._times({"aten": way("aten", 1e-3), "native": way("native", 2e-3)}, CPU)
    assert times["native"] > 1.2 > times["aten"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"forward": 0.0, "grad_input": 0.0, "grad_weight": 0.0, "sweep": 0.02}, "quick+quick"),
        ({"sweep": 0.0}, "quick"),
    ],
)
def test_a_sweep_is_compared_with_separate_passes(seconds, expected):
    register(Fake("quick", seconds, cheats=True))
    x = X.clone().requires_grad_()
    with everything():
        convgrad.conv2d(x, W.clone().requires_grad_(), padding=1).sum().backward()
    assert chosen(BOTH)[0] == expected


def test_the_users_random_state_stays_as_it_is():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with everything():
        forward()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.usefixtures("quick")
def test_it_measures_in_a_process_that_is_taken_over():
    with convgrad.takeover(), everything():
        torch.nn.functional.conv2d(X, W, padding=1)
    assert known() is not None


def test_what_is_larger_than_the_limit_is_not_measured(monkeypatch):
    monkeypatch.setattr(measurer, "_MOST_BYTES", P.least_bytes - 1)
    with everything():
        forward()
    assert known() is None


# ---- repeated --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_a_choice_that_lost_once_does_not_stay():
    """The first measurement was taken while something else ran; the median of three decides."""
    forwards = ("forward",)
    measurements.add(P, forwards, CPU, Measurement({"aten": (1.0,), "quick": (5.0,)}))
    assert chosen()[0] == "aten"
    for _ in range(2):
        convgrad.engine.measure_now(P, forwards, CPU, force=True)
    assert certainly_known().count == measurements.SETTLED
    assert chosen()[0] == "quick"


@pytest.mark.usefixtures("quick")
def test_an_unsettled_choice_is_looked_at_again_and_a_settled_one_is_not(monkeypatch):
    for name in ("_AGAIN", "_PAUSE"):
        monkeypatch.setattr(measurer, name, 0.02)
    with everything():
        for _ in range(40):
            forward()
            time.sleep(0.03)
            if certainly_known().count == measurements.SETTLED:
                break
        assert certainly_known().count == measurements.SETTLED
        spent = measurer._state.spent
        for _ in range(5):
            time.sleep(0.03)
            forward()
        assert measurer._state.spent == spent
        plan = next(iter(cache.plans.values()))
        assert not any(step.unsettled for step in plan.steps)


# ---- what is known of other kernels and problems ---------------------------------------------------


@pytest.mark.parametrize("what", ["its source changed", "it is gone"])
def test_another_kernel_is_not_what_was_measured(what: str, quick: Fake) -> None:
    quick.version = "1"
    with everything():
        forward()
    assert chosen()[0] == "quick"
    if what == "it is gone":
        unregister("quick")
    else:
        quick.version = "2"
    assert chosen()[0] == "aten"


def test_a_kernel_that_changed_is_measured_anew_however_often_it_was(quick: Fake) -> None:
    quick.version = "1"
    for _ in range(measurements.SETTLED):
        measurer.measure_now(P, ("forward",), CPU, force=True)
    quick.version = "2"
    measurer._state.measured.clear()  # some time later
    with everything():
        forward()
    assert chosen()[0] == "quick"
    assert certainly_known().count == 1


@pytest.mark.usefixtures("quick")
def test_similar_problems_share_a_choice_that_nobody_measured_for_them():
    with everything():
        forward()
        larger = ConvProblem.parse("g1mb2ic72ih21oc8oh21kh3ph1")
        assert "a similar problem" in chosen(problem=larger)[1]
        forward(torch.randn(larger.input_shape))  # every one at once
        assert "a similar problem" not in chosen(problem=larger)[1]
        assert chosen(problem=ConvProblem.parse("g1mb2ic72ih60oc8oh60kh3ph1"))[0] == "aten"
