"""``prefer="measured"``: a kernel runs for the problems on which it was measured to be faster, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import convgrad
from convgrad import ConvProblem
from convgrad.diagnostics import explain_problem
from convgrad.engine import cache, choose, measure_now, measurements, unregister
from convgrad.engine.measure.measurements import SETTLED

from .functions import WIDE, accepts, forward
from .test_choice import DEPTHWISE

CPU = torch.device("cpu")
OTHER = ConvProblem.parse("g8mb3ic8ih15oc8kh3ph1")


def sleeping(seconds: float):
    def kernel(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        time.sleep(seconds)
        return forward(x, w, p)

    return kernel


@pytest.fixture
def slow_stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every backend of the library takes 5 ms longer; nothing is stored before and after."""
    measurements.forget()
    for backend in convgrad.list_backends().values():
        bind = backend.bind

        def slower(problem, outputs, bind=bind):
            kernel = bind(problem, outputs)
            return lambda *args: (time.sleep(0.005), kernel(*args))[1]

        monkeypatch.setattr(backend, "bind", slower)
    cache.invalidate()  # plans made before are gone
    yield
    measurements.forget()


def chosen(problem: ConvProblem) -> str:
    return choose(problem, ("forward",), CPU)[0].backend.name


def measured(problem: ConvProblem) -> None:
    for _ in range(SETTLED):
        measure_now(problem, ("forward",), CPU, force=True)


@pytest.mark.usefixtures("slow_stock")
def test_it_runs_where_it_was_measured_to_be_faster() -> None:
    measured(DEPTHWISE)  # before it is registered: what is known of the others does not count then
    options = {"accepts": accepts, "dtypes": WIDE, "verify": False, "prefer": "measured"}
    convgrad.register("mine", forward=sleeping(0.0), **options)
    assert chosen(DEPTHWISE) != "mine"
    measured(DEPTHWISE)
    assert chosen(DEPTHWISE) == "mine"
    assert chosen(OTHER) != "mine"
    steps = choose(DEPTHWISE, ("forward",), CPU)
    assert steps[0].reason.startswith("measured")
    convgrad.register("mine", forward=sleeping(0.03), **options)  # another kernel, which was not measured
    assert chosen(DEPTHWISE) != "mine"
    measured(DEPTHWISE)
    assert chosen(DEPTHWISE) != "mine"
    unregister("mine")
    assert chosen(DEPTHWISE) != "mine"


@pytest.mark.usefixtures("slow_stock")
def test_explain_says_that_it_was_wrong() -> None:
    convgrad.register(
        "mine", forward=lambda x, w, p: 0 * forward(x, w, p), accepts=accepts, verify=False, prefer="measured"
    )
    with pytest.warns(RuntimeWarning, match="the backend 'mine' is not used for"):
        measured(DEPTHWISE)
    (mine,) = (row for row in explain_problem(DEPTHWISE, "forward").rows if row.backend == "mine")
    assert mine.reasons[0].startswith("it was wrong when it was measured: forward of g8mb2")
    assert not mine.chosen
