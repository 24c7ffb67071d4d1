"""When a registered function runs: where it accepts, by name, and no longer once it is gone."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F

import convgrad
from convgrad import BackendError, ConvProblem
from convgrad.diagnostics import explain_problem

from .functions import DEPTHWISE, accepts, counted, depthwise, forward, operands


def test_preferred_where_it_accepts() -> None:
    mine = counted(accepts=lambda p: accepts(p) and p.depthwise)
    depthwise(*operands())
    assert mine.calls == 1
    convgrad.conv2d(torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))
    assert mine.calls == 1
    rows = {r.backend: r for r in explain_problem(DEPTHWISE).rows if r.output == "forward"}
    assert rows["mine"].chosen
    assert rows["mine"].reasons[0].startswith("registered by the user")
    dense = {r.backend: r for r in explain_problem(ConvProblem.parse("ic8ih9oc8kh3")).rows if r.output == "forward"}
    assert dense["mine"].reasons == ("its accepts says no: ndim is 2, symmetric is True, depthwise is False",)


def test_by_name() -> None:
    """A forward alone trains under its name: the other passes stay with the engine."""
    mine = counted(prefer=False, accepts=lambda p: accepts(p) and p.depthwise)
    x, w = operands()
    depthwise(x, w)
    assert mine.calls == 0
    with convgrad.use_backend("mine"):
        depthwise(x, w).sum().backward()
        assert mine.calls == 1
        with pytest.raises(BackendError, match=r"on cpu:\n  mine: its accepts says no: .*False\n  these can: aten, "):
            convgrad.conv2d(torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))
    with pytest.raises(BackendError, match="it has no grad_weight"), convgrad.use_backend(grad_weight="mine"):
        depthwise(x, w).sum().backward()


def test_a_module_by_name() -> None:
    mine = counted(prefer=False)
    module = convgrad.nn.Conv2d(8, 8, 3, padding=1, groups=8, backend="mine")
    stock = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)
    stock.load_state_dict(module.state_dict())
    x = torch.randn(2, 8, 9, 9)
    module(x).square().sum().backward()
    stock(x).square().sum().backward()
    assert mine.calls == 1
    torch.testing.assert_close(module.weight.grad, stock.weight.grad)


def test_registering_again_replaces() -> None:
    first, second = counted(), counted()
    x, w = operands()
    depthwise(x, w)
    assert (first.calls, second.calls) == (0, 1)


def test_of_two_the_one_registered_later_runs_also_if_it_was_registered_before() -> None:
    kernels = [counted("one"), counted("two"), counted("one")]
    depthwise(*operands())
    assert [kernel.calls for kernel in kernels] == [0, 0, 1]


@pytest.mark.parametrize("requested", [None, "mine"])
def test_accepts_that_changes_its_answer(requested: str | None) -> None:
    """Something else runs then, or the request is refused; nothing is asked again and again."""
    x, w = (t.detach() for t in operands())
    for answers in ((True, False), (False, True)):
        calls = itertools.cycle(answers)
        mine = counted(accepts=lambda p, calls=calls: next(calls))
        with convgrad.use_backend(requested), contextlib.suppress(BackendError):
            assert torch.allclose(depthwise(x, w), F.conv2d(x, w, padding=1, groups=8))
        assert mine.calls <= 1


def test_unregister_restores() -> None:
    x, w = operands()
    before = explain_problem(DEPTHWISE).chosen()
    mine = counted()
    depthwise(x, w)
    convgrad.unregister("mine")
    depthwise(x, w)
    assert mine.calls == 1
    assert "mine" not in convgrad.list_backends()
    assert explain_problem(DEPTHWISE).chosen() == before
    with pytest.raises(KeyError, match=r"^no backend was registered as 'mine'; there are none"):
        convgrad.unregister("mine")


def test_threads() -> None:
    """Registering, calling and unregistering at once: every result is right, and nothing is left."""
    x, w = (t.detach() for t in operands())
    expected, wrong, stop = F.conv2d(x, w, padding=1, groups=8), [], threading.Event()

    def call() -> None:
        while not stop.is_set():
            if not torch.allclose(depthwise(x, w), expected):
                wrong.append(1)

    def change(name: str) -> None:
        for _ in range(50):
            convgrad.register(name, forward=forward, accepts=accepts, verify=False)
            convgrad.unregister(name)

    callers = [threading.Thread(target=call) for _ in range(2)]
    changers = [threading.Thread(target=change, args=(f"t{i}",)) for i in range(2)]
    for t in (*callers, *changers):
        t.start()
    for t in changers:
        t.join()
    stop.set()
    for t in callers:
        t.join()
    assert not wrong
    assert not [n for n in convgrad.list_backends() if n.startswith("t") and n[1:].isdigit()]
