"""From a call to its plan: what the key tells apart, what is remembered, and for how long."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import convgrad
from convgrad.engine import cache
from convgrad.engine.calls import find, resolve
from convgrad.engine.plan import Plan

from .measuring import deterministic

X, W = torch.randn(2, 8, 6, 6), torch.randn(8, 1, 3, 3)
RAW: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 8)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    cache.invalidate()


def test_a_call_is_planned_once() -> None:
    assert type(find("convgrad::convolution", RAW, X, W)) is tuple  # the key of a call that was not seen
    plan = resolve("convolution", RAW, X, W, None)
    assert resolve("convolution", RAW, X, W, None) is plan
    assert find("convgrad::convolution", RAW, X, W) is plan
    assert len(cache.plans) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: resolve("convolution", ([1], *RAW[1:]), X, W, None),  # another spelling may be read differently
        lambda: resolve("convolution", RAW, X[:1], W, None),
        lambda: resolve("convolution", RAW, X.to(memory_format=torch.channels_last), W, None),
        lambda: resolve(
            "convolution", RAW, X, W.to(memory_format=torch.channels_last).as_strided(W.shape, (9, 1, 3, 1)), None
        ),
        lambda: resolve("convolution", RAW, X.double(), W.double(), None),
        lambda: resolve("convolution", RAW, X, W, torch.zeros(8)),
        lambda: resolve("convolution", RAW, X, W, torch.zeros(16)[::2]),
        lambda: resolve("grad_input", ([2, 8, 6, 6], *RAW), X, W),
        lambda: resolve("grad_input", ([2, 8, 6, 6], *RAW), X, W, memory_format=torch.channels_last),
    ],
)
def test_what_may_change_the_result_is_another_plan(other: Callable[[], Plan]) -> None:
    first = resolve("convolution", RAW, X, W, None)
    assert other() is not first
    assert len(cache.plans) == 2
    assert resolve("convolution", RAW, X, W, None) is first


def test_requests_and_flags_are_part_of_the_key() -> None:
    plans = [resolve("convolution", RAW, X, W, None)]
    with convgrad.use_backend("im2col"):
        plans.append(resolve("convolution", RAW, X, W, None))
    with deterministic():
        plans.append(resolve("convolution", RAW, X, W, None))
    torch.backends.mkldnn.set_flags(_enabled=False)
    plans.append(resolve("convolution", RAW, X, W, None))
    torch.backends.mkldnn.set_flags(_enabled=True)
    of_float32: Any = torch.backends.mkldnn
    for operation in (of_float32.conv, of_float32.matmul):
        operation.fp32_precision = "bf16"
        plans.append(resolve("convolution", RAW, X, W, None))
        operation.fp32_precision = "none"
    assert len({id(plan) for plan in plans}) == 6
    assert [plan.steps[0].backend.name == "im2col" for plan in plans] == [False, True, False, False, False, False]


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST", 3)
    for n in range(1, 7):
        convgrad.conv2d(X[:, :, :, :n], W, padding=1, groups=8)
        assert len(cache.plans) <= 3
    newest = next(reversed(cache.plans.values()))
    assert newest.problem.input_size == (6, 6)


def test_a_refused_call_is_not_remembered() -> None:
    for _ in range(2):
        with pytest.raises(convgrad.ShapeError, match="expected input"):
            convgrad.conv2d(X[:, :7], W, groups=8)
    assert not cache.plans


def test_every_way_in_ends_in_the_same_plans() -> None:
    """The operator, autograd's nodes and a takeover add no cache of their own."""
    torch.ops.convgrad.convolution(X, W, None, *RAW)
    assert len(cache.plans) == 1
    for _ in range(3):
        convgrad.conv2d(X.clone().requires_grad_(), W.clone().requires_grad_(), padding=1, groups=8).sum().backward()
    before = len(cache.plans)
    with convgrad.takeover():
        torch.nn.functional.conv2d(X, W, padding=1, groups=8)
    assert len(cache.plans) <= before + 1
    cache.invalidate()
    assert not cache.plans


def test_the_backward_is_planned_when_it_is_first_needed_and_only_as_needed() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with convgrad.use_backend("im2col"):  # convgrad's own autograd records
        y = convgrad.conv2d(x, w, padding=1, groups=8)
    (plan,) = cache.plans.values()
    plan.backwards.clear()
    torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    assert list(plan.backwards) == [(True, False, False)]
    torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert list(plan.backwards) == [(True, False, False), (True, True, False)]


def entered(call: Callable[[], object]) -> list[str]:
    """The Python functions that a call enters, convgrad's and PyTorch's."""
    names: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # without the call itself


def test_a_warm_call_enters_few_functions() -> None:
    """What a small convolution waits for. A bound, for a function more is easily added and never noticed."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    outputs = [convgrad.conv2d(x, w, padding=1, groups=8) for _ in range(3)]
    for y in outputs[:2]:
        y.backward(torch.ones_like(y))
    forward = entered(lambda: convgrad.conv2d(x, w, padding=1, groups=8))
    assert len(forward) <= 9, forward
    ones = torch.ones_like(outputs[2])
    backward = entered(lambda: outputs[2].backward(ones))
    backward = backward[max(i for i, name in enumerate(backward) if name.endswith("backward")) :]
    assert len(backward) <= 9, backward


def test_a_warm_call_under_a_default_device_goes_through_no_operator() -> None:
    with torch.device("cpu"):
        convgrad.conv2d(X, W, padding=1, groups=8)
        assert "_first_call" not in entered(lambda: convgrad.conv2d(X, W, padding=1, groups=8))


def test_a_warm_call_of_an_operator_is_dispatched_only_once() -> None:
    """As a compiled graph calls it, after other code has filled the caches."""
    arguments = [1, 1], [1, 1], [1, 1], False, [0, 0], 8
    ones, ops = torch.ones_like(X), torch.ops.convgrad
    calls: list[Callable[[], object]] = [
        lambda: ops.convolution(X, W, None, *arguments),
        lambda: ops.convolution_backward(ones, X, W, None, *arguments, [True, True, False]),
    ]
    for call in calls:
        call()
        assert not [name for name in entered(call) if "redispatch" in name or "below" in name]


def test_operands_that_lie_otherwise_than_those_of_the_first_call() -> None:
    """A plan asks nothing of operands that lie in memory as those for which it was made."""
    bias = torch.randn(16)[::2]
    negative: Any = torch._neg_view  # pyright: ignore[reportPrivateImportUsage]
    negated = negative(X)
    for x, b in ((X, bias.clone()), (X, bias), (negated, bias), (negated, bias.clone()), (X, negative(bias))):
        for w in (W, W.to(memory_format=torch.channels_last), negative(W)):
            expected = torch.nn.functional.conv2d(x.double(), w.double(), b.double(), padding=1, groups=8)
            torch.testing.assert_close(
                convgrad.conv2d(x, w, b, padding=1, groups=8).double(), expected, atol=1e-5, rtol=1e-5
            )


def test_a_plan_that_was_made_while_the_default_changed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may change the default between the choice and the end of planning."""
    native = convgrad.engine.get_backend("native")
    ask = type(native).reasons_against

    def slow(*args: Any) -> list[str]:
        monkeypatch.setattr(type(native), "reasons_against", ask)
        convgrad.set_default_backend("reference")
        return ask(*args)

    monkeypatch.setattr(type(native), "reasons_against", slow)
    convgrad.conv2d(X, W, padding=1, groups=8)
    with convgrad.trace() as ran:
        convgrad.conv2d(X, W, padding=1, groups=8)
    assert ran.records[0].backend == "reference"


def test_numbers_of_numpy_are_not_taken_for_one_another() -> None:
    """`marshal` writes their bytes alone: 255 and -1 have the same."""
    np = pytest.importorskip("numpy")
    x, w = torch.ones(1, 1, 9, 9), torch.ones(1, 1, 3, 3)
    for _ in range(2):
        assert convgrad.conv2d(x, w, padding=np.uint8(255)).shape == (1, 1, 517, 517)
        assert convgrad.conv2d(x, w, padding=np.int8(-1)).shape == (1, 1, 5, 5)
        assert convgrad.conv2d(x, w, stride=np.uint8(1)).shape == (1, 1, 7, 7)
        with pytest.raises(TypeError):
            convgrad.conv2d(x, w, stride=np.bool_(True))


def test_a_flag_of_cudnn_changes_nothing_on_the_cpu() -> None:
    with torch.backends.cudnn.flags(deterministic=True):
        plan = resolve("convolution", RAW, X, W, None)
    cache.invalidate()
    assert [s.backend.name for s in resolve("convolution", RAW, X, W, None).steps] == [
        s.backend.name for s in plan.steps
    ]
