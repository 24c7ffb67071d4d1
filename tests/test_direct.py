"""The old direct names: those of a CPU library run and are gradchecked, those of a GPU library are recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import convgrad
from convgrad import direct
from convgrad.engine.events import Event, observers
from convgrad.engine.registry import backends, unregister
from convgrad.settings import current
from tests.standins import Call, install


@pytest.fixture(autouse=True)
def _no_variants_left() -> Iterator[None]:
    """Backends that were registered for a set of flags go again."""
    yield
    for name in [n for n in backends() if "[" in n]:
        unregister(name)


@pytest.fixture
def ran() -> Iterator[list[Event]]:
    """Every call of a backend, as it happens."""
    events: list[Event] = []

    class Observer:
        synchronize = False

        def __call__(self, event: Event) -> None:
            events.append(event)

    observer = Observer()
    observers.append(observer)
    yield events
    observers.remove(observer)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers: sums of their products are exact in every dtype."""
    return torch.randint(-3, 4, shape).to(dtype).requires_grad_()


def gradients(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """The result, its gradients, and the gradients of a sum of squares of these."""
    result = function(*leaves)
    first = grad(result, leaves, leaf(*result.shape).to(result.dtype), create_graph=True)
    return [result, *first, *grad(sum(g.pow(2).sum() for g in first), leaves)]  # pyright: ignore[reportArgumentType]


def assert_same(mine: Callable[..., Tensor], stock: Callable[..., Tensor], *leaves: Tensor) -> None:
    """Values, first and second derivatives, of integers: not a bit may differ."""
    torch.manual_seed(1)
    got = gradients(mine, *leaves)
    torch.manual_seed(1)
    want = gradients(stock, *leaves)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


# ---- thnn and slow -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["thnn_conv2d", "slow_conv2d"])
@pytest.mark.parametrize(("stride", "padding"), [([1, 1], [0, 0]), ([2, 1], [1, 2]), (2, 0)])
def test_thnn_and_slow_are_gradchecked(name, stride, padding):
    function, backward = getattr(direct, name), getattr(direct, f"{name}_backward")
    x, w, b = leaf(2, 2, 5, 4), leaf(3, 2, 3, 2), leaf(3)
    call = partial(lambda x, w, b: function(x, w, [3, 2], b, stride, padding))
    assert gradcheck(call, (x, w, b), nondet_tol=0.0)
    assert gradgradcheck(call, (x, w, b), nondet_tol=0.0)
    g = leaf(*call(x, w, b).shape)
    empty = torch.empty(0)
    both = partial(lambda g, x, w: backward(g, x, w, [3, 2], stride, padding, empty, empty, [True, True, True]))
    assert gradcheck(both, (g, x, w), nondet_tol=0.0)
    assert gradgradcheck(both, (g, x, w), nondet_tol=0.0)


@pytest.mark.parametrize("name", ["thnn_conv2d", "slow_conv2d"])
def test_every_derivative_runs_on_pytorchs_own_kernels(name, ran):
    function = getattr(direct, name)
    x, w = leaf(2, 3, 6, 5, dtype=torch.float32), leaf(4, 3, 3, 3, dtype=torch.float32)
    assert_same(lambda x, w: function(x, w, 3, None, 1, 1), lambda x, w: F.conv2d(x, w, None, 1, 1), x, w)
    assert {e.backend for e in ran} == {"aten:native"}
    assert {o for e in ran for o in e.outputs} == {"forward", "grad_input", "grad_weight"}


def test_scratch_tensors_are_accepted_empty_or_not():
    x, w = leaf(2, 3, 6, 5), leaf(4, 3, 3, 3)
    output, finput, fgrad_input = direct.thnn_conv2d_forward(x, w, [3, 3], None, [1, 1], [1, 1])
    assert torch.equal(output, F.conv2d(x, w, padding=1))
    g = leaf(*output.shape)
    want = torch.ops.aten.convolution_backward(
        g, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    )
    columns = torch.full((2, 27, 30), float("nan"), dtype=torch.float64)
    for scratch in ((finput, fgrad_input), (columns, columns), (None, None)):
        for backward in (direct.thnn_conv2d_backward, direct.slow_conv2d_backward):
            got = backward(g, x, w, [3, 3], [1, 1], [1, 1], *scratch, [True, True, True])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    got = direct.slow_conv2d_backward(g, x, w, [3, 3], [1, 1], [1, 1], [False, True, False])  # today's order
    assert got[0] is None
    assert torch.equal(got[1], want[1])
    assert got[2] is None


def test_thnn_takes_a_matrix_of_weights_and_an_input_without_batch():
    x, w, b = leaf(3, 6, 5), leaf(4, 27), leaf(4)

    def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w.reshape(4, 3, 3, 3), b)

    assert torch.equal(direct.thnn_conv2d(x, w, [3, 3], b), stock(x, w, b))
    bias = b.detach()
    assert_same(lambda x, w: direct.thnn_conv2d(x, w, [3, 3], bias), lambda x, w: stock(x, w, bias), x, w)
    g = leaf(4, 4, 3)
    gi, gw, gb = direct.thnn_conv2d_backward(g, x, w, [3, 3], [1, 1], [0, 0])
    want = grad(stock(x, w, b), (x, w, b), g)
    assert all(torch.equal(a, b) for a, b in zip((gi, gw, gb), want, strict=True))


def test_a_kernel_size_that_is_not_the_weights_is_one_clear_error():
    with pytest.raises(convgrad.ShapeError, match=r"slow_conv2d: expected a weight .* with kernel_size=\[3, 2\]"):
        direct.slow_conv2d(leaf(1, 1, 4, 4), leaf(1, 1, 3, 3), [3, 2])


def test_something_else_in_a_tensors_place_is_one_clear_error():
    with pytest.raises(TypeError, match=r"direct.slow_conv2d: expected a Tensor, but got list"):
        direct.slow_conv2d([1.0], leaf(1, 1, 3, 3), 3)  # pyright: ignore[reportArgumentType]


def test_they_compose_with_vmap_and_forward_mode():
    x, w = leaf(5, 2, 3, 6, 5), leaf(4, 3, 3, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return direct.slow_conv2d(x, w, 3, None, 1, 1).pow(2).sum()

    each = torch.stack([grad(loss(w, v), w)[0] for v in x])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x), each)
    value, tangent = torch.func.jvp(lambda w: direct.slow_conv2d(x[0], w, 3, None, 2, 1), (w,), (w,))
    assert torch.equal(value, tangent)


# ---- oneDNN --------------------------------------------------------------------------------------


def through_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """A float64 function, for gradcheck: a convolution is linear in each operand, so integers stay exact."""

    def call(*leaves: Tensor) -> Any:
        result = function(*(t.float() for t in leaves))
        return result.double() if isinstance(result, Tensor) else tuple(r.double() for r in result)

    return call


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 4, 5, 4), (1, 4, 3, 4, 3)], ids=["1-D", "2-D", "3-D"])
def test_onednn_is_gradchecked(shape, groups, ran):
    d = len(shape) - 2
    x, w, b = leaf(*shape), leaf(2, 4 // groups, *(2,) * d), leaf(2)
    rest = ([1] * d, [2] + [1] * (d - 1), [1] * d, groups)
    call = through_float32(lambda x, w, b: direct.mkldnn_convolution(x, w, b, *rest))
    backward = through_float32(lambda g, x, w: direct.mkldnn_convolution_backward(x, g, w, *rest))
    g = leaf(*call(x, w, b).shape)
    exact = {"eps": 0.5, "atol": 0.0, "rtol": 1e-7, "nondet_tol": 0.0}
    assert gradcheck(call, (x, w, b), **exact)
    assert gradgradcheck(call, (x, w, b), leaf(*g.shape), **exact)
    assert gradcheck(backward, (g, x, w), **exact)
    assert {e.backend for e in ran} == {"aten:mkldnn"}


def test_onednns_single_gradients():
    x, w = leaf(2, 4, 6, 5, dtype=torch.float32), leaf(6, 2, 3, 3, dtype=torch.float32)
    rest = ([1, 1], [2, 1], [1, 1], 2)
    y = F.conv2d(x, w, None, [2, 1], [1, 1], [1, 1], 2)
    g = leaf(*y.shape, dtype=torch.float32)
    gi, gw = grad(y, (x, w), g)
    assert torch.equal(direct.mkldnn_convolution_backward_input(x.shape, g, w, *rest, True), gi)
    got, none = direct.mkldnn_convolution_backward_weights(w.shape, g, x, *rest, False)
    assert torch.equal(got, gw)
    assert none is None
    assert torch.equal(
        direct.mkldnn_convolution_backward_weights(w.shape, g, x, *rest, True)[1], g.detach().sum((0, 2, 3))
    )


def test_what_onednn_cannot_is_refused_with_what_is_there_instead():
    with pytest.raises(convgrad.BackendError, match=r"(?s)got torch.float64.*aten:native: can"):
        direct.mkldnn_convolution(leaf(1, 1, 3, 3), leaf(1, 1, 2, 2), None, 0, 1, 1, 1)


# ---- cuDNN and MIOpen: recorded ------------------------------------------------------------------

FLAGS = (False, True, False)  # benchmark, deterministic, allow_tf32
ARGUMENTS = ([1, 0], [2, 1], [1, 2])  # padding, stride, dilation: no two alike
STOCK = ([2, 1], [1, 0], [1, 2], False, [0, 0])
GROUPS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return install(monkeypatch)


def stock(x: Tensor, w: Tensor, groups: int = GROUPS, dilation: Any = (1, 2)) -> Tensor:
    return torch.convolution(x, w, None, [2, 1], [1, 0], dilation, False, [0, 0], groups)


def stock_transposed(x: Tensor, w: Tensor) -> Tensor:
    return torch.convolution(x, w, None, [2, 1], [1, 0], [1, 2], True, [1, 0], GROUPS)


def recorded(calls: list[Call], name: str, flags: tuple[bool, ...] = FLAGS) -> None:
    """Exactly one call, of this operator, with every argument in its place."""
    (call,) = calls
    assert call.name == name
    assert [call.arguments[f] for f in ("benchmark", "deterministic", "allow_tf32")[: len(flags)]] == list(flags)
    got = [list(call.arguments[a]) for a in ("padding", "stride", "dilation")]
    assert got == [list(a) for a in ARGUMENTS]
    assert call.arguments["groups"] == GROUPS
    calls.clear()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    x, w = leaf(2, 4, 7, 6), leaf(6, 2, 3, 2)
    return x, w, leaf(*stock(x, w).shape)


def test_cudnn_convolution_and_its_gradients(calls):
    x, w, g = operands()
    gi, gw = grad(stock(x, w), (x, w), g)
    rest = (*ARGUMENTS, GROUPS, *FLAGS)
    assert torch.equal(direct.cudnn_convolution(x, w, *rest), stock(x, w))
    recorded(calls, "cudnn_convolution")
    assert torch.equal(direct.cudnn_convolution_backward_input(x.shape, g, w, *rest), gi)
    recorded(calls, "cudnn_convolution_transpose")
    assert torch.equal(direct.cudnn_convolution_backward_weight(w.shape, g, x, *rest), gw)
    assert [c.name for c in calls] == ["cudnn_convolution"]  # in another role: with the flags of the call
    assert list(calls[0].arguments["stride"]) == ARGUMENTS[2]
    calls.clear()
    got = direct.cudnn_convolution_backward(x, g, w, *rest, [True, True])
    assert torch.equal(got[0], gi)
    assert torch.equal(got[1], gw)
    assert direct.cudnn_convolution_backward(x, g, w, *rest, [True, False])[1] is None
    three = direct.cudnn_convolution_backward(x, g, w, *rest, [False, False, True])
    assert torch.equal(three[2], g.sum((0, 2, 3)))


def test_a_bias_may_stand_third(calls):
    x, w, _ = operands()
    b = leaf(6)
    want = stock(x, w) + b.view(1, 6, 1, 1)
    assert torch.equal(direct.cudnn_convolution(x, w, b, *ARGUMENTS, GROUPS, False, True), want)
    assert torch.equal(direct.cudnn_convolution(x, w, None, *ARGUMENTS, GROUPS, False, True), stock(x, w))
    assert torch.equal(direct.cudnn_convolution(x, w, *ARGUMENTS, GROUPS, *FLAGS, bias=b), want)
    assert {c.name for c in calls} == {"cudnn_convolution"}


def test_cudnn_convolution_transpose_and_its_gradients(calls):
    x, w = leaf(2, 6, 4, 5), leaf(6, 2, 3, 2)
    y = stock_transposed(x, w)
    g = leaf(*y.shape)
    gi, gw = grad(y, (x, w), g)
    rest = (*ARGUMENTS, GROUPS, *FLAGS)
    with_op = (ARGUMENTS[0], [1, 0], *ARGUMENTS[1:], GROUPS, *FLAGS)
    assert torch.equal(direct.cudnn_convolution_transpose(x, w, *with_op), y)
    assert list(calls[0].arguments["output_padding"]) == [1, 0]
    recorded(calls, "cudnn_convolution_transpose")
    assert torch.equal(direct.cudnn_convolution_transpose_backward_input(g, w, *rest), gi)
    recorded(calls, "cudnn_convolution")
    assert torch.equal(direct.cudnn_convolution_transpose_backward_weight(w.shape, g, x, *rest), gw)
    got = direct.cudnn_convolution_transpose_backward(x, g, w, *with_op, [True, True])
    assert torch.equal(got[0], gi)
    assert torch.equal(got[1], gw)


def test_the_small_extension(calls):
    x, w, g = operands()
    gi, gw = grad(stock(x, w), (x, w), g)
    padding, stride, dilation = ARGUMENTS
    rest = (stride, padding, dilation, GROUPS, *FLAGS)
    assert torch.equal(direct.convolution(x, w, None, *rest), stock(x, w))
    recorded(calls, "cudnn_convolution")
    assert torch.equal(direct.convolution(x, w, *rest), stock(x, w))
    recorded(calls, "cudnn_convolution")
    assert torch.equal(direct.convolution_backward_input(x.shape, w, g, *rest), gi)
    recorded(calls, "cudnn_convolution_transpose")
    assert torch.equal(direct.convolution_backward_weight(x, w.shape, g, *rest), gw)


def test_the_small_extensions_transposed_twins(calls):
    x, w = leaf(2, 6, 4, 5), leaf(6, 2, 3, 2)
    y = stock_transposed(x, w)
    g = leaf(*y.shape)
    gi, gw = grad(y, (x, w), g)
    padding, stride, dilation = ARGUMENTS
    rest = (stride, padding, dilation, GROUPS, *FLAGS)
    got = direct.convolution_transpose(x, w, None, stride, padding, [1, 0], dilation, GROUPS, *FLAGS)
    assert torch.equal(got, y)
    recorded(calls, "cudnn_convolution_transpose")
    assert torch.equal(direct.convolution_transpose_backward_input(x.shape, w, g, *rest), gi)
    recorded(calls, "cudnn_convolution")
    assert torch.equal(direct.convolution_transpose_backward_weight(x, w.shape, g, *rest), gw)
    with pytest.raises(convgrad.ShapeError, match=r"input_size=\[2, 6, 4, 4\]"):
        direct.convolution_transpose_backward_input((2, 6, 4, 4), w, g, *rest)


def test_miopen_convolution_and_its_gradients(calls):
    x, w = leaf(2, 4, 7, 6), leaf(6, 4, 3, 2)
    y = stock(x, w, 1)
    b, g = leaf(6), leaf(*y.shape)
    gi, gw = grad(y, (x, w), g)
    rest = (*ARGUMENTS, 1, False, False)
    assert torch.equal(direct.miopen_convolution(x, w, b, *rest), y + b.view(1, 6, 1, 1))
    assert calls[0].arguments["bias"] is not None
    assert torch.equal(direct.miopen_convolution_backward_input(x.shape, g, w, *rest), gi)
    assert [c.name for c in calls] == ["miopen_convolution", "miopen_convolution_transpose"]
    for call in calls:
        got = [list(call.arguments[a]) for a in ("padding", "stride", "dilation")]
        assert got == [list(a) for a in ARGUMENTS]
        assert [call.arguments[f] for f in ("benchmark", "deterministic")] == [False, False]
    assert torch.equal(direct.miopen_convolution_backward_weight(w.shape, g, x, *rest), gw)
    got = direct.miopen_convolution_backward(x, g, w, *rest, [True, True, True])
    assert all(torch.equal(a, b) for a, b in zip(got, (gi, gw, g.sum((0, 2, 3))), strict=True))


def test_miopen_depthwise_convolution_and_its_gradients(calls):
    x, w = leaf(2, 3, 7, 6), leaf(6, 1, 3, 2)
    y = stock(x, w, 3, [1, 1])
    g = leaf(*y.shape)
    gi, gw = grad(y, (x, w), g)
    rest = ([1, 0], [2, 1], [1, 1], 3, True, False)
    assert torch.equal(direct.miopen_depthwise_convolution(x, w, None, *rest), y)
    assert [(c.name, c.arguments["benchmark"]) for c in calls] == [("miopen_depthwise_convolution", True)]
    assert torch.equal(direct.miopen_depthwise_convolution_backward_input(x.shape, g, w, *rest), gi)
    assert torch.equal(direct.miopen_depthwise_convolution_backward_weight(w.shape, g, x, *rest), gw)
    got = direct.miopen_depthwise_convolution_backward(x, g, w, *rest, [True, True, False])
    assert torch.equal(got[0], gi)
    assert torch.equal(got[1], gw)
    with pytest.raises(convgrad.ShapeError, match="expected a depthwise convolution"):
        direct.miopen_depthwise_convolution(x, leaf(6, 3, 3, 2), None, [1, 0], [2, 1], [1, 1], 1, True, False)


def test_miopen_convolution_transpose_and_its_gradients(calls):
    x, w, b = leaf(2, 6, 4, 5), leaf(6, 4, 3, 2), leaf(4)
    y = torch.convolution(x, w, b, [2, 1], [1, 0], [1, 2], True, [1, 0], 1)
    g = leaf(*y.shape)
    gi, gw, gb = grad(y, (x, w, b), g)
    rest = (*ARGUMENTS, 1, False, False)
    with_op = (ARGUMENTS[0], [1, 0], *ARGUMENTS[1:], 1, False, False)
    assert torch.equal(direct.miopen_convolution_transpose(x, w, b, *with_op), y)
    assert [c.name for c in calls] == ["miopen_convolution_transpose"]
    assert torch.equal(direct.miopen_convolution_transpose_backward_input(g, w, *rest), gi)
    assert torch.equal(direct.miopen_convolution_transpose_backward_weight(w.shape, g, x, *rest), gw)
    got = direct.miopen_convolution_transpose_backward(x, g, w, *with_op, [True, True, True])
    assert all(torch.equal(a, b) for a, b in zip(got, (gi, gw, gb), strict=True))


def test_flags_go_through_every_derivative_and_touch_no_global(calls, ran):
    before = current()
    x, w, _ = operands()
    assert_same(lambda x, w: direct.cudnn_convolution(x, w, *ARGUMENTS, GROUPS, *FLAGS), stock, x, w)
    assert current() == before
    assert {e.backend for e in ran} == {"aten:cudnn[benchmark=0,deterministic=1,allow_tf32=0]"}
    assert len(calls) == len(ran)
    for call in calls:
        assert [call.arguments[f] for f in ("benchmark", "deterministic", "allow_tf32")] == list(FLAGS)


def test_flags_of_one_call_are_not_those_of_another(calls):
    x, w, g = operands()
    y1 = direct.cudnn_convolution(x, w, *ARGUMENTS, GROUPS, True, False, True)
    y2 = direct.cudnn_convolution(x, w, *ARGUMENTS, GROUPS, False, True, False)
    calls.clear()

    def backward(y: Tensor) -> None:
        grad(y, x, g)

    for y, flags in ((y1, [True, False, True]), (y2, [False, True, False])):
        thread = threading.Thread(target=backward, args=(y,))
        thread.start()
        thread.join()
        (call,) = calls
        assert [call.arguments[f] for f in ("benchmark", "deterministic", "allow_tf32")] == flags
        calls.clear()


def test_flags_that_are_left_out_are_pytorchs(calls):
    x, w, _ = operands()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
        direct.cudnn_convolution(x, w, *ARGUMENTS, GROUPS)
        direct.cudnn_convolution(x, w, *ARGUMENTS, GROUPS, allow_tf32=True)
    got = [[c.arguments[f] for f in ("benchmark", "deterministic", "allow_tf32")] for c in calls]
    assert got == [[True, False, False], [True, False, True]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the errors where there is no GPU")
@pytest.mark.parametrize("name", [n for n in direct.__all__ if "thnn" not in n and "slow" not in n and "mkl" not in n])
def test_without_the_library_an_error_says_what_there_is(name):
    x, w = leaf(2, 2, 4, 4), leaf(2, 2, 3, 3)
    size, pair = [2, 2, 4, 4], [1, 1]
    if name.startswith("miopen_depthwise"):
        w, size = leaf(2, 1, 3, 3), [2, 1, 3, 3] if "weight" in name else size
    groups = w.shape[0] // w.shape[1]
    family = name.removesuffix("_backward").removesuffix("_input").removesuffix("_weight").removesuffix("_backward")
    op = [[0, 0]] if "transpose" in name and not name.endswith(("_input", "_weight")) else []
    rest = [pair, *op, pair, pair, groups, False, False]
    leading: list[Any] = [x, w]
    if name.endswith("_backward"):
        leading = [x, x, w]
    elif family in ("convolution", "convolution_transpose") and name != family:
        leading = [size, w, x] if name.endswith("_input") else [x, size, x]
    elif name.endswith("_input"):
        leading = [x, w] if "transpose" in name else [size, x, w]
    elif name.endswith("_weight"):
        leading = [size, x, x]
    elif name.startswith("miopen"):
        leading = [x, w, None]
    library = "AMD's MIOpen" if name.startswith("miopen") else "NVIDIA's cuDNN"
    with pytest.raises(convgrad.BackendError) as caught:
        getattr(direct, name)(*leading, *rest)
    message = str(caught.value)
    assert message.startswith(f"convgrad.direct.{name} is forced onto {library}, which is not here: ")
    assert "got cpu" in message
    assert "thnn_conv2d, slow_conv2d and mkldnn_convolution run on cpu" in message
    assert "aten, " in message
    assert not any("[" in n for n in backends())  # nothing is registered for a library that is not here


def test_direct_is_loaded_when_it_is_named():
    assert convgrad.direct is direct
    assert all(callable(getattr(direct, name)) for name in direct.__all__)
