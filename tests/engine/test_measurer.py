"""Measured choices: when something is measured, at which cost of time, and who decides."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import convgrad
from convgrad.engine import measurements, register
from convgrad.engine.measure import measurer
from convgrad.settings import measure, measuring_share

from .measuring import CPU, Fake, P, W, X, certainly_known, chosen, deterministic, everything, forward, fresh, known

pytestmark = pytest.mark.usefixtures("folder")


# ---- who decides -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nobody asks for it", "by name", "deterministic", "fake"])
def test_where_nothing_is_measured(how: str, quick: Fake) -> None:
    x, w = X, W
    with ExitStack() as stack:
        if how != "nobody asks for it":
            stack.enter_context(everything())
        if how == "by name":
            stack.enter_context(convgrad.use_backend("reference"))
        if how == "deterministic":
            stack.enter_context(deterministic())
        if how == "fake":
            mode = stack.enter_context(torch._subclasses.FakeTensorMode())
            x, w = mode.from_tensor(x), mode.from_tensor(w)
        convgrad.conv2d(x, w, padding=1)
    assert (quick.calls, measurements.exported()) == ([], [])
    assert chosen() == ("aten", "no rule prefers another backend")


@pytest.mark.usefixtures("quick")
def test_a_measurement_decides_and_is_remembered(monkeypatch):
    register(Fake("slow", 0.01))
    with everything():
        forward()
    name, reason = chosen()
    assert name == "quick"
    assert "measured once on this machine" in reason
    assert reason.endswith("x as fast as aten")
    found = certainly_known()
    assert found.times["quick"][0] < 1 == found.times["aten"][0] < found.times["slow"][0]
    fresh(monkeypatch)  # a later process, which measures nothing
    assert chosen()[0] == "quick"
    assert "quick" in str(convgrad.explain(P, outputs="forward")).split("measured once")[0]


def test_what_bans_itself_at_its_first_call_is_not_remembered():
    """A GPU's kernel, whose first result is checked on the device: what was timed afterwards was PyTorch's."""

    class Banned(Fake):
        checks_itself = True
        wrong = False

        def reasons_against(self, problem, outputs, device):
            return ["its kernel is wrong"] if self.wrong else super().reasons_against(problem, outputs, device)

        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)

            def run(*operands):
                self.wrong = True
                self.changed()
                return kernel(*operands)

            return run

    register(Banned("banned", 0.0))
    with everything():
        forward()
    assert "banned" not in certainly_known().times
    assert chosen()[0] == "aten"


@pytest.mark.usefixtures("quick")
def test_cudnn_benchmark_is_the_same_wish():
    forward()  # a plan under other flags
    with torch.backends.cudnn.flags(benchmark=True):
        forward()
        assert known() is not None
        assert chosen()[0] == "quick"


@pytest.mark.usefixtures("quick")
def test_frozen_uses_what_is_known_and_measures_nothing():
    with everything():
        forward()
    with torch.backends.cudnn.flags(benchmark=True), measure(False):
        assert forward().abs().sum() == 0  # quick's
        forward(X[:, :, :9])
    assert len(measurements.exported()) == 1
    assert measurer._state.spent > 0


def test_who_records_a_call_sees_nothing_of_the_measuring():
    with everything():
        with FlopCounterMode(display=False) as counted:
            forward()
        assert counted.get_total_flops() == P.flops
        recorded = make_fx(lambda x: forward(x) + 1)(X[:1]).graph
        assert [n.op for n in recorded.nodes].count("call_function") == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit itself
            traced: Any = torch.jit.trace(lambda x: forward(x) + 1, X[:, :, :9], check_trace=False)
        assert len([n for n in traced.graph.nodes() if "::conv" in n.kind()]) == 1
    assert len(measurements.exported()) == 3


@pytest.mark.usefixtures("quick")
def test_a_deterministic_run_does_not_depend_on_what_was_measured():
    with everything():
        forward()
    with deterministic():
        assert chosen() == ("aten", "no rule prefers another backend")


def test_one_setting_for_several_blocks_and_as_a_decorator():
    setting = measure(share=2)
    for _ in range(2):
        with setting, setting:
            assert measuring_share(CPU) == 2
        assert measuring_share(CPU) == 0

    for decorator in (measure(share=2), setting):

        @decorator
        def share() -> float:
            return measuring_share(CPU)

        assert measuring_share(CPU) == 0
        assert share() == share() == 2
    assert measuring_share(CPU) == 0


def test_as_a_setting_it_lasts_and_as_a_block_it_ends():
    assert measuring_share(CPU) == 0
    with measure():
        assert measuring_share(CPU) > 0
        with measure(False):
            assert measuring_share(CPU) == 0
        assert measuring_share(CPU) > 0
    measure(share=2)
    try:
        assert measuring_share(CPU) == 2
        with torch.backends.cudnn.flags(deterministic=True):
            assert measuring_share(CPU) == 2  # which says nothing of a CPU
            assert measuring_share(torch.device("cuda")) == 0
        with deterministic():
            assert measuring_share(CPU) == 0
    finally:
        measure(None)
    with torch.backends.cudnn.flags(benchmark=True):
        assert measuring_share(CPU) > 0


def test_a_share_must_be_positive():
    for share in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            measure(share=share)
    with pytest.raises(TypeError, match="True, False or None"):
        measure("yes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="share is a number, got '1'"):
        measure(share="1")  # pyright: ignore[reportArgumentType]


# ---- time ------------------------------------------------------------------------------------------


def test_a_thousand_shapes_cost_no_more_than_a_share_of_the_time(monkeypatch):
    """Each shape comes once. What is similar is measured once, and all of it within what was granted."""
    monkeypatch.setattr(measurer, "_GRANTED", 0.2)
    share, longest, start = 0.05, 0.0, time.perf_counter()
    with measure(share=share):
        for n in range(1000):
            before = measurer._state.spent
            forward(X[:, :, : 8 + n % 32, : 8 + n // 32 % 32].contiguous()[: 1 + n % 2])
            longest = max(longest, measurer._state.spent - before)
    wall = time.perf_counter() - start
    assert 0 < measurer._state.spent <= 0.2 + share * wall + longest
    assert len(measurer._state.measured) <= 72  # 6 heights, 6 widths and 2 batches that are not similar


@pytest.mark.usefixtures("quick")
def test_without_time_the_rules_decide_and_it_is_measured_later(monkeypatch):
    monkeypatch.setattr(measurer, "_GRANTED", 0.05)
    monkeypatch.setattr(measurer, "_PAUSE", 0.02)
    with measure(share=0.5):
        measurer._state.since, measurer._state.spent = time.perf_counter(), 0.15  # a debt
        assert forward().abs().sum() > 0
        assert known() is None
        end = time.perf_counter() + 20
        while known() is None and time.perf_counter() < end:
            forward()
            time.sleep(0.01)
        assert forward().abs().sum() == 0


# ---- several processes -------------------------------------------------------------------------------

RANK = """
import sys, torch, convgrad
from convgrad.engine import measurements
torch.set_num_threads(1)
input("ready")
with convgrad.measure(share=float("inf")):
    x, w = torch.randn(2, 64, 40, 40), torch.randn(64, 1, 5, 5)
    convgrad.conv2d(x, w, padding=2, groups=64)
print([len(next(iter(v["times"].values()))) for v in measurements.exported()])
"""


def test_several_ranks_measure_once(folder):
    command = [sys.executable, "-W", "error", "-c", RANK]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.read(5) == "ready"  # both have imported everything
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = [rank.communicate() for rank in ranks]
    assert said == [("[1]\n", "")] * 2
