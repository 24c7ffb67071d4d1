"""What a rule proposes for a GPU, and the one timing that decides: here the card is a processor, the timer a fake."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import convgrad
from convgrad.backends import triton
from convgrad.backends.base import described
from convgrad.engine import cache, calls, choice, choose, fusion_gains, observed, register, rules, store
from convgrad.engine.measure import Comparison, environment, measurer
from convgrad.problem import ConvProblem, Output

from .measuring import BOTH, CPU, Fake, P, W, X, chosen, deterministic, forward, fresh, known

CUDA = torch.device("cuda")
OURS = 0.5


class Timer:
    """In the place of the timer: each way takes what is said of it, and what was compared is counted."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = {"aten": 1.0, **seconds}
        self.compared: list[list[str]] = []
        self.raises: Exception | None = None

    def compare(self, calls: dict[str, Callable[[], Any]], baseline: str, *, host: bool, **_: Any) -> Comparison:
        if self.raises:
            raise self.raises
        assert host
        self.compared.append([*calls])
        for call in calls.values():
            call()
        return Comparison(baseline, {name: (self.seconds[name],) * 7 for name in calls})


@pytest.fixture
def timer(folder: Any, monkeypatch: pytest.MonkeyPatch) -> Timer:
    """A rule proposes ``fake`` for every problem; no timing of other backends is in the way."""
    found = Timer(fake=OURS)
    monkeypatch.setattr(choice, "proposals", lambda problem, device: [("fake", "it is said to be fast")])
    monkeypatch.setattr(choice, "by_rule", lambda *_: [])
    monkeypatch.setattr(measurer, "compare", found.compare)
    monkeypatch.setattr(measurer, "_HOPELESS", 1e9)  # by a clock, which the timer has none of
    return found


@pytest.fixture
def fake(timer: Timer) -> Fake:
    backend = Fake("fake")
    backend.checks_itself = True
    register(backend)
    return backend


def ran(call: Callable[[], Any] = forward) -> list[str]:
    with convgrad.trace() as records:
        call()
    return [r.backend for r in records.records]


def step() -> torch.Tensor:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    convgrad.conv2d(x, w, padding=1).sum().backward()
    assert w.grad is not None
    return w.grad


@pytest.mark.parametrize("ours", [OURS, 1.5])
def test_the_first_call_decides_and_the_verdict_is_stored(timer: Timer, fake: Fake, ours: float) -> None:
    timer.seconds["fake"] = ours
    winner = "fake" if ours < 1 else "aten"
    assert chosen() == (
        "fake",
        "proposed by rule, and timed against PyTorch's own at its first call: it is said to be fast",
    )
    expected = torch.conv2d(X, W, padding=1)
    torch.testing.assert_close(forward(), expected)
    assert timer.compared[0] == ["aten", "fake"]
    compared, calls = len(timer.compared), len(fake.calls)
    torch.testing.assert_close(forward(), expected)
    assert ran() == [winner]
    assert len(timer.compared) == compared
    assert (len(fake.calls) > calls) == (winner == "fake")
    name, reason = chosen()
    assert name == winner
    assert reason.startswith("measured once on this machine: ")
    found = known()
    assert found is not None
    assert found.times == {"aten": (1.0,), "fake": (ours,)}


@pytest.mark.parametrize("faster", ["fake", "second"])
def test_all_that_is_proposed_is_timed_at_once(timer: Timer, faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "proposals", lambda *_: [("fake", "wide"), ("triton", "not here"), ("second", "long")])
    for name in ("fake", "second"):
        register(backend := Fake(name))
        backend.checks_itself = True
        timer.seconds[name] = OURS / 2 if name == faster else OURS
    assert chosen()[0] == "fake"
    forward()
    assert timer.compared[0] == ["aten", "fake", "second"]
    assert chosen()[0] == faster


def test_both_gradients_are_timed_as_one_call(timer: Timer, fake: Fake) -> None:
    first = step()
    torch.testing.assert_close(step(), first)
    assert timer.compared.count(["aten", "fake"]) == 4  # forward and backward, and each once more, to confirm it
    assert chosen(BOTH)[0] == "fake"


def test_another_process_reads_the_verdict(timer: Timer, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    forward()
    compared = len(timer.compared)
    fresh(monkeypatch)
    assert chosen()[1].startswith("measured once on this machine: 2.00x as fast as aten")
    assert ran() == ["fake"]
    assert len(timer.compared) == compared


def test_a_similar_problem_is_not_timed(timer: Timer, fake: Fake) -> None:
    forward()
    compared = len(timer.compared)
    forward(torch.randn(2, 72, 21, 20))
    assert len(timer.compared) == compared
    assert chosen(problem=P.replace(input_size=(21, 20), output_size=(21, 20)))[0] == "fake"


# ---- where nothing is timed: PyTorch's computes ----------------------------------------------------------


@pytest.mark.usefixtures("fake")
def test_frozen_or_deterministic(timer: Timer) -> None:
    for block, why in ((convgrad.measure(False), "measure(False) forbids timing"),
                       (deterministic(), "under deterministic algorithms nothing is timed")):  # fmt: skip
        with block:
            assert chosen() == ("aten", f"fake was not timed against it on this GPU, and {why}")
            assert ran() == ["aten"]
            step()
    assert not timer.compared
    forward()
    with convgrad.measure(False):
        assert ran() == ["fake"]  # which was timed since
    with deterministic():
        assert ran() == ["aten"]


def test_in_a_capture(timer: Timer, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a plan that was made before it nor one that is made within it times anything."""
    plan = convgrad.engine.plan_for(P, ("forward",), CPU)
    why = "in a capture nothing is timed"
    for module in (choice, measurer):
        monkeypatch.setattr(module, "not_timed", lambda device: why)
    assert chosen() == ("aten", f"fake was not timed against it on this GPU, and {why}")
    torch.testing.assert_close(plan.contract(X, W), torch.conv2d(X, W, padding=1))
    assert not timer.compared
    assert not fake.calls
    for module in (choice, measurer):
        monkeypatch.setattr(module, "not_timed", lambda device: "")
    torch.testing.assert_close(plan.contract(X, W), torch.conv2d(X, W, padding=1))
    assert timer.compared


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_call_after_a_capture_is_timed(timer: Timer, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled table kept PyTorch's kernel, which a call of the same key within the capture got."""
    captures, usual = [True], calls.flags
    monkeypatch.setattr(calls, "flags", lambda like: (usual(like), captures[0]))  # as on a GPU
    monkeypatch.setattr(cache, "capturing", lambda: captures[0])
    for module in (choice, measurer):
        monkeypatch.setattr(module, "not_timed", lambda device: "in a capture nothing is timed" * captures[0])
    call = step if recorded else forward
    call()
    call()
    assert not timer.compared
    captures[0] = False
    call()
    assert timer.compared


@pytest.mark.usefixtures("timer", "fake")
def test_a_real_second_process_reads_it(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "memory_kept", lambda: False)  # which another test may have turned on
    forward()
    script = """if 1:
        import torch
        from convgrad.engine import choose, register
        from tests.engine.measuring import Fake, P
        register(Fake("fake"))
        print(choose(P, ("forward",), torch.device("cpu"))[0].backend.name)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "CONVGRAD_CACHE": str(folder), "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )  # fmt: skip
    assert done.stdout.strip() == "fake"


def test_why_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not measurer.not_timed(CUDA)
    monkeypatch.setattr(measurer, "capturing", lambda: True)
    assert measurer.not_timed(CUDA) == "in a capture nothing is timed"
    assert not measurer.not_timed(CPU)


@pytest.mark.usefixtures("fake")
def test_its_calls_are_not_the_users(timer: Timer) -> None:
    with FlopCounterMode(display=False) as counter:
        forward()
    assert counter.get_total_flops() == P.flops
    with convgrad.trace() as records:
        step()
    assert timer.compared
    assert len(records.records) == 2


@pytest.mark.usefixtures("fake")
def test_while_another_process_measures(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one goes on with PyTorch's, and times it at the next call."""
    alone = store.alone
    monkeypatch.setattr(store, "alone", lambda wait=0.0: nullcontext(False))
    forward()
    assert not timer.compared
    monkeypatch.setattr(store, "alone", alone)
    forward()
    assert timer.compared


@pytest.mark.usefixtures("fake")
def test_after_five_seconds_only_a_share_of_the_time_is_spent(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(measurer.time, "perf_counter", lambda: now[0])
    forward()  # from which on time is counted
    assert timer.compared
    timer.compared.clear()
    measurer._state.spent = 5.5
    other = torch.randn(7, 72, 40, 40)
    forward(other)
    assert not timer.compared
    now[0] += 11
    forward(other)
    assert timer.compared


@pytest.mark.usefixtures("fake")
def test_without_memory_it_is_tried_later(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(measurer.time, "perf_counter", lambda: now[0])
    timer.raises = torch.OutOfMemoryError("CUDA out of memory")
    expected = torch.conv2d(X, W, padding=1)
    torch.testing.assert_close(forward(), expected)
    timer.raises = None
    forward()
    assert not timer.compared
    now[0] += 10
    torch.testing.assert_close(forward(), expected)
    assert timer.compared


def test_a_proposal_that_raises_is_never_taken(timer: Timer) -> None:
    class Raises(Fake):
        checks_itself = True

        def bind(self, problem: ConvProblem, outputs: Any) -> Callable[..., Any]:
            return lambda *_: {}[0]

    register(Raises("fake"))
    torch.testing.assert_close(forward(), torch.conv2d(X, W, padding=1))
    assert ran() == ["aten"]
    found = known()
    assert found is not None
    assert found.wrong == {"fake": "it raised KeyError: 0"}


def test_a_wrong_proposal_is_never_taken(timer: Timer) -> None:
    register(Fake("fake", off=1.0))
    with pytest.warns(RuntimeWarning, match="'fake' is not used for .* it is wrong there"):
        torch.testing.assert_close(forward(), torch.conv2d(X, W, padding=1))
    assert ran() == ["aten"]


def test_a_request_is_not_a_proposal(timer: Timer, fake: Fake) -> None:
    with convgrad.use_backend("fake"):
        assert ran() == ["fake"]
    assert not timer.compared


def test_a_compiled_graph_gets_what_was_confirmed(timer: Timer, fake: Fake) -> None:
    from convgrad.ops.lowering import _is_atens

    assert _is_atens(P, ("forward",), CPU)
    forward()
    assert not _is_atens(P, ("forward",), CPU) or chosen()[0] != "fake"


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("fused", [0.5, 1.5])
def test_a_fused_kernel_is_timed_once(timer: Timer, fused: float, monkeypatch: pytest.MonkeyPatch) -> None:
    timer.seconds |= {"apart": 1.0, "fused": fused}
    ran: list[str] = []

    def gains() -> bool:
        plan = convgrad.engine.plan_for(P, ("forward",), CPU)
        return fusion_gains(plan, lambda: ran.append("apart"), lambda: ran.append("fused"))

    with convgrad.measure(False):
        assert not gains()
    assert not ran
    assert gains() == (fused < 1)
    compared = len(timer.compared)
    assert timer.compared == [["apart", "fused"]] * compared
    fresh(monkeypatch)  # another process
    assert gains() == (fused < 1)
    assert len(timer.compared) == compared


@pytest.mark.usefixtures("fake")
def test_an_observer_is_not_told_of_trials_and_they_do_not_wait(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waited for what keeps the device busy before it, so that all took equally long, and PyTorch's stayed."""
    timer.seconds |= {"apart": 1.0, "fused": 0.5}
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    plan = convgrad.engine.plan_for(P, ("forward",), CPU)
    event = plan.event("fake", "why")._replace(device="cuda:0")
    with convgrad.trace() as told:
        fusion_gains(plan, lambda: observed(event, lambda: None), lambda: None)
        assert (len(told.records), waits) == (0, [])
        observed(event, lambda: None)
    assert len(told.records) == 1
    assert waits == ["cuda:0"] * 2


@pytest.mark.usefixtures("fake", "timer")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_call_that_cannot_be_timed_does_not_read_the_store_each_time(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a frozen process, and while another one measures: a read took longer than the two kernels."""
    reads: list[str] = []
    monkeypatch.setattr(store, "read", lambda kind, key: reads.append(key))
    monkeypatch.setattr(store, "alone", lambda wait=0.0: nullcontext(False))
    plan = convgrad.engine.plan_for(P, ("forward",), CPU)
    with convgrad.measure(False) if frozen else nullcontext():
        assert not any(fusion_gains(plan, forward, forward) for _ in range(5))
    assert len(reads) == 1


@pytest.mark.usefixtures("fake")
def test_a_fused_kernel_that_raises_is_not_tried_again() -> None:
    calls: list[int] = []

    def fused() -> None:
        calls.append(1)
        raise KeyError

    plan = convgrad.engine.plan_for(P, ("forward",), CPU)
    assert not fusion_gains(plan, lambda: None, fused)
    assert (tried := len(calls)) <= 2  # once to compile it
    assert not any(fusion_gains(plan, lambda: None, fused) for _ in range(3))
    assert len(calls) == tried


# ---- what is proposed --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "outputs", "expected"),
    [
        ("g144ic144oc144mb32ih56kh3ph1", ("forward",), "triton"),
        ("g144ic144oc144mb32ih56kh3ph1", BOTH, "triton"),
        ("g144ic144oc144mb32ih56kh3ph1 channels_last", BOTH, "triton"),
        ("g144ic144oc144mb32ih56kh3ph1 float16", BOTH, "triton"),
        ("g144ic144oc144mb32ih56kh3sh2ph1", ("forward",), "triton"),
        ("g96ic96oc96mb8id16ih56iw56kd3kh3kw3pd1ph1pw1", ("forward",), "triton"),
        ("g8ic8oc8mb1ih8kh3ph1", BOTH, "aten"),  # a launch takes longer
        ("g384ic384oc384mb32ih32kh31ph15 bfloat16", ("forward",), "triton:banded"),
        ("g384ic384oc384mb32ih32kh31ph15", BOTH, "fft"),  # nobody asked for TF32
        ("g512ic512oc512mb8iw4096kw31pw15 float16", BOTH, "triton:banded"),
        ("g512ic512oc512mb8iw4096kw31pw15", ("forward",), "triton"),
        ("ic144oc144mb32ih56kh3ph1", BOTH, "aten"),
    ],
)
def test_on_any_gpu_of_nvidia(
    text: str, outputs: tuple[Output, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "_installed", lambda: True)
    problem = ConvProblem.parse(text)
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        with described(capability):
            steps = choose(problem, outputs, CUDA, stored=False)
        assert {s.backend.name for s in steps} == {expected}
        assert {bool(s.proposed) for s in steps} == {expected != "aten"}
        assert all(s.reason.startswith("proposed by rule") for s in steps if s.proposed)
    with described((7, 5)):  # for which Triton does not compile
        older = "fft" if problem.kernel_size == (31, 31) else "aten"
        assert {s.backend.name for s in choose(problem, outputs, CUDA, stored=False)} == {older}


@pytest.mark.parametrize(
    ("text", "nvidia", "amd"),
    [
        ("mb256ic3ih224oc768kh16sh16 bfloat16", "aten:patches", "aten:patches"),
        ("mb256ic3ih224oc768kh16sh16 bfloat16 channels_last", "aten:patches", "aten:patches"),
        ("mb4096ic3id2ih14iw14oc1280kd2kh14kw14sd2sh14sw14 float16", "aten:patches", "aten:patches"),
        ("mb8ic64ih128oc32oh256kh2sh2 transposed", "aten:patches", "aten:patches"),
        ("mb1ic3ih16oc8kh4sh4", "aten", "aten"),  # a launch takes longer
        ("mb2ic64id16ih56iw56oc64kd3kh3kw3pd1ph1pw1 bfloat16", "aten:channels_last", "aten"),
        ("mb2ic64id16ih56iw56oc64kd3kh3kw3pd1ph1pw1", "aten", "aten"),
        ("g32mb32ic256ih56oc256kh3ph1 bfloat16 channels_last", "aten:contiguous", "aten:contiguous"),
        ("g32mb32ic256ih56oc256kh3ph1 bfloat16", "aten", "aten"),
        ("g384mb32ic384ih32oc384kh31ph15 channels_last", "fft", "fft"),
    ],
)
def test_routes_on_any_gpu(text: str, nvidia: str, amd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_installed", lambda: True)
    with described((8, 0)):
        for expected, hip in ((nvidia, None), (amd, "7.0")):
            monkeypatch.setattr(torch.version, "hip", hip)
            steps = choose(ConvProblem.parse(text), ("forward",), CUDA, stored=False)
            assert [s.backend.name for s in steps] == [expected]


def test_never_on_a_gpu_that_is_not_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels were compiled for AMD's, and never run there."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with described((9, 0)):
        problem = ConvProblem.parse("g144ic144oc144mb256ih112kh7ph3")
        assert not list(rules.proposals(problem, CUDA))
