"""The old direct names: those of a CPU library run and are gradchecked, those of a GPU library run on stand-ins."""

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import convgrad
from convgrad import direct, settings
from convgrad.diagnostics import Trace
from convgrad.diagnostics.aten_rules import kernel_of
from tests.standins import Call, install


@pytest.fixture
def ran() -> Iterator[Trace]:
    """Every call of a backend, as it happens."""
    with convgrad.trace() as trace:
        yield trace


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of operators of cuDNN and MIOpen, which compute on the CPU."""
    return install(monkeypatch)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small integers: sums of their products are exact in every dtype."""
    return torch.randint(-3, 4, shape).to(dtype).requires_grad_()


# ---- every name: its arguments, its results, its library --------------------------------------------

#: Arguments in the order of PyTorch 1.10: x input, w weight, b bias, y grad_output, X and W sizes of the first two;
#: padding, output_padding, stride, dilation, groups and kernel size by their initials; F the flags (f without
#: allow_tf32), m the mask, e an empty scratch tensor, B that there is a bias.
ORDER = {
    "cudnn_convolution": "x w p s d g F",
    "cudnn_convolution_backward": "x y w p s d g F m",
    "cudnn_convolution_backward_input": "X y w p s d g F",
    "cudnn_convolution_backward_weight": "W y x p s d g F",
    "cudnn_convolution_transpose": "x w p o s d g F",
    "cudnn_convolution_transpose_backward": "x y w p o s d g F m",
    "cudnn_convolution_transpose_backward_input": "y w p s d g F",
    "cudnn_convolution_transpose_backward_weight": "W y x p s d g F",
    "miopen_convolution": "x w b p s d g f",
    "miopen_convolution_backward": "x y w p s d g f m",
    "miopen_convolution_backward_input": "X y w p s d g f",
    "miopen_convolution_backward_weight": "W y x p s d g f",
    "miopen_convolution_transpose": "x w b p o s d g f",
    "miopen_convolution_transpose_backward": "x y w p o s d g f m",
    "miopen_convolution_transpose_backward_input": "y w p s d g f",
    "miopen_convolution_transpose_backward_weight": "W y x p s d g f",
    "mkldnn_convolution": "x w b p s d g",
    "mkldnn_convolution_backward": "x y w p s d g m",
    "mkldnn_convolution_backward_input": "X y w p s d g B",
    "mkldnn_convolution_backward_weights": "W y x p s d g B",
    "thnn_conv2d": "x w k b s p",
    "thnn_conv2d_forward": "x w k b s p",
    "thnn_conv2d_backward": "y x w k s p e e m",
    "convolution": "x w s p d g F",
    "convolution_backward_input": "X w y s p d g F",
    "convolution_backward_weight": "x W y s p d g F",
    "convolution_transpose": "x w s p o d g F",
    "convolution_transpose_backward_input": "X w y s p d g F",
    "convolution_transpose_backward_weight": "x W y s p d g F",
}
#: Of the names on the left, those on the right take the same: another name of the kernel, and another kernel.
SAME = {"thnn": "slow", "miopen": "miopen_depthwise"}
ORDER |= {n.replace(a, b): ORDER[n] for a, b in SAME.items() for n in ORDER if a in n and "transpose" not in n}
FLAGS = ("benchmark", "deterministic", "allow_tf32")
GPU = [name for name, order in ORDER.items() if "F" in order or "f" in order]


def case_of(name: str, flags: tuple[bool, ...] = (False, True, False)) -> tuple[list[Any], tuple[Any, ...]]:
    """The arguments of a function, no two alike, and its results by PyTorch's autograd."""
    transposed, undilated = "transpose" in name, "conv2d" in name or "depthwise" in name
    groups = 3 if "depthwise" in name else 1 if "conv2d" in name or "miopen" in name else 2
    dtype = torch.float32 if "mkldnn" in name else torch.float64
    w = leaf(6, 1 if groups == 3 else 2, 3, 2, dtype=dtype)
    x = leaf(2, 6 if transposed else w.shape[1] * groups, 7, 6, dtype=dtype)
    p, s, d, op = [1, 0], [2, 1], [1, 1] if undilated else [1, 2], [1, 0] if transposed else [0, 0]
    out = torch.convolution(x, w, None, s, p, d, transposed, op, groups)
    y, b = leaf(*out.shape, dtype=dtype), leaf(out.shape[1], dtype=dtype)
    mask = [True, True] if "F" in ORDER[name] else [True, True, True]
    gi, gw = grad(out, (x, w), y)
    gb = y.sum((0, 2, 3))
    values = {
        "x": x, "w": w, "b": b, "y": y, "X": x.shape, "W": w.shape, "p": p, "o": op, "s": s, "d": d, "g": groups,
        "k": [3, 2], "m": mask, "B": True, "e": torch.empty(0),
    }  # fmt: skip
    arguments: list[Any] = []
    for letter in ORDER[name].split():
        arguments += flags if letter == "F" else flags[:2] if letter == "f" else [values[letter]]
    if name.endswith("_backward"):
        return arguments, (gi, gw, gb)[: len(mask)]
    if name.endswith("_input"):
        return arguments, (gi,)
    if name.endswith(("_weight", "_weights")):
        return arguments, (gw, gb) if name.endswith("s") else (gw,)
    out = out + b.view(1, -1, 1, 1) if "b" in ORDER[name].split() else out
    return arguments, (out, torch.empty(0), torch.empty(0)) if name.endswith("_forward") else (out,)


def test_the_table_has_every_name():
    assert convgrad.direct is direct
    assert set(direct.__all__) == set(ORDER)


@pytest.mark.parametrize("flags", [(True, False, False), (False, True, False)])
@pytest.mark.parametrize("name", ORDER)
def test_results_are_pytorchs_and_come_from_the_library_with_all_arguments(name, flags, calls, ran):
    arguments, want = case_of(name, flags)
    if flags[1] and name.endswith(("depthwise_convolution_backward", "depthwise_convolution_backward_weight")):
        with pytest.raises(convgrad.BackendError, match="grouped and strided"):
            getattr(direct, name)(*arguments)
        return
    got = getattr(direct, name)(*arguments)
    got = got if isinstance(got, tuple) else (got,)
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    first = name.split("_")[0]
    library = {"convolution": "cudnn", "thnn": "native", "slow": "native"}.get(first, first)
    assert {e.backend.split("[")[0] for e in ran} == {f"aten:{library}"}
    assert bool(calls) == (name in GPU)
    for call in calls:
        assert [call.arguments[f] for f in FLAGS if f in call.arguments] == [*flags[: 2 if library == "miopen" else 3]]
    if name in GPU and not name.endswith(("_backward", "_weight")):  # a weight's gradient is a forward in another role
        (call,) = calls
        adjoint = ("transpose" in name) != name.endswith("_input")
        kind = "depthwise_convolution" if name == "miopen_depthwise_convolution" else "convolution"
        assert call.name == f"{library}_{kind}" + ("_transpose" if adjoint else "")
        given = dict(zip(ORDER[name].split(), arguments, strict=False))
        assert [given[letter] for letter in "psd"] == [[*call.arguments[a]] for a in ("padding", "stride", "dilation")]
        assert given["g"] == call.arguments["groups"]
        assert given.get("b") is call.arguments.get("bias")


@pytest.mark.parametrize("name", ORDER)
def test_help_shows_every_argument(name):
    function = getattr(direct, name)
    parameters = inspect.signature(function).parameters
    assert (function.__name__, function.__module__) == (name, "convgrad.direct")
    assert all(p.kind is not p.VAR_POSITIONAL and p.annotation is not p.empty for p in parameters.values())
    flags = len(parameters.keys() & {*FLAGS})
    given = len(ORDER[name].split()) - bool(flags) + flags
    assert len([p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]) == given
    assert ": `convgrad." in function.__doc__
    with pytest.raises(TypeError, match=rf"{name}\(\) missing"):
        function()


@pytest.mark.parametrize("name", [n for n in ORDER if not n.startswith("convolution")])
def test_what_atens_rules_know_of_a_name_is_its_own_kernel(name):
    kernel = kernel_of(name)
    assert name.removesuffix("_forward").split("_backward")[0] in (kernel.forward, *kernel.old_names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the errors where there is no GPU")
@pytest.mark.parametrize("name", GPU)
def test_without_the_library_an_error_says_what_there_is(name):
    arguments, _ = case_of(name)
    with pytest.raises(convgrad.BackendError) as caught:
        getattr(direct, name)(*arguments)
    message = str(caught.value)
    library = "AMD's MIOpen" if name.startswith("miopen") else "NVIDIA's cuDNN"
    assert message.startswith(f"convgrad.direct.{name} is forced onto {library}: ")
    assert "got cpu" in message
    assert "these can: aten, " in message


def input_of_another_size(size, *rest):
    return direct.convolution_transpose_backward_input((*size[:3], 9), *rest)


REFUSED = {
    r"(?s)^convgrad.direct.mkldnn.*got torch.float64.*these can: .*aten:native": lambda: direct.mkldnn_convolution(
        leaf(1, 1, 3, 3), leaf(1, 1, 2, 2), None, 0, 1, 1, 1
    ),
    "direct.slow_conv2d: expected a Tensor, but got list": lambda: direct.slow_conv2d([1.0], leaf(1, 1, 3, 3), 3),
    "kernel_size is an integer or a tuple of 2 integers, got None": lambda: direct.thnn_conv2d(
        leaf(1, 1, 4, 4), leaf(1, 1, 3, 3), None
    ),
    r"slow_conv2d: expected a weight .* with kernel_size=\[3, 2\]": lambda: direct.slow_conv2d(
        leaf(1, 1, 4, 4), leaf(1, 1, 3, 3), [3, 2]
    ),
    "expected grad_output to have the shape of the output": lambda: input_of_another_size(
        *case_of("convolution_transpose_backward_input")[0]
    ),
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.usefixtures("calls")
def test_what_is_refused(words):
    with pytest.raises((convgrad.BackendError, convgrad.ShapeError, TypeError), match=words):
        REFUSED[words]()


# ---- derivatives -------------------------------------------------------------------------------------


def gradients(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """The result, its gradients, and the gradients of a sum of squares of these."""
    result = function(*leaves)
    first = grad(result, leaves, leaf(*result.shape).to(result.dtype), create_graph=True)
    return [result, *first, *grad(sum(g.pow(2).sum() for g in first), leaves)]


def assert_same(mine: Callable[..., Tensor], stock: Callable[..., Tensor], *leaves: Tensor) -> None:
    """Values, first and second derivatives, of integers: not a bit may differ."""
    torch.manual_seed(1)
    got = gradients(mine, *leaves)
    torch.manual_seed(1)
    want = gradients(stock, *leaves)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize(("name", "stride", "padding"), [("slow_conv2d", [2, 1], [1, 2]), ("thnn_conv2d", 2, 0)])
def test_thnn_and_slow_are_gradchecked_on_pytorchs_own_kernels(name, stride, padding, ran):
    function, backward = getattr(direct, name), getattr(direct, f"{name}_backward")
    x, w, b = leaf(2, 2, 4, 3), leaf(3, 2, 3, 2), leaf(3)

    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return function(x, w, [3, 2], b, stride, padding)

    def both(g: Tensor, x: Tensor, w: Tensor) -> Any:
        return backward(g, x, w, [3, 2], stride, padding, None, None, [True, True, True])

    g = leaf(*call(x, w, b).shape)
    for check in (gradcheck, gradgradcheck):
        assert check(call, (x, w, b), nondet_tol=0.0, fast_mode=True)
        assert check(both, (g, x, w), nondet_tol=0.0, fast_mode=True)
    assert {e.backend for e in ran} == {"aten:native"}
    assert {o for e in ran for o in e.outputs.split("+")} == {"forward", "grad_input", "grad_weight"}


def test_a_kernel_size_is_any_integer():
    x, w = leaf(1, 2, 4, 4), leaf(3, 2, 3, 3)
    want = direct.slow_conv2d(x, w, 3)
    assert torch.equal(direct.slow_conv2d(x, w, np.int64(3)), want)
    assert torch.equal(direct.slow_conv2d(x, w, [np.int64(3)]), want)
    with pytest.raises(TypeError, match=r"kernel_size is an integer .* got 3\.0"):
        direct.slow_conv2d(x, w, 3.0)


def test_they_compose_with_vmap_and_forward_mode():
    x, w = leaf(5, 2, 3, 6, 5), leaf(4, 3, 3, 3)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return direct.slow_conv2d(x, w, 3, None, 1, 1).pow(2).sum()

    each = torch.stack([grad(loss(w, v), w)[0] for v in x])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x), each)
    value, tangent = torch.func.jvp(lambda w: direct.slow_conv2d(x[0], w, 3, None, 2, 1), (w,), (w,))
    assert torch.equal(value, tangent)


def through_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """A float64 function, for gradcheck: a convolution is linear in each operand, so integers stay exact."""

    def call(*leaves: Tensor) -> Any:
        result = function(*(t.float() for t in leaves))
        return result.double() if isinstance(result, Tensor) else tuple(r.double() for r in result)

    return call


@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 4, 5), 2), ((2, 2, 4, 3), 1), ((1, 2, 2, 3, 3), 2)], ids=["1-D", "2-D", "3-D"]
)
def test_onednn_is_gradchecked(shape, groups, ran):
    d = len(shape) - 2
    x, w, b = leaf(*shape), leaf(2, shape[1] // groups, *(2,) * d), leaf(2)
    rest = ([1] * d, [2] + [1] * (d - 1), [1] * d, groups)
    call = through_float32(lambda x, w, b: direct.mkldnn_convolution(x, w, b, *rest))
    backward = through_float32(lambda g, x, w: direct.mkldnn_convolution_backward(x, g, w, *rest))
    g = leaf(*call(x, w, b).shape)
    exact = {"eps": 0.5, "atol": 0.0, "rtol": 1e-7, "nondet_tol": 0.0}
    assert gradcheck(call, (x, w, b), **exact)
    assert gradgradcheck(call, (x, w, b), leaf(*g.shape), **exact)
    assert gradcheck(backward, (g, x, w), **exact)
    assert {e.backend for e in ran} == {"aten:mkldnn"}


# ---- peculiarities -----------------------------------------------------------------------------------


def test_scratch_tensors_are_not_read_and_the_mask_may_stand_in_their_place():
    arguments, want = case_of("slow_conv2d_backward")
    first, mask = arguments[:6], [False, True, True]
    columns = torch.full((2, 12, 35), float("nan"), dtype=torch.float64)
    for rest in ((columns, columns, mask), (None, None, mask), (mask,)):
        for backward in (direct.thnn_conv2d_backward, direct.slow_conv2d_backward):
            got = backward(*first, *rest)
            assert got[0] is None
            assert torch.equal(got[1], want[1])
            assert torch.equal(got[2], want[2])


def test_thnn_takes_a_matrix_of_weights_and_an_input_without_batch():
    x, w, b = leaf(3, 6, 5), leaf(4, 27), leaf(4)

    def stock(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.conv2d(x, w.reshape(4, 3, 3, 3), b)

    assert torch.equal(direct.thnn_conv2d(x, w, [3, 3], b), stock(x, w, b))
    bias = b.detach()
    assert_same(lambda x, w: direct.thnn_conv2d(x, w, [3, 3], bias), lambda x, w: stock(x, w, bias), x, w)
    g = leaf(4, 4, 3)
    got = direct.thnn_conv2d_backward(g, x, w, [3, 3], [1, 1], [0, 0])
    want = grad(stock(x, w, b), (x, w, b), g)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_onednns_bias_may_be_undefined():
    (*arguments, _), (want, _) = case_of("mkldnn_convolution_backward_weights")
    got, none = direct.mkldnn_convolution_backward_weights(*arguments)
    assert torch.equal(got, want)
    assert none is None


@pytest.mark.parametrize("name", ["cudnn_convolution", "convolution", "cudnn_convolution_transpose"])
def test_a_bias_may_stand_third(name, calls):
    function, ((x, w, *rest), (without,)) = getattr(direct, name), case_of(name)
    b = leaf(without.shape[1])
    want = without + b.view(1, -1, 1, 1)
    assert torch.equal(function(x, w, b, *rest), want)
    assert torch.equal(function(x, w, *rest, bias=b), want)
    assert torch.equal(function(x, w, None, *rest), without)
    with pytest.raises(TypeError, match="bias"):
        function(x, w, b, *rest, bias=b)


def test_a_mask_says_which_gradients_and_has_two_or_three_entries(calls):
    (*arguments, _), (gi, _) = case_of("cudnn_convolution_backward")
    got = direct.cudnn_convolution_backward(*arguments, [True, False, True])
    assert torch.equal(got[0], gi)
    assert got[1] is None
    assert torch.equal(got[2], arguments[1].sum((0, 2, 3)))
    with pytest.raises(convgrad.ShapeError, match="2 or 3 entries"):
        direct.cudnn_convolution_backward(*arguments, [True])


@pytest.mark.parametrize("name", [n for n in ORDER if "depthwise" in n])
def test_what_is_not_depthwise_is_refused(name, calls):
    arguments, _ = case_of(name)
    arguments[ORDER[name].split().index("g")] = 1
    with pytest.raises(convgrad.ShapeError, match=f"{name}: expected a depthwise convolution"):
        getattr(direct, name)(*arguments)


# ---- flags -------------------------------------------------------------------------------------------


def flags_of(call: Call) -> list[bool]:
    return [call.arguments[flag] for flag in FLAGS]


def test_flags_go_through_every_derivative_and_touch_no_global(calls, ran):
    on_a_gpu = torch.empty(0, device="meta")  # anything but a CPU
    before = settings.flags(on_a_gpu)
    (x, w, *rest), _ = case_of("cudnn_convolution")
    form = ([2, 1], [1, 0], [1, 2], False, [0, 0], 2)
    stock = lambda x, w: torch.convolution(x, w, None, *form)  # noqa: E731
    assert_same(lambda x, w: direct.cudnn_convolution(x, w, *rest), stock, x, w)
    assert settings.flags(on_a_gpu) == before
    assert {e.backend for e in ran} == {"aten:cudnn[benchmark=0,deterministic=1,allow_tf32=0]"}
    assert len(calls) == len(ran)
    assert all(flags_of(call) == [False, True, False] for call in calls)


def test_flags_of_one_call_are_not_those_of_another(calls):
    (x, w, *rest), _ = case_of("cudnn_convolution")
    flags = ([True, False, True], [False, True, False])
    results = [direct.cudnn_convolution(x, w, *rest[:4], *f) for f in flags]
    calls.clear()
    for y, f in zip(results, flags, strict=True):
        thread = threading.Thread(target=lambda y=y: grad(y.sum(), x))
        thread.start()
        thread.join()
        assert [flags_of(call) for call in calls] == [f]
        calls.clear()


def test_flags_that_are_left_out_are_pytorchs(calls):
    (x, w, *rest), _ = case_of("cudnn_convolution")
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
        direct.cudnn_convolution(x, w, *rest[:4])
        direct.cudnn_convolution(x, w, *rest[:4], allow_tf32=True)
    assert [flags_of(call) for call in calls] == [[True, False, False], [True, False, True]]
