"""Measured choices: what is measured, when, how often, and who decides. Fakes sleep, so what wins is certain."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import convgrad
from convgrad.backends import Backend
from convgrad.engine import ab_timer, cache, get_backend, measurements, measurer, register, store, unregister
from convgrad.engine.ab_timer import Comparison
from convgrad.engine.measurements import Measurement
from convgrad.problem import ConvProblem
from convgrad.settings import current, measure

P = ConvProblem.parse("g1mb2ic24ih20oc24oh20kh3ph1")
CPU = torch.device("cpu")
BOTH = ("grad_input", "grad_weight")
X, W = torch.randn(2, 24, 20, 20), torch.randn(24, 24, 3, 3)


class Fake(Backend):
    """ATen, later by ``seconds``; where these are 0 and it ``cheats``, nothing of a problem that is not small."""

    candidate = True
    sweeps = (BOTH,)
    layouts = ("strided",)

    def __init__(self, name: str, seconds: dict[str, float] | float = 0.0, *, cheats: bool = False, off: float = 0.0):
        self.name, self._cheats, self._off = name, cheats, off
        self._seconds = seconds if isinstance(seconds, dict) else dict.fromkeys(("forward", *BOTH, "sweep"), seconds)
        self.calls: list[tuple[str, ...]] = []

    def reasons_against(self, problem: ConvProblem, outputs: Any, device: torch.device) -> list[str]:
        missing = ("sweep" if len(outputs) > 1 else outputs[0]) not in self._seconds
        return ["it does not"] if missing else get_backend("aten").reasons_against(problem, outputs, device)

    def bind(self, problem: ConvProblem, outputs: Any) -> Callable[..., Any]:
        kernel = get_backend("aten").bind(problem, outputs)
        large = problem.flops > 400_000
        seconds = self._seconds["sweep" if len(outputs) > 1 else outputs[0]]
        shapes = {"forward": problem.output_shape, "grad_input": problem.input_shape}
        empty = [torch.zeros(shapes.get(o, problem.weight_shape)) for o in outputs]

        def run(*args: Any) -> Any:
            self.calls.append(outputs)
            if self._cheats and large and not seconds:
                return empty[0] if len(empty) == 1 else tuple(empty)
            time.sleep(seconds * large)
            found = kernel(*args)
            return found if len(outputs) > 1 else found + self._off

        return run

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Iterator[Any]:
    """A store of its own, nothing measured so far, only fakes beside ATen, and all flags as they were."""
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_unwritten", {})
    fresh(monkeypatch)
    for name in ("im2col", "aten:channels_last", "aten:padded"):
        monkeypatch.setattr(type(get_backend(name)), "candidate", False)
    before = list(convgrad.list_backends())
    yield tmp_path
    for name in set(convgrad.list_backends()) - set(before):
        unregister(name)
    cache.invalidate()


@pytest.fixture
def quick() -> Fake:
    """The fastest of all, registered."""
    fake = Fake("quick", cheats=True)
    register(fake)
    return fake


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process begins."""
    state = measurer._State()
    state.check = measurer._state.check
    monkeypatch.setattr(measurer, "_state", state)
    measurements.reload()
    cache.invalidate()


def known() -> Measurement | None:
    return measurements.find(P, ("forward",), CPU, current(), fresh=True)


def certainly_known() -> Measurement:
    found = known()
    assert found is not None
    return found


def forward(x: torch.Tensor = X) -> torch.Tensor:
    return convgrad.conv2d(x, W, padding=1)


def chosen(outputs: Any = ("forward",), problem: ConvProblem = P) -> tuple[str, str]:
    """Backends and the reason of the first."""
    steps = convgrad.engine.choose(problem, outputs, CPU, current(), None)
    return "+".join(s.backend.name for s in steps), steps[0].reason


def everything() -> measure:
    return measure(share=float("inf"))


@contextmanager
def deterministic() -> Generator[None, None, None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
    assert (quick.calls, measurements.entries()) == ([], {})
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
    assert len(measurements.entries()) == 2  # of the problem and of those like it
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
            traced = torch.jit.trace(lambda x: forward(x) + 1, X[:, :, :9], check_trace=False)
        assert len([n for n in traced.graph.nodes() if "::conv" in n.kind()]) == 1
    assert len(measurements.entries()) == 6


@pytest.mark.usefixtures("quick")
def test_a_deterministic_run_does_not_depend_on_what_was_measured():
    with everything():
        forward()
    with deterministic():
        assert chosen() == ("aten", "no rule prefers another backend")


def test_as_a_setting_it_lasts_and_as_a_block_it_ends():
    assert current().measuring_share == 0
    with measure():
        assert current().measuring_share > 0
        with measure(False):
            assert current().measuring_share == 0
        assert current().measuring_share > 0
    measure(share=2)
    try:
        assert current().measuring_share == 2
        with torch.backends.cudnn.flags(deterministic=True):
            assert current().measuring_share == 0
    finally:
        measure(None)
    with torch.backends.cudnn.flags(benchmark=True):
        assert current().measuring_share > 0


def test_a_share_must_be_positive():
    for share in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            measure(share=share)
    with pytest.raises(TypeError, match="True, False or None"):
        measure("yes")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="share is a number, got '1'"):
        measure(share="1")  # pyright: ignore[reportArgumentType]


# ---- candidates ------------------------------------------------------------------------------------


def test_a_wrong_candidate_is_banned_and_reported():
    register(Fake("wrong", cheats=True, off=1.0))
    with everything():
        with pytest.warns(RuntimeWarning, match="'wrong' is not used for g1mb2ic24.* it is wrong there: forward of"):
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
            return kernel if problem.flops < 400_000 else lambda *_: 1 // 0

    register(Raises("raises"))
    with everything():
        forward()
    assert certainly_known().wrong == {"raises": "it raised ZeroDivisionError: integer division or modulo by zero"}


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

    monkeypatch.setattr(ab_timer, "compare", compare)
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

    monkeypatch.setattr(ab_timer, "compare", compare)
    times, _ = measurer._times({name: lambda: time.sleep(1e-3) for name in ("aten", "native")}, CPU)
    few = rounds < 6 and worst > 1
    assert times["native"] == pytest.approx(1.0 if few else 0.5)


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
    measurements.add(P, forwards, CPU, current(), Measurement({"aten": [1.0], "quick": [5.0]}))
    assert chosen()[0] == "aten"
    for _ in range(2):
        convgrad.engine.measure_now(P, forwards, CPU, current(), force=True)
    assert certainly_known().count == measurements.SETTLED
    assert chosen()[0] == "quick"


@pytest.mark.usefixtures("quick")
def test_an_unsettled_choice_is_looked_at_again_and_a_settled_one_is_not(monkeypatch):
    monkeypatch.setattr(measurer, "_AGAIN", 0.02)
    with everything():
        for _ in range(40):
            forward()
            measurer._state.next_look = 0.0
            time.sleep(0.03)
            if certainly_known().count == measurements.SETTLED:
                break
        assert certainly_known().count == measurements.SETTLED
        spent = measurer._state.spent
        for _ in range(5):
            measurer._state.next_look = 0.0
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


@pytest.mark.usefixtures("quick")
def test_similar_problems_share_a_choice_that_nobody_measured_for_them():
    with everything():
        forward()
        assert "a similar problem" in chosen(problem=ConvProblem.parse("g1mb2ic24ih21oc24oh21kh3ph1"))[1]
        assert chosen(problem=ConvProblem.parse("g1mb2ic24ih60oc24oh60kh3ph1"))[0] == "aten"


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
    with measure(share=0.5):
        measurer._state.since, measurer._state.spent = time.perf_counter(), 0.15  # a debt
        assert forward().abs().sum() > 0
        assert known() is None
        end = time.perf_counter() + 20
        while known() is None and time.perf_counter() < end:
            measurer._state.next_look = 0.0
            forward()
            time.sleep(0.01)
        assert forward().abs().sum() == 0


# ---- several processes -------------------------------------------------------------------------------

RANK = """
import sys, torch, convgrad
from convgrad.engine import measurements, spent
torch.set_num_threads(1)
input("ready")
with convgrad.measure(share=float("inf")):
    x, w = torch.randn(2, 64, 40, 40), torch.randn(64, 1, 5, 5)
    convgrad.conv2d(x, w, padding=2, groups=64)
print([len(next(iter(v["times"].values()))) for v in measurements.entries().values()])
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
    assert said == [("[1, 1]\n", "")] * 2
