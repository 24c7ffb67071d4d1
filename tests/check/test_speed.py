"""What registering says of a kernel's speed, when it warns, and that it is measured once."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import convgrad
from convgrad import CheckError, ConvProblem
from convgrad.check import speed
from convgrad.diagnostics import explain_problem
from convgrad.engine import store

from .functions import WIDE, accepts, forward, grad_input, grad_weight

LAYER = ConvProblem.parse("g32mb2ic32ih28oc32kh3ph1")


def depthwise(p: ConvProblem) -> bool:
    return accepts(p) and p.depthwise


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """What was timed; nothing is in the store at first, and what is registered is not checked, only timed."""
    store.forget("speed")
    monkeypatch.setattr("convgrad.check.registration.check_suite", lambda *_: ["verified elsewhere"])
    timed, real = [], speed._timed

    def note(backend: Any, outputs: Any, problem: ConvProblem, device: torch.device) -> Any:
        timed.append((str(problem), outputs))
        return real(backend, outputs, problem, device)

    monkeypatch.setattr(speed, "_timed", note)
    return timed


def both(g: Tensor, x: Tensor, w: Tensor, p: ConvProblem, mask: Any) -> tuple[Tensor, Tensor]:
    return grad_input(g, w, p), grad_weight(g, x, p)


def slow(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    time.sleep(0.003)
    return forward(input, weight, p)


def test_a_slow_one_is_told_once(measured: list[Any]) -> None:
    options: dict[str, Any] = {"forward": slow, "accepts": depthwise, "problems": [LAYER], "seconds": 1}
    verified = store.items("verified")
    with pytest.warns(
        UserWarning, match=r"'mine' runs wherever it is usable, and is slower there: forward 0\."
    ) as told:
        backend = convgrad.register("mine", **options)
    assert [w.filename for w in told if "slower" in str(w.message)] == [__file__]
    assert backend.timings[0].problem == str(LAYER)
    assert all(t.speed < 0.5 and t.other in ("aten", "native") for t in backend.timings)
    assert "as fast as" in backend.summary
    row = next(r for r in explain_problem(LAYER).rows if r.backend == "mine" and r.output == "forward")
    assert re.match(r"registered by the user, forward 0\.", row.reasons[0])
    count = len(measured)
    assert (len(store.items("speed")), store.items("verified")) == (1, verified)  # `info` counts the latter
    again = convgrad.register("mine", **options)  # a script that runs again
    assert (again.timings, len(measured)) == (backend.timings, count)
    changes: list[dict[str, Any]] = [{"forward": partial(slow)}, {"problems": ["g8mb2ic8ih9oc8kh3"]}]
    for n, change in enumerate(changes, 2):
        convgrad.register("mine", **options | change)
        assert len(store.items("speed")) == n


def test_not_preferred_it_is_said_and_no_warning(measured: list[Any], recwarn: pytest.WarningsRecorder) -> None:
    options: dict[str, Any] = {"accepts": depthwise, "problems": [LAYER], "prefer": False, "seconds": 1}
    backend = convgrad.register("mine", forward=slow, **options)
    assert measured
    assert max(t.speed for t in backend.timings) < 0.5
    assert not recwarn


def test_an_interpreter_is_not_timed(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert convgrad.register("mine", forward=slow, accepts=depthwise, seconds=1).timings == ()
    assert not measured


def test_the_same_code_is_neither_faster_nor_slower(measured: list[Any]) -> None:
    """Against a backend that sleeps as long, which would run without it."""
    convgrad.register("there", forward=slow, accepts=depthwise, verify=False)
    backend = convgrad.register("mine", forward=slow, accepts=depthwise, problems=[LAYER], seconds=1)
    assert {t.other for t in backend.timings} == {"there"}
    timing = backend.timings[0]
    assert timing.low < 1.5, "of a busy machine the speed alone may be anything"
    assert timing.high > 1 / 1.5


@pytest.mark.slow
def test_each_way_in_which_it_is_called_is_timed(measured: list[Any]) -> None:
    convgrad.register("mine", forward=forward, backward=both, accepts=depthwise, dtypes=WIDE, prefer=False, seconds=4)
    assert {outputs for _, outputs in measured} == {("forward",), ("grad_input", "grad_weight")}


def test_no_sweep_is_timed_that_nobody_asks_for(measured: list[Any]) -> None:
    """Both gradients of a transposed convolution are another sweep."""
    options: dict[str, Any] = {"accepts": lambda p: accepts(p) and p.transposed, "dtypes": WIDE, "verify": False}
    backend = convgrad.register("mine", backward=both, **options)
    assert speed.measure(backend, 1.0) == ()


def test_it_is_bounded(measured: list[Any]) -> None:
    """A kernel that takes long for a real layer is timed on a small one."""

    def endless(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        time.sleep(p.flops * 1e-6)  # a second for a million
        return forward(input, weight, p)

    backend = convgrad.register("mine", forward=endless, accepts=depthwise, verify=False)
    start = time.perf_counter()
    with pytest.warns(UserWarning, match="is slower there"):
        timings = speed.measure(backend, 1.0)
    assert time.perf_counter() - start < 5
    assert len(timings) == 1


def test_the_layout_that_a_kernel_needs_is_timed(measured: list[Any]) -> None:
    """Not the copies into it."""
    convgrad.register(
        "last", forward=forward, accepts=depthwise, layouts="channels_last", dtypes=torch.float32, seconds=1
    )
    assert {"channels_last" in problem for problem, _ in measured} == {True}


def test_one_that_raises_for_a_layer_is_refused(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that another refusal says; nothing said before that it runs."""
    monkeypatch.setattr("convgrad.check.registration.check_suite", lambda *_: ["not verified"])

    def small(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        if input.shape[2] == 28:
            raise ValueError("too large")
        return forward(input, weight, p)

    with pytest.raises(CheckError) as caught:
        convgrad.register("mine", forward=small, accepts=depthwise, problems=[LAYER], seconds=1)
    first, operands, problem, _, call = str(caught.value).splitlines()
    assert re.search(r"its forward raised ValueError: too large \(.*test_speed.py:\d+\) \(when it was timed\)", first)
    assert "it was called with input (2, 32, 28, 28)" in operands
    assert (problem, str(LAYER) in call) == (f"  the problem: {LAYER}", True)


def test_one_that_raises_once_is_refused(measured: list[Any]) -> None:
    errors: list[ValueError] = []

    def flaky(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        if errors:
            raise errors.pop()
        return forward(input, weight, p)

    for named in ([LAYER], []):  # without one, it raises where its time for a small one is taken
        errors = [ValueError("now and then")]
        with pytest.raises(CheckError, match=r"its forward raised ValueError: now and then \(when it was timed\)"):
            convgrad.register("mine", forward=flaky, accepts=depthwise, problems=named, seconds=1)
