"""The compiled table of calls: what it computes, that Python computes all else, and that nothing is lost between."""

import asyncio
import contextlib
import os
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import convgrad
from convgrad.diagnostics import Trace
from convgrad.engine import backends
from convgrad.models import observe_aten
from convgrad.ops import opened, pytorch_operators
from tests.models.taken_over import stock_kernel

table = opened()
pytestmark = [
    pytest.mark.skipif(table is None, reason="needs the compiled kernels"),
]

DEPTHWISE = {"padding": 1, "groups": 8}


def operands(*, requires_grad: bool = True, dtype: torch.dtype = torch.float32):
    x = torch.randn(2, 8, 6, 6, dtype=dtype, requires_grad=requires_grad)
    return x, torch.randn(8, 1, 3, 3, dtype=dtype, requires_grad=requires_grad)


@contextlib.contextmanager
def calls_of_python():
    """Count the calls that Python computes in this thread."""
    seen = []

    def watch(frame, event, _):
        if event == "call" and frame.f_code is pytorch_operators.compute.__code__:
            seen.append(frame)

    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def step(conv, x, w, **options):
    y = conv(x, w, **options)
    return (y, *torch.autograd.grad(y, (x, w), torch.ones_like(y)))


@pytest.mark.parametrize("block", [contextlib.nullcontext, convgrad.takeover])
def test_python_sees_a_call_once(block):
    conv = convgrad.conv2d if block is contextlib.nullcontext else F.conv2d
    x, w = operands()
    with block():
        first = step(conv, x, w, **DEPTHWISE)
        with calls_of_python() as seen:
            again = step(conv, x, w, **DEPTHWISE)
        assert not seen
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("odd", ["input", "weight", "grad_output", "expanded"])
def test_operands_that_must_be_copied_are_copied_without_python(odd, transposed, last):
    layout = torch.channels_last if last else torch.contiguous_format
    conv = F.conv_transpose2d if transposed else F.conv2d

    def part_of_more(t):
        """The same values, as a slice of a tensor with more channels: what the backward of a concatenation returns."""
        more = torch.cat([t, t], 1).contiguous(memory_format=layout)
        return more[:, t.shape[1] :].detach()

    x = torch.randn(4, 32, 12, 12).contiguous(memory_format=layout)
    w = torch.randn(32, 1, 3, 3).contiguous(memory_format=layout)  # depthwise: computed by our kernels on any processor
    g = (
        torch.ones(()).expand(4, 32, 12, 12)
        if odd == "expanded"
        else torch.randn(4, 32, 12, 12).to(memory_format=layout)
    )
    dense = [t.double().contiguous() for t in (x, w, g)]
    x, w, g = (part_of_more(t) if odd == name else t for name, t in (("input", x), ("weight", w), ("grad_output", g)))
    operands = x.requires_grad_(), w.requires_grad_(), torch.randn(32, requires_grad=True)

    def results(x, w, b, g):
        y = conv(x, w, b, padding=1, groups=32)
        return (y, *torch.autograd.grad(y, (x, w, b), g))

    wanted = results(dense[0].requires_grad_(), dense[1].requires_grad_(), operands[2].double(), dense[2])
    with convgrad.takeover():
        first = results(*operands, g)
        before = [t.clone() for t in (*operands, g)]
        with calls_of_python() as seen:
            again = results(*operands, g)
        assert not seen
    for a, b, c in zip(first, again, wanted, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        torch.testing.assert_close(b.double(), c, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, (*operands, g), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("odd", ["", "input", "weight", "mixed"])
def test_autocast_casts_in_the_table_as_pytorch_does(odd, groups, dtype):
    x, w = torch.randn(4, 32, 12, 12), torch.randn(32, 32 // groups, 3, 3)
    x = x.transpose(2, 3) if odd == "input" else x.to(dtype) if odd == "mixed" else x
    w = w.transpose(2, 3) if odd == "weight" else w
    x, w, b = x.requires_grad_(), w.requires_grad_(), torch.randn(32, requires_grad=True)
    g = torch.randn(4, 32, 12, 12).to(dtype)

    def results(conv):
        with torch.autocast("cpu", dtype):
            y = conv(x, w, b, padding=1, groups=groups)
            again = conv(x, w, b, padding=1, groups=groups)
        of_weight = [y.grad_fn.next_functions[1][0] for y in (y, again)]
        return of_weight, (y, *torch.autograd.grad(y, (x, w, b), g))

    results(convgrad.conv2d)
    with calls_of_python() as seen:
        (cast, again), ours = results(convgrad.conv2d)
    assert not seen
    assert cast is again or odd == "weight"  # a weight is cast once in a block; a view each time
    for a, b in zip(ours, results(F.conv2d)[1], strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.5 if a.shape == w.shape or a.dim() == 1 else 0.1)


def test_autocast_of_another_device_or_off_casts_nothing():
    x, w = operands()
    with (
        torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()),
        torch.autocast("cpu", enabled=False),
    ):
        assert convgrad.conv2d(x, w, **DEPTHWISE).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert convgrad.conv2d(x.double(), w.double(), **DEPTHWISE).dtype is torch.float64
            assert convgrad.conv2d(x, w, **DEPTHWISE).dtype is torch.bfloat16
        with torch.no_grad():
            convgrad.conv2d(x, w, **DEPTHWISE)
        assert convgrad.conv2d(x, w, **DEPTHWISE).requires_grad


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_table_repeats_what_python_computed(data):
    draw = data.draw
    d, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups = draw(st.sampled_from([1, 2, 4]))
    a, b = draw(st.sampled_from([1, 2, 5])), draw(st.sampled_from([1, 3]))
    kernel = [draw(st.integers(1, 3)) for _ in range(d)]
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    last = draw(st.booleans()) and d > 1
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[d] if last else torch.contiguous_format
    x = torch.randn(2, a * groups, *(draw(st.integers(4, 6)) for _ in range(d))).to(dtype, memory_format=layout)
    shape = (a * groups, b, *kernel) if transposed else (b * groups, a, *kernel)
    w = torch.randn(shape).to(dtype, memory_format=layout)
    bias = torch.randn(b * groups).to(dtype) if draw(st.booleans()) else None
    needs = [draw(st.booleans()), True, draw(st.booleans())]
    leaves = [t.requires_grad_(n) for t, n in zip((x, w, bias), needs, strict=True) if t is not None]
    conv = getattr(F, f"conv_transpose{d}d" if transposed else f"conv{d}d")
    options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 1)), "groups": groups}

    def all_of_it():
        y = conv(x, w, bias, **options)
        wanted = [t for t in leaves if t.requires_grad]
        return (y, *torch.autograd.grad(y, wanted, torch.ones_like(y)))

    stock = all_of_it()
    with convgrad.takeover():
        first, again = all_of_it(), all_of_it()
    conv = getattr(convgrad, conv.__name__)
    for found in (again, all_of_it(), all_of_it()):
        for one, other, pytorchs in zip(first, found, stock, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == pytorchs.stride()
            assert one.dtype == pytorchs.dtype


def test_a_plain_call_of_pytorch_stays_pytorchs():
    x, w = operands()
    step(convgrad.conv2d, x, w, **DEPTHWISE)
    before, size = stock_kernel(), table.size()
    y = F.conv2d(x, w, **DEPTHWISE)
    assert y.grad_fn.name() == "ConvolutionBackward0"
    with calls_of_python() as seen:
        torch.autograd.grad(y.sum(), (x, w))
    assert not seen
    assert table.size() == size
    assert stock_kernel() == before


# ---- when it is emptied, or passed over ---------------------------------------------------------------------


def test_it_is_emptied_with_the_cache():
    x, w = operands()
    step(convgrad.conv2d, x, w, **DEPTHWISE)
    assert table.size() > 0
    convgrad.set_default_backend("reference")
    try:
        assert table.size() == 0
        with Trace() as seen:
            convgrad.conv2d(x, w, **DEPTHWISE)
        assert [r.backend for r in seen] == ["reference"]
    finally:
        convgrad.set_default_backend(None)
    assert table.size() == 0


def test_it_is_emptied_where_measuring_begins_and_ends():
    x, w = operands(requires_grad=False)
    for _ in range(2):
        convgrad.conv2d(x, w, **DEPTHWISE)
    with convgrad.measure(False):
        assert table.size() == 0
        convgrad.conv2d(x, w, **DEPTHWISE)
        assert table.size() == 1
    assert table.size() == 0


def test_flags_and_threads_are_in_the_key():
    x, w = operands(requires_grad=False)
    convgrad.conv2d(x, w, **DEPTHWISE)
    for change, back in (
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
        (lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
         lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "none")),
    ):  # fmt: skip
        threads, size = torch.get_num_threads(), table.size()
        try:
            change()
            convgrad.conv2d(x, w, **DEPTHWISE)
            assert table.size() == size + 1
        finally:
            back()
            torch.set_num_threads(threads)


def test_a_request_is_heard_also_in_a_task_that_outlives_its_block():
    x, w = operands(requires_grad=False)
    convgrad.conv2d(x, w, **DEPTHWISE)
    heard = []

    async def later(go):
        await go.wait()
        with Trace() as seen:
            convgrad.conv2d(x, w, **DEPTHWISE)
        heard.extend(r.backend for r in seen)
        assert torch.allclose(convgrad.conv2d(x, w, **DEPTHWISE), F.conv2d(x, w, **DEPTHWISE), atol=1e-4)

    async def main():
        go = asyncio.Event()
        with convgrad.use_backend("reference"):
            task = asyncio.create_task(later(go))
        go.set()
        await task

    asyncio.run(main())
    assert heard == ["reference"]
    with calls_of_python() as seen, convgrad.takeover():
        F.conv2d(x, w, **DEPTHWISE)
    assert not seen  # nobody requests anything any more


def test_observers_and_profilers_see_what_is_in_the_table():
    x, w = operands()
    for conv, block in ((convgrad.conv2d, contextlib.nullcontext), (F.conv2d, convgrad.takeover)):
        with block():
            step(conv, x, w, **DEPTHWISE)
            with Trace() as seen:
                step(conv, x, w, **DEPTHWISE)
            assert [r.outputs for r in seen] == ["forward", "grad_input+grad_weight"]
            with torch.profiler.profile() as profile:
                step(conv, x, w, **DEPTHWISE)
        names = {e.name for e in profile.events()}
        assert {"convgrad::forward[native]", "convgrad::grad_input+grad_weight[native]"} <= names


def test_a_frozen_weight_keeps_no_large_input():
    x, w = torch.randn(2, 8, 256, 256, requires_grad=True), torch.randn(8, 1, 3, 3)
    for _ in range(3):
        z = x * 1
        y = convgrad.conv2d(z, w, **DEPTHWISE)
        alive = weakref.ref(z)
        del z
        assert alive() is None
        y.sum().backward()


# ---- errors --------------------------------------------------------------------------------------------


class Stop(BaseException):
    """Raised by a kernel."""


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, ValueError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_python_raises_keeps_its_type(error, where, monkeypatch):
    x, w = operands()
    with convgrad.takeover(), convgrad.use_backend("im2col"):
        y = F.conv2d(x, w, **DEPTHWISE)
        step(F.conv2d, x, w, **DEPTHWISE)

        def failing(self, problem, outputs):
            def kernel(*_):
                raise error("from a kernel")

            return kernel

        monkeypatch.setattr(type(backends()["im2col"]), "bind", failing)
        convgrad.engine.cache.invalidate()
        with pytest.raises(error, match="from a kernel"):
            F.conv2d(x, w, **DEPTHWISE) if where == "forward" else torch.autograd.grad(y.sum(), (x, w))
        monkeypatch.undo()
        convgrad.engine.cache.invalidate()
        assert torch.is_grad_enabled()
        step(F.conv2d, x, w, **DEPTHWISE)


def test_a_wrong_gradient_is_refused_before_a_kernel_runs():
    x, w = operands()
    arguments = ((1, 1), (1, 1), (1, 1), False, (0, 0), 8)
    for backward, more in (
        (torch.ops.aten.convolution_backward, (None,)), (torch.ops.aten.convolution_backward_overrideable, ()),
    ):  # fmt: skip
        with convgrad.takeover(), pytest.raises(convgrad.ShapeError, match="expected grad_output to have the shape"):
            backward(torch.ones(1, 8, 6, 6), x.detach(), w.detach(), *more, *arguments, (True, True, False))


def test_wrong_arguments_get_the_same_words_as_without_the_table():
    x, w = operands()
    convgrad.conv2d(x, w, groups=8)
    for arguments in (
        {"stride": True},
        {"padding": (1.0, 1)},
        {"groups": "8"},
        {"stride": (1, 1, 1)},
        {"groups": 3},
        {"groups": (8,)},
    ):
        errors = []
        for told in (0, 1):
            with contextlib.ExitStack() as stack:
                if told:
                    stack.enter_context(Trace())
                with pytest.raises((TypeError, RuntimeError)) as error:
                    convgrad.conv2d(x, w, **arguments)
                errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]
        assert "overrideable" not in errors[0][1]


def test_what_is_no_bool_is_not_taken_for_one():
    x, w = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    for transposed in (False, False, True, True):
        convgrad.convolution(x, w, None, 1, 0, 1, transposed)
    for value in (1, 0, None):
        with pytest.raises(TypeError, match="transposed is True or False"):
            convgrad.convolution(x, w, None, 1, 0, 1, value)


def test_pairs_of_equal_sides_are_stated_as_pytorch_states_them():
    """Its kernel would refuse pairs in C++, each time anew, which takes 100 times as long as a small call."""
    x, w = operands()
    convgrad.set_default_backend("aten")
    try:
        first = step(convgrad.conv2d, x, w, padding=((1, 1), (1, 1)), groups=8)
        with calls_of_python() as seen:
            again = step(convgrad.conv2d, x, w, padding=((1, 1), (1, 1)), groups=8)
        assert not seen
    finally:
        convgrad.set_default_backend(None)
    for a, b, c in zip(first, again, step(F.conv2d, x, w, **DEPTHWISE), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


# ---- derivatives ------------------------------------------------------------------------------------------


def test_a_backward_runs_under_the_request_of_its_forward():
    x, w = operands()
    for _ in range(2):
        y = convgrad.conv2d(x, w, **DEPTHWISE)
    with convgrad.use_backend("reference"), Trace() as seen:
        first = torch.autograd.grad(y.pow(2).sum(), (x, w), create_graph=True)
        torch.autograd.grad(sum(t.pow(2).sum() for t in first), (x, w))
        assert len(list(seen)) > 3
        assert not any(r.backend == "reference" for r in seen)
        y = convgrad.conv2d(x, w, **DEPTHWISE)
    with Trace() as seen:
        torch.autograd.grad(y.sum(), (x, w))
    assert {r.backend for r in seen} == {"reference"}


@pytest.mark.parametrize("transposed", [False, True])
def test_second_derivatives_take_as_many_calls_for_any_number_of_groups(transposed):
    counts = []
    for groups in (1, 64):
        x = torch.randn(1, 64, 5, 5, requires_grad=True)
        w = torch.randn(64, 64 // groups, 3, 3, requires_grad=True)
        conv = convgrad.conv_transpose2d if transposed else convgrad.conv2d
        with Trace() as seen:
            y = conv(x, w, groups=groups)
            first = torch.autograd.grad(y.pow(2).sum(), (x, w), create_graph=True)
            torch.autograd.grad(sum(t.pow(2).sum() for t in first), (x, w))
        counts.append(len(list(seen)))
    assert counts[0] == counts[1] < 12


def test_derivatives_of_every_order():
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 4, 4, 4), (4, 1, 2, 2)))
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def f(x, w, b):
        return convgrad.conv2d(x, w, b, 1, 1, 1, 4)

    assert f(x, w, b).grad_fn.name() == "ConvolutionOverrideableBackward0"
    assert torch.autograd.gradcheck(f, (x, w, b))
    assert torch.autograd.gradgradcheck(f, (x, w, b))

    def third(conv):
        y = conv(x, w, b, 1, 1, 1, 4)
        for _ in range(3):
            grads = torch.autograd.grad(y.pow(3).sum(), (x, w), create_graph=True)
            y = grads[0].pow(2).sum() + grads[1].pow(2).sum()
        return y.detach()

    torch.testing.assert_close(third(convgrad.conv2d), third(F.conv2d))


def test_a_compiled_backward_of_an_eager_forward():
    x, w = operands()
    y = convgrad.conv2d(x, w, **DEPTHWISE)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    torch.testing.assert_close((x.grad, w.grad), torch.autograd.grad(F.conv2d(x, w, **DEPTHWISE).sum(), (x, w)))


# ---- threads, forks, memory ---------------------------------------------------------------------------------


def test_eight_threads_while_blocks_close_and_the_table_is_emptied():
    x, w = operands()
    want = step(F.conv2d, x, w, **DEPTHWISE)
    wrong, ends = [], threading.Event()

    def work(conv):
        while not ends.is_set():
            got = step(conv, x, w, **DEPTHWISE)
            if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True)):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=(conv,)) for conv in (F.conv2d, convgrad.conv2d) * 4]
    for thread in threads:
        thread.start()
    for _ in range(40):
        with convgrad.takeover(), observe_aten():
            convgrad.engine.cache.invalidate()
        with observe_aten():
            pass
    ends.set()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on():
    x, w = operands(requires_grad=False)
    want = convgrad.conv2d(x, w, **DEPTHWISE)
    ends = threading.Event()
    busy = threading.Thread(target=lambda: [convgrad.conv2d(x, w, **DEPTHWISE) for _ in iter(ends.is_set, True)])
    busy.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                ok = torch.equal(convgrad.conv2d(x, w, **DEPTHWISE), want)
                convgrad.engine.cache.invalidate()
                ok = ok and torch.equal(convgrad.conv2d(x, w, **DEPTHWISE), want)
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ends.set()
        busy.join()


def test_no_call_keeps_a_tensor():
    x, w = operands()
    bias = torch.randn(8, requires_grad=True)
    for block in (contextlib.nullcontext, convgrad.takeover):
        conv = convgrad.conv2d if block is contextlib.nullcontext else F.conv2d
        with block():
            for _ in range(3):
                z = x * 1
                y = conv(z, w, bias, padding=1, groups=8)
                torch.autograd.grad(y.sum(), (z, w, bias))
                alive = [weakref.ref(t) for t in (y, z)]
                del y, z  # nor does a cycle, which would wait for the garbage collector
                assert not any(ref() for ref in alive)


def test_kernels_of_other_code_run_where_pytorchs_would():
    x, dense = torch.randn(1, 200, 5, 5), torch.randn(200, 200, 1, 1)
    called = []
    before = torch.library.get_kernel("aten::convolution", "CPU").call_boxed
    library = torch.library.Library("aten", "IMPL")

    def theirs(keyset, *arguments):
        called.append(arguments[0].shape)
        return before(keyset, *arguments)

    library.impl("convolution", theirs, "CPU", with_keyset=True)
    try:
        with convgrad.takeover():
            for _ in range(3):
                F.conv2d(x.to(torch.int64), dense.to(torch.int64))
        assert len(called) == 3
    finally:
        library._destroy()


def test_without_the_table_python_computes_every_call(monkeypatch):
    monkeypatch.setattr(pytorch_operators, "opened", lambda: None)
    before = stock_kernel()
    x, w = operands()
    want = step(F.conv2d, x, w, **DEPTHWISE)
    with Trace() as seen, convgrad.takeover():
        got = [step(F.conv2d, x, w, **DEPTHWISE) for _ in range(2)][1]
        with pytest.raises(RuntimeError, match="to have 3 channels, but got 8 channels instead"):
            F.conv2d(x, torch.ones(1, 3, 3, 3))
    assert [r.outputs for r in seen] == ["forward", "grad_input+grad_weight"] * 2
    torch.testing.assert_close(got, want)
    assert stock_kernel() == before
