"""The functions against PyTorch's: all samples and all errors of its own OpInfos, gradients by torch.nn.grad."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.samples import op_info
from torch import Tensor

import convgrad
from convgrad.engine import get_backend
from convgrad.problem import PASSES, ConvProblem

NAMES = [f"{kind}{d}d" for kind in ("conv", "conv_transpose") for d in (1, 2, 3)]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64)


def rounding(like: torch.Tensor) -> dict[str, float]:
    """Both sides round: ours once from a float32 sum, PyTorch's 16-bit kernels also in between, at the sum's size."""
    if like.dtype not in (torch.bfloat16, torch.float16, torch.float32) or like.numel() == 0:
        return {}
    size = 4 * torch.finfo(like.dtype).eps * float(like.detach().abs().max())
    # An element that cancels is off by what the large ones are: torch's own tolerance knows only the element.
    return {"rtol": 1.3e-6, "atol": max(1e-5, size)} if like.dtype == torch.float32 else {"rtol": 0.0, "atol": size}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_sample_of_pytorch(name: str, dtype: torch.dtype) -> None:
    if dtype not in op_info(name).dtypes:
        pytest.skip("PyTorch has no samples of this dtype")
    ours, theirs = getattr(convgrad, name), getattr(F, name)
    for s in op_info(name).sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")
            want = theirs(s.input, *s.args, **s.kwargs)
        with convgrad.trace() as ran:
            got = ours(s.input, *s.args, **s.kwargs)
        problems = {ConvProblem.parse(r.problem) for r in ran.records}
        if any(get_backend("aten").wrong_here(p, PASSES, torch.device("cpu"))[0] for p in problems):
            continue  # 3-D bfloat16 on a processor with AMX
        with convgrad.use_backend("aten"):
            exact = {} if dtype.is_complex else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(ours(s.input, *s.args, **s.kwargs), want, **exact)
        torch.testing.assert_close(got, want, **rounding(want))
        assert got.stride() == want.stride()
        if want.requires_grad:
            moved = [t for t in (s.input, *s.args) if isinstance(t, torch.Tensor) and t.requires_grad]
            g = torch.randn_like(want)
            for a, b in zip(torch.autograd.grad(got, moved, g), torch.autograd.grad(want, moved, g), strict=True):
                near = rounding(b)
                if "atol" in near and b.ndim == 1:  # a bias: a long sum that cancels is off by what was added up
                    total = float(g.abs().sum()) / b.numel()
                    near["atol"] = max(near["atol"], torch.finfo(b.dtype).eps * total)
                torch.testing.assert_close(a, b, **near)


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_every_error_of_pytorch(name: str) -> None:
    found, d = 0, int(name[4])
    for e in op_info(name).error_inputs("cpu"):
        s = e.sample_input
        call, args, options = getattr(convgrad, name), s.args, s.kwargs
        if e.error_regex == "negative padding is not supported":  # the functions crop; the operator is as ATen's
            call, options = torch.ops.convgrad.convolution, {}
            args = (s.args[0], None, [1] * d, [-1] * d, [1] * d, False, [0] * d, 1)
        with pytest.raises(e.error_type, match=e.error_regex):
            call(s.input, *args, **options)
        found += 1
    assert found >= 10


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_pytorchs(name: str) -> None:
    """Positional arguments mean the same: each gets a value that only its own meaning accepts."""
    d = int(name[-2])
    x, w, b = torch.randn(2, 4, *[9] * d), torch.randn(4, 2, *[3] * d), torch.randn(4)
    args = (3, 2, 2, 2, 4) if "transpose" in name else (3, 2, 2, 2)
    torch.testing.assert_close(getattr(convgrad, name)(x, w, b, *args), getattr(F, name)(x, w, b, *args))


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_have_the_signatures_of_torch_nn_grad(d: int, groups: int) -> None:
    x, w = torch.randn(2, 4, *[7] * d).double(), torch.randn(4, 4 // groups, *[3] * d).double()
    g = torch.randn_like(getattr(F, f"conv{d}d")(x, w, None, 2, 1, 1, groups))
    args = (g, 2, 1, 1, groups)
    want = getattr(torch.nn.grad, f"conv{d}d_input")(x.shape, w, *args)
    torch.testing.assert_close(getattr(convgrad, f"conv{d}d_input")(x.shape, w, *args), want)
    want = getattr(torch.nn.grad, f"conv{d}d_weight")(x, w.shape, *args)
    torch.testing.assert_close(getattr(convgrad, f"conv{d}d_weight")(x, w.shape, *args), want)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_gradients_without_a_batch(d: int) -> None:
    x, w = torch.randn(4, *[7] * d).double().requires_grad_(), torch.randn(6, 2, *[3] * d).double().requires_grad_()
    y = getattr(F, f"conv{d}d")(x, w, stride=2, groups=2)
    g = torch.randn_like(y)
    options = {"stride": 2, "groups": 2}
    got = convgrad.grad_input(x.shape, w, g, **options), convgrad.grad_weight(x, w.shape, g, **options)
    torch.testing.assert_close(got, torch.autograd.grad(y, (x, w), g))


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_transposed_convolution_whose_result_has_size_zero(d: int, dtype: torch.dtype) -> None:
    """PyTorch returns an empty one for an empty batch; a full one it refuses, but for oneDNN's kernels."""
    x = torch.ones(0, 4, *[1] * d, dtype=dtype, requires_grad=True)
    w, bias = torch.ones(4, 3, *[2] * d, dtype=dtype, requires_grad=True), torch.ones(6, dtype=dtype).requires_grad_()
    results = [getattr(m, f"conv_transpose{d}d")(x, w, bias, padding=1, groups=2) for m in (F, convgrad)]
    found, expected = ([y, *torch.autograd.grad(y.sum(), (x, w, bias))] for y in results)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    full = torch.ones(2, *x.shape[1:], dtype=dtype, requires_grad=True)
    with pytest.raises(convgrad.ShapeError, match="Output size is too small"):
        getattr(convgrad, f"conv_transpose{d}d")(full, w, bias, padding=1, groups=2)
    with pytest.raises(convgrad.ShapeError, match="Output size is too small"):
        convgrad.grad_weight(full, w.shape, full.new_empty(2, 6, *[0] * d), 1, 1, transposed=True, groups=2)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("output_padding", [0, 1, 2])
def test_gradients_of_a_transposed_convolution_find_its_output_padding(
    d: int, dilation: int, output_padding: int
) -> None:
    """Both sizes are given, and determine it."""
    x = torch.randn(2, 4, *[3] * d).double().requires_grad_()
    w = torch.randn(4, 3, *[2] * d).double().requires_grad_()
    y = getattr(F, f"conv_transpose{d}d")(x, w, None, 3, 1, output_padding, 2, dilation)
    g, sizes = torch.randn_like(y), (x.shape, w.shape)
    want, form = torch.autograd.grad(y, (x, w), g), {"stride": 3, "padding": 1, "dilation": dilation, "groups": 2}
    x, w = x.detach(), w.detach()
    options: Any = {**form, "transposed": True}
    torch.testing.assert_close(convgrad.grad_input(sizes[0], w, g, **options), want[0])
    torch.testing.assert_close(convgrad.grad_input(sizes[0][1:], w, g[0], **options), want[0][0])
    torch.testing.assert_close(convgrad.grad_weight(x, sizes[1], g, **options), want[1])
    torch.testing.assert_close(convgrad.convolution_backward(g, x, w, None, **options)[:2], want)
    torch.testing.assert_close(getattr(convgrad, f"conv_transpose{d}d_input")(sizes[0], w, g, **form), want[0])
    torch.testing.assert_close(getattr(convgrad, f"conv_transpose{d}d_weight")(x, sizes[1], g, **form), want[1])
    each = convgrad.grad_weight(x, sizes[1], g, **options, per_sample=True)
    torch.testing.assert_close(each.sum(0), want[1])
    torch.testing.assert_close(convgrad.per_sample_norms(x, sizes[1], g, **options), each.flatten(1).norm(dim=1))
    with pytest.raises(convgrad.ShapeError, match="expected grad_output to have the shape of the output"):
        convgrad.grad_weight(x, sizes[1], F.pad(g, [0, 3] * d), **options)
    with pytest.raises(convgrad.ShapeError, match="expected grad_output to have the shape of the output"):
        convgrad.grad_weight(x, sizes[1], g, **options, output_padding=1 if output_padding == 2 else 2)


@settings(max_examples=60)
@given(
    d=st.integers(1, 3), low=st.integers(-1, 2), high=st.integers(-1, 3), k=st.integers(1, 3), stride=st.integers(1, 2)
)
def test_one_sided_padding_is_a_pad_in_front(d: int, low: int, high: int, k: int, stride: int) -> None:
    x, w = torch.randn(1, 2, *[5] * d).double(), torch.randn(3, 2, *[k] * d).double()
    x.requires_grad_()
    w.requires_grad_()
    got = convgrad.convolution(x, w, None, stride, [low, high] * d)
    padded = F.pad(x, [low, high] * d)
    want = getattr(F, f"conv{d}d")(padded, w, None, stride)
    torch.testing.assert_close(got, want)
    g = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, (x, w), g), torch.autograd.grad(want, (x, w), g))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("k", "dilation"), [(2, 1), (3, 2), (4, 3)])
def test_string_padding(padding: str, k: int, dilation: int) -> None:
    x, w = torch.randn(2, 3, 11, 12), torch.randn(4, 3, k, k)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")
        want = F.conv2d(x, w, padding=padding, dilation=dilation)
    torch.testing.assert_close(convgrad.conv2d(x, w, padding=padding, dilation=dilation), want)
    grad = convgrad.conv2d_input(x.shape, w, torch.ones_like(want), padding=padding, dilation=dilation)
    y = convgrad.conv2d(x.requires_grad_(), w, padding=padding, dilation=dilation)
    torch.testing.assert_close(grad, torch.autograd.grad(y.sum(), x)[0])


Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TRACED: dict[str, Call] = {
    "grad_input": lambda x, w, g: convgrad.grad_input(x.shape, w, g, groups=4),
    "grad_weight": lambda x, w, g: convgrad.grad_weight(x, w.shape, g, groups=4),
    "conv2d_input": lambda x, w, g: convgrad.conv2d_input(x.shape, w, g, groups=4),
    "conv_transpose2d_weight": lambda x, w, g: convgrad.conv_transpose2d_weight(g, w.shape, x, groups=4),
    "grad_bias": lambda x, w, g: convgrad.grad_bias(g),
    "same": lambda x, w, g: convgrad.conv2d(x, w[..., :2], groups=4, padding="same"),
}


#: The sizes of a gradient are constants of the trace; those of a weight are without a warning.
_WARNS = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")


@pytest.mark.parametrize("name", ["same", *(pytest.param(name, marks=_WARNS) for name in TRACED if name != "same")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_of_jit_hold_operators(name: str) -> None:
    operands = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3), torch.randn(2, 4, 4, 4)
    traced = torch.jit.trace(TRACED[name], operands)
    other = [2 * t for t in operands]
    torch.testing.assert_close(traced(*other), TRACED[name](*other))


def test_gradients_are_traced_as_calls() -> None:
    x, w, g = torch.randn(2, 4, 6, 6), torch.randn(4, 1, 3, 3), torch.randn(2, 4, 4, 4)

    def every(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        alone = convgrad.grad_input(x.shape, w, g, groups=4), convgrad.grad_weight(x, w.shape, g, groups=4)
        more = convgrad.feedback_convolution(x, w, 2 * w, groups=4), convgrad.per_sample_norms(x, w.shape, g, groups=4)
        both = convgrad.convolution(x, w, groups=4), convgrad.convolution_backward(g, x, w, groups=4)[1]
        return (*alone, *more, *both, convgrad.grad_bias(g))

    graph = torch.fx.symbolic_trace(every)
    called = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    assert {convgrad.grad_input, convgrad.grad_weight, convgrad.grad_bias} <= called
    assert {convgrad.feedback_convolution, convgrad.per_sample_norms, convgrad.convolution} <= called
    for found, want in zip(graph(x, w, g), every(x, w, g), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_gradients_without_data(dtype: torch.dtype) -> None:
    x, w, g = (torch.ones(size, dtype=dtype, device="meta") for size in ((2, 4, 9), (4, 2, 3), (2, 4, 7)))
    assert convgrad.grad_input(x.shape, w, g, groups=2).shape == x.shape
    assert convgrad.grad_weight(x, w.shape, g, groups=2).shape == w.shape
    assert [t.shape for t in convgrad.convolution_backward(g, x, w, groups=2)[:2] if t is not None] == [
        x.shape,
        w.shape,
    ]


def test_integers_and_lazy_conjugates() -> None:
    x, w = torch.randint(-3, 4, (2, 4, 6)), torch.randint(-3, 4, (4, 2, 3))
    assert torch.equal(convgrad.conv1d(x, w, groups=2), F.conv1d(x, w, groups=2))
    g = torch.randint(-3, 4, (2, 4, 4))
    want = convgrad.conv1d_weight(x.double(), w.shape, g.double(), groups=2)
    assert torch.equal(convgrad.conv1d_weight(x, w.shape, g, groups=2).double(), want)
    z, v = torch.randn(2, 4, 6, dtype=torch.complex64), torch.randn(4, 4, 3, dtype=torch.complex64)
    torch.testing.assert_close(convgrad.conv1d(z.conj(), v), F.conv1d(z.conj().resolve_conj(), v))
    torch.testing.assert_close(convgrad.conv1d(z.conj().imag, v.real), F.conv1d(-z.imag, v.real))
    x, w = torch.randn(2, 16, 6, 6, requires_grad=True), torch.randn(16, 1, 3, 3)
    y, minus = convgrad.conv2d(x, w, groups=16), torch._neg_view(torch.randn(2, 16, 4, 4))
    (got,) = torch.autograd.grad(y, x, minus)
    torch.testing.assert_close(got, convgrad.conv2d_input(x.shape, w, minus.resolve_neg(), groups=16))


def test_messages_name_what_was_got() -> None:
    x, w, g = torch.randn(2, 4, 6), torch.randn(4, 4, 3), torch.randn(2, 4, 5)
    with pytest.raises(RuntimeError, match=re.escape("the output [2, 4, 4], but got grad_output of size [2, 4, 5]")):
        convgrad.conv1d_input(x.shape, w, g)
    with pytest.raises(convgrad.DtypeError, match=r"Grad_output type .* and input type .* should be the same"):
        convgrad.convolution_backward(g[..., 1:].double(), x, w)


def test_the_short_way_notices_what_changes() -> None:
    """A look-up must not return the plan of another call."""
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    convgrad.conv2d(x, w)
    assert convgrad.conv2d(x.double(), w.double()).dtype == torch.float64
    with pytest.raises(RuntimeError, match="should be the same"):
        convgrad.conv2d(x, w.double())
    with pytest.raises(RuntimeError, match="same device"):
        convgrad.conv2d(x, w.to("meta"))
    with pytest.raises(RuntimeError, match="same device"):
        convgrad.conv2d(x.to("meta"), w)
    assert convgrad.conv2d(x.to("meta"), w.to("meta")).device.type == "meta"
    y = convgrad.conv2d(x.contiguous(memory_format=torch.channels_last), w)
    assert y.is_contiguous(memory_format=torch.channels_last)
    with convgrad.use_backend("reference"), convgrad.trace() as t:
        convgrad.conv2d(x, w)
    assert [r.backend for r in t.records] == ["reference"]


NESTED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "conv2d": convgrad.conv2d,
    "weight": lambda x, w: convgrad.conv2d(torch.ones(1, 3, 5, 5), x),
    "bias": lambda x, w: convgrad.conv2d(torch.ones(1, 3, 5, 5), w, x),
    "convolution": convgrad.convolution,
    "grad_input": lambda x, w: convgrad.grad_input((2, 3, 5, 5), w, x),
    "grad_weight": lambda x, w: convgrad.grad_weight(x, w.shape, x),
    "backward": lambda x, w: convgrad.convolution_backward(x, x, w),
    "operator": lambda x, w: torch.ops.convgrad.convolution(x, w, None, [1], [0], [1], False, [0], 1),
    "module": lambda x, w: convgrad.nn.Conv2d(3, 4, 3)(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("way", NESTED)
def test_nested_tensors_are_refused_in_words(way: str) -> None:
    x = torch.nested.nested_tensor([torch.ones(3, 5, 5), torch.ones(3, 5, 6)])
    with pytest.raises(convgrad.errors.UnsupportedError, match="to_padded_tensor"):
        NESTED[way](x, torch.ones(4, 3, 3, 3))
    padded = torch.nested.to_padded_tensor(x, 0.0)
    assert convgrad.conv2d(padded, torch.ones(4, 3, 3, 3)).shape == (2, 4, 3, 4)
