"""`takeover`: what it catches, who is told, and that nothing of it stays."""

import contextlib
import itertools
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import convgrad
from convgrad.diagnostics import Trace
from convgrad.engine import Plan
from convgrad.engine.events import observers, thread
from convgrad.models import observe_aten, takeover
from convgrad.ops import opened, pytorch_operators

from .taken_over import OURS, TOLERANCE, computed, operands, stock_kernel, world_of_one


@pytest.fixture
def ours():
    """Everything taken over and computed by a backend that is not ATen; the trace says that it was."""
    before = stock_kernel()
    with Trace() as seen, takeover(), convgrad.use_backend(OURS):
        yield seen
    assert stock_kernel() == before


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "conv_transpose2d"])
def test_functional_calls_forward_and_backward(name, ours):
    x, w, b = operands(d=int(name[-2]), requires_grad=True)
    transposed = "transpose" in name
    x, b = (torch.randn(2, 6, 5, 5, requires_grad=True), None) if transposed else (x, b)
    given = [t for t in (x, w, b) if t is not None]

    def call():
        y = getattr(F, name)(x, w, b, padding=1, groups=2, **({"stride": 2, "output_padding": 1} if transposed else {}))
        return (y, *torch.autograd.grad(y, given, torch.linspace(-1, 1, y.numel()).view_as(y)))

    got = call()
    passes = ["grad_input", "forward"] if transposed else ["forward", "grad_input"]
    assert computed(ours) == [*passes, "grad_weight"]
    with convgrad.use_backend("aten"):
        torch.testing.assert_close(got, call(), **TOLERANCE)
    assert {r.backend for r in ours} == {OURS, "aten"}  # PyTorch's own choices are seen, too


def test_an_interrupt_leaves_nothing_switched_off():
    """One arrives where a Python function of the kernels begins, at each of them in turn."""
    x, w, b = operands(requires_grad=True)
    F.conv2d(x, w, b, groups=2).sum().backward()
    interrupted = 0
    for last in itertools.count(1):
        calls = itertools.count(1)

        def interrupt(frame, event, _, calls=calls, last=last):
            if event == "call" and frame.f_code.co_filename == pytorch_operators.__file__ and next(calls) == last:
                raise KeyboardInterrupt

        try:
            with takeover(), convgrad.use_backend(OURS):
                F.conv2d(x, w, b, groups=2)  # its plan is there: what is interrupted is the call
                sys.setprofile(interrupt)
                try:
                    F.conv2d(x, w, b, groups=2).sum().backward()
                finally:
                    sys.setprofile(None)
        except KeyboardInterrupt:
            interrupted += 1
        assert torch.is_grad_enabled()
        assert not thread.in_backend
        if interrupted < last:
            break
    assert interrupted > 3


def test_an_interrupt_while_a_block_opens(monkeypatch):
    """What it leaves registered is not taken for PyTorch's kernel, which would call itself for ever."""
    x, w, b = operands(requires_grad=True)
    exchange, left = pytorch_operators._compiled, []

    def interrupted(*arguments):
        left.append(exchange(*arguments))
        raise KeyboardInterrupt

    if opened() is None:
        pytest.skip("no compiled library")
    try:
        with monkeypatch.context() as patched:
            patched.setattr(pytorch_operators, "_compiled", interrupted)
            with pytest.raises(KeyboardInterrupt):
                takeover().__enter__()
        with takeover(), convgrad.use_backend("aten"):
            F.conv2d(x, w, b, groups=2).sum().backward()
        F.conv2d(x, w, b, groups=2).sum().backward()
    finally:
        left[0]()
        pytorch_operators._left = False


def test_only_the_gradients_asked_for(ours):
    x, w, b = operands(requires_grad=True)
    y = F.conv2d(x, w.detach(), b.detach(), groups=2)
    torch.autograd.grad(y.sum(), x)
    assert computed(ours) == ["forward", "grad_input"]


def test_double_backward(ours):
    x = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: F.conv2d(*a, padding=1, groups=2), (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: F.conv2d(*a, padding=1, groups=2), (x, w, b), fast_mode=True)
    assert {"forward", "grad_input", "grad_weight"} <= set(computed(ours))


def test_inference_mode_and_no_grad(ours):
    x, w, b = operands(requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not F.conv2d(x, w, b, groups=2).requires_grad
    assert computed(ours) == ["forward"] * 2


def test_autocast_casts_before_it(ours):
    x, w, b = operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert F.conv2d(x, w, b, groups=2).dtype is torch.bfloat16
    assert computed(ours) == ["forward"]
    assert "bfloat16" in ours.records[0].problem or "bf16" in ours.records[0].problem


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which PyTorch itself imports here
def test_functorch(ours):
    x, w, _ = operands(dtype=torch.float64)

    def loss(w, x):
        return F.conv2d(x[None], w, groups=2).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)
    hessian = torch.func.jvp(torch.func.grad(lambda w: loss(w, x[0])), (w,), (w,))[1]
    assert {"forward", "grad_weight"} <= set(computed(ours))
    with convgrad.use_backend("aten"):
        torch.testing.assert_close(got, torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x))
        want = torch.func.jvp(torch.func.grad(lambda w: loss(w, x[0])), (w,), (w,))[1]
    torch.testing.assert_close(hessian, want)


def test_scripted_models(ours):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    assert computed(ours) == ["forward", "grad_weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_traced_inside_is_traced_as_pytorchs(ours):
    """A trace of what our kernel does would record the tensor that it writes to, and not that it does."""
    x, w, b = operands()
    traced = torch.jit.trace(lambda x: F.conv2d(x, w, b, padding=1, groups=2), x)
    with convgrad.use_backend("aten"):
        want = F.conv2d(3 * x, w, b, padding=1, groups=2)
    torch.testing.assert_close(traced(3 * x), want, **TOLERANCE)
    assert {"aten::_convolution"} <= {node.kind() for node in traced.graph.nodes()}


@pytest.mark.parametrize("block", [takeover, observe_aten])
@pytest.mark.parametrize("trained", [False, True])
def test_a_model_that_was_called_before_is_traced_as_pytorchs(block, trained):
    """Its calls are known to the compiled table, whose results a trace would hold as constants."""
    layer, x = nn.Conv2d(8, 8, 3, groups=8).double().requires_grad_(trained), torch.randn(2, 8, 9, 7).double()
    with block():
        for _ in range(3):
            layer(x)
        traced = torch.jit.trace(layer, x, check_trace=False)
    torch.testing.assert_close(traced(3 * x), layer(3 * x))
    if trained:
        got, want = (torch.autograd.grad(m(3 * x).square().sum(), layer.weight) for m in (traced, layer))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("block", [takeover, observe_aten])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_refuses_a_weight_that_is_no_parameter_as_pytorchs(block):
    """The kernel computed what the tracer had refused, and the tracer, which had ended the trace, crashed."""
    x, w, _ = operands(requires_grad=True)
    with block(), pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad as a constant"):
        torch.jit.trace(lambda x: F.conv2d(x, w, padding=1, groups=2), x.detach())


def test_a_process_group_of_one(ours, tmp_path):
    with world_of_one(tmp_path):
        model = nn.parallel.DistributedDataParallel(nn.Conv2d(3, 4, 3))
        model(torch.randn(1, 3, 5, 5)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        del model  # after its process group it may wait for ever, in PyTorch itself
    assert computed(ours) == ["forward", "grad_weight"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_when_it_runs(ours):
    x, w, b = operands(requires_grad=True)
    compiled = torch.compile(lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=2).relu(), fullgraph=True)
    compiled(x, w, b).sum().backward()
    assert {"forward", "grad_input", "grad_weight"} <= set(computed(ours))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamo_does_not_look_into_it(ours):
    """It does not compile a container of torch's own layers, and watches what runs inside of it."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model.compile(backend="eager")
    model(torch.randn(1, 3, 5, 5)).sum().backward()
    assert computed(ours) == ["forward", "grad_weight"]
    assert not _debug_get_cache_entry_list(Plan.contract.__code__)


def test_the_profiler_sees_who_ran(ours):
    x, w, b = operands()
    with torch.profiler.profile() as p:
        F.conv2d(x, w.requires_grad_(), b, groups=2).sum().backward()
    assert {f"convgrad::{pass_}[{OURS}]" for pass_ in ("forward", "grad_weight")} <= {e.key for e in p.key_averages()}


def test_autograd_states_a_missing_bias_as_zero(ours):
    x, w, _ = operands()
    g = torch.randn(2, 6, 4, 3)
    args = ([1, 1], [0, 0], [1, 1], False, [0, 0], 2, [True, True, False])
    got = torch.ops.aten.convolution_backward(g, x, w, [0], *args)
    assert got[0].shape == x.shape
    assert got[2] is None


# ---- coming and going ----------------------------------------------------------------------------


def test_nested_blocks_and_an_error_leave_nothing():
    before = stock_kernel()
    inside = []
    with contextlib.suppress(KeyError), takeover(), takeover():
        inside.append(stock_kernel())
        raise KeyError
    assert inside != [before]
    assert stock_kernel() == before


def test_a_block_that_cannot_open_leaves_nothing(monkeypatch):
    before = stock_kernel()
    with monkeypatch.context() as refusing:
        refusing.setattr(torch.library, "get_kernel", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), takeover():
            pass
    with takeover():
        assert stock_kernel() != before
    assert stock_kernel() == before


def test_the_last_of_several_threads_undoes_it():
    before, opened, close = stock_kernel(), threading.Barrier(4), threading.Event()

    def work():
        with takeover():
            opened.wait()
            close.wait()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    opened.wait()
    with takeover():
        pass
    assert stock_kernel() != before
    close.set()
    for t in threads:
        t.join()
    assert stock_kernel() == before


def test_as_a_decorator():
    @takeover()
    def call():
        return stock_kernel()

    assert call() != stock_kernel()


def test_watching_changes_nothing_and_sees_everything():
    x, w, b = operands(requires_grad=True)
    want = F.conv2d(x, w, b, groups=2)
    with Trace() as seen, observe_aten():
        y = F.conv2d(x, w, b, groups=2)
        y.sum().backward()
    assert torch.equal(y, want)
    assert [(r.outputs, r.backend) for r in seen] == [("forward", "aten"), ("grad_input+grad_weight+grad_bias", "aten")]
    assert observers == []


@pytest.mark.parametrize("block", [observe_aten, takeover])
def test_what_convgrads_own_functions_compute_is_reported_once(block):
    x, w, *_ = operands(groups=1)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    with convgrad.use_backend("aten"), Trace() as seen, block():
        convgrad.conv2d(x, w).sum().backward()
    assert [r.outputs for r in seen] == ["forward", "grad_input+grad_weight"]
    y = convgrad.conv2d(x, w)
    with Trace() as alone:
        torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    with Trace() as watched, observe_aten():
        y.sum().backward()
    assert [r.outputs for r in alone] == []  # the call was PyTorch's own, as the docstring of `trace` says
    assert [(r.outputs, r.reason) for r in watched] == [("grad_input+grad_weight", "PyTorch's own kernel")]
