"""The operators as PyTorch sees them: opcheck, fake, functorch, compile, export, autocast, FLOPs, subclasses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import convgrad
from convgrad.backends import ReferenceBackend, _native_library
from convgrad.engine import register
from convgrad.ops import lowering
from convgrad.problem import ConvProblem

from .forms import case

ops = torch.ops.convgrad
SAMPLES = [(2, False, "depthwise x2", "dilated"), (1, False, "dense", "one-sided"), (3, True, "grouped", "strided")]


@pytest.mark.parametrize("name", ["convolution", "convolution_backward", "grad_input", "grad_weight"])
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_opcheck(sample: tuple[Any, ...], name: str) -> None:
    c = case(*sample, dtype=torch.float32)
    x, w, b = (t.requires_grad_() for t in (c.input, c.weight, c.bias))
    g = torch.randn_like(c.output).requires_grad_()
    arguments = {
        "convolution": (x, w, b, *c.arguments),
        "convolution_backward": (g, x, w, [b.shape[0]], *c.arguments, [True] * 3),
        "grad_input": (g, w, list(x.shape), *c.arguments),
        "grad_weight": (g, x, list(w.shape), *c.arguments),
    }[name]
    results = torch.library.opcheck(getattr(ops, name).default, arguments)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


def test_schemas_are_those_of_aten() -> None:
    for name in ("convolution", "convolution_backward"):
        ours = str(getattr(ops, name).default._schema).removeprefix("convgrad::")
        assert ours == str(getattr(torch.ops.aten, name).default._schema).removeprefix("aten::")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "shape", [((2, 4, 6, 6), (6, 4, 3, 3)), ((2, 1, 6, 6), (6, 1, 1, 1)), ((2, 4, 6, 6), (6, 4, 1, 1))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fake_strides_are_the_real_ones_and_atens(
    shape: tuple[tuple[int, ...], tuple[int, ...]], channels_last: bool, dtype: torch.dtype
) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, w = (torch.randn(s, dtype=dtype).contiguous(memory_format=layout) for s in shape)
    args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    want = torch.convolution(x, w, None, *args)
    got = ops.convolution(x, w, None, *args)
    with FakeTensorMode() as mode:
        fake = ops.convolution(mode.from_tensor(x), mode.from_tensor(w), None, *args)
    assert got.stride() == want.stride() == fake.stride()
    grads = torch.ops.aten.convolution_backward(want, x, w, None, *args, [True, True, False])
    ours = ops.convolution_backward(want, x, w, None, *args, [True, True, False])
    for a, b in zip(grads[:2], ours[:2], strict=True):
        significant = [(s, t) for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1]
        assert all(s == t for s, t in significant)
        assert torch.equal(a, b)


# ---- functorch -----------------------------------------------------------------------------------


def stacked(operands: tuple[Tensor, ...], dims: tuple[int | None, ...]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Operands of three calls along the dimensions, and those of each call."""
    tensors = [
        t if d is None else torch.stack([t * i for i in (1, 2, 3)], d) for t, d in zip(operands, dims, strict=True)
    ]
    rows = [[t if d is None else t.select(d, i) for t, d in zip(tensors, dims, strict=True)] for i in range(3)]
    return tensors, rows


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "dims", [(0, None, None), (None, 0, None), (0, 0, None), (2, 1, 0), (None, None, 0), (1, None, 0)]
)
def test_vmap(groups: int, transposed: bool, dims: tuple[int | None, ...]) -> None:
    args = ([2, 1], [1, 0], [1, 1], transposed, [1, 0] if transposed else [0, 0], groups)
    operands = torch.randn(2, 4, 6, 5), torch.randn(4, 4 // groups, 3, 2), torch.randn(4)
    tensors, rows = stacked(operands, dims)
    got = torch.func.vmap(lambda *t: ops.convolution(*t, *args), in_dims=dims)(*tensors)
    want = torch.stack([ops.convolution(*r, *args) for r in rows])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0), (0, 0, None), (0, 0, 0)])
def test_vmap_over_nothing(transposed: bool, dims: tuple[int | None, ...]) -> None:
    operands = (torch.randn(2, 4, 6, 5), torch.randn(4, 2, 3, 2), torch.randn(4))
    args = ([2, 1], [1, 0], [1, 1], transposed, [0, 0], 2)
    tensors = [t if d is None else t.new_empty((0, *t.shape)) for t, d in zip(operands, dims, strict=True)]

    got = torch.func.vmap(lambda *t: ops.convolution(*t, *args), in_dims=dims)(*tensors)
    assert got.shape == (0, *ops.convolution(*operands, *args).shape)
    gradient = torch.func.vmap(torch.func.grad(lambda w, x: ops.convolution(x, w, None, *args).sum()), (None, 0))
    assert gradient(operands[1], operands[0].new_empty((0, 2, 4, 6, 5))).shape == (0, *operands[1].shape)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (0, 1, None)])
def test_vmap_of_convolution_backward(dims: tuple[int | None, ...]) -> None:
    def ours(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return ops.convolution_backward(g, x, w, [6], [1], [1], [1], False, [0], 2, [True] * 3)

    tensors, rows = stacked((torch.randn(2, 6, 6), torch.randn(2, 4, 6), torch.randn(6, 2, 3)), dims)
    got = torch.func.vmap(ours, in_dims=dims)(*tensors)
    want = [torch.stack(each) for each in zip(*(ours(*r) for r in rows), strict=True)]
    torch.testing.assert_close([*got], want, rtol=1e-4, atol=1e-4)


def test_vmap_of_an_input_without_channels() -> None:
    ops, rest = torch.ops.convgrad, ([1], [0], [1], False, [0], 1)
    x, w, b, g = torch.ones(3, 2, 0, 5), torch.ones(6, 0, 3), torch.ones(6), torch.ones(3, 2, 0, 3)
    y = torch.func.vmap(lambda x: ops.convolution(x, w, b, *rest))(x)
    assert y.shape == (3, *ops.convolution(x[0], w, b, *rest).shape)
    got = torch.func.vmap(lambda g, x: ops.convolution_backward(g, x, w, [6], *rest, [True] * 3))(g, x)
    assert [t.shape for t in got] == [x.shape, (3, *w.shape), (3, 6)]


@pytest.mark.parametrize("name", ["convolution", "convolution_backward", "grad_input", "grad_weight"])
def test_vmap_of_a_request_inside_a_graph(name: str) -> None:
    """Without a rule, PyTorch calls the operator once for each row, and warns."""
    x, w, g = torch.randn(3, 2, 4, 9), torch.randn(3, 4, 1, 3), torch.randn(3, 2, 4, 7)
    form = ([1], [0], [1], False, [0], 4)
    operands, rest = {
        "convolution": ((x, w), (None, *form)),
        "convolution_backward": ((g, x, w), ([4], *form, [True] * 3)),
        "grad_input": ((g, w), (x.shape[1:], *form)),
        "grad_weight": ((g, x), (w.shape[1:], *form)),
    }[name]
    operator = getattr(ops, name)
    with convgrad.trace() as seen:
        got = torch.func.vmap(lambda *t: operator.with_backend(*t, *rest, backend="reference"))(*operands)
    assert {r.backend for r in seen} == {"reference"}
    assert len(seen) == (2 if name == "convolution_backward" else 1)
    want = torch.func.vmap(lambda *t: operator(*t, *rest))(*operands)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("groups", [0, -1, 3, 4])
@pytest.mark.parametrize("of", ["weight", "grad_input", "grad_weight", "gradients", "bias", "dtype"])
def test_vmap_refuses_what_is_refused_without(of: str, groups: int) -> None:
    """In the same words: of what was given, and not of what B is folded into."""
    x, w, g = torch.randn(2, 4, 9), torch.randn(5, 4, 1, 3), torch.randn(2, 4, 6)  # one too short
    calls: dict[str, Callable[[Tensor], Any]] = {
        "weight": lambda w: convgrad.conv1d(x[:, :3], w, groups=groups),
        "grad_input": lambda w: convgrad.grad_input(x.shape, w, g, groups=groups),
        "grad_weight": lambda w: convgrad.grad_weight(x, w.shape, g * w.sum(), groups=groups),
        "gradients": lambda w: convgrad.convolution_backward(g, x, w, [4], groups=groups),
        "bias": lambda w: convgrad.conv1d(x, w, torch.ones(1), groups=groups),
        "dtype": lambda w: convgrad.conv1d(x, w, torch.ones(4).double()),
    }
    with pytest.raises(convgrad.ConvgradError) as without:
        calls[of](w[0])
    with pytest.raises(type(without.value)) as within:
        torch.func.vmap(calls[of])(w)
    assert str(within.value) == str(without.value)


def loss(conv: Callable[..., Tensor], x: Tensor) -> Callable[..., Tensor]:
    return lambda w, b: conv(x, w, b, stride=2, padding=1, groups=2).pow(2).sum()


def test_per_sample_gradients_are_one_grouped_contraction() -> None:
    x, w, b = torch.randn(5, 4, 8, 8), torch.randn(6, 2, 3, 3), torch.randn(6)

    def one(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return loss(convgrad.conv2d, x[None])(w, b)

    with convgrad.trace() as t:
        got = torch.func.vmap(torch.func.grad(one, argnums=(0, 1)), in_dims=(None, None, 0))(w, b, x)
    want = [torch.func.grad(loss(F.conv2d, xi[None]), argnums=(0, 1))(w, b) for xi in x]
    for k in range(2):
        torch.testing.assert_close(got[k], torch.stack([r[k] for r in want]), rtol=1e-4, atol=1e-3)
    assert len(t.records) < 5  # not one for each sample


def test_func_transforms_agree_with_pytorch() -> None:
    x, w, b = torch.randn(2, 2, 5, 5).double(), torch.randn(4, 1, 3, 3).double(), torch.randn(4).double()
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        got = transform(loss(convgrad.conv2d, x))(w, b)
        torch.testing.assert_close(got, transform(loss(F.conv2d, x))(w, b))
    tangents = (torch.randn_like(w), torch.randn_like(b))
    torch.testing.assert_close(
        torch.func.jvp(loss(convgrad.conv2d, x), (w, b), tangents), torch.func.jvp(loss(F.conv2d, x), (w, b), tangents)
    )


# ---- subclasses ----------------------------------------------------------------------------------


class Logging(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_our_operators() -> None:
    x, w = torch.randn(1, 2, 5, requires_grad=True), torch.randn(2, 2, 3, requires_grad=True)
    with Logging() as log:
        convgrad.conv1d(x, w).sum().backward()
    assert "convgrad.convolution.default" in log.seen
    assert "convgrad.convolution_backward.default" in log.seen


class Wrapper(Tensor):
    """A subclass that knows aten only."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        self = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        self.inner = inner.detach()
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} is not an operator that I know")
        unwrapped = torch.utils._pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, Wrapper, func(*unwrapped[0], **unwrapped[1]))


@pytest.mark.parametrize("padding", [1, (1, 0, 2, 1)])
def test_an_unknown_subclass_gets_atens_operator(padding: Any) -> None:
    x, w = torch.randn(1, 2, 5, 5, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
    y = convgrad.conv2d(Wrapper(x), w, padding=padding)
    assert isinstance(y, Wrapper)
    torch.testing.assert_close(y.inner, convgrad.conv2d(x, w, padding=padding).detach())
    y = convgrad.conv_transpose2d(Wrapper(x), w, padding=padding, stride=2, output_padding=1)
    assert isinstance(y, Wrapper)
    torch.testing.assert_close(
        y.inner, convgrad.conv_transpose2d(x, w, padding=padding, stride=2, output_padding=1).detach()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(2, 4, 8), torch.randn(4, 4, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        ours, theirs = convgrad.conv1d(x, w, b), F.conv1d(x, w, b)
        assert ours.dtype == theirs.dtype == dtype
        assert convgrad.conv1d_input(x.shape, w, theirs.float()).dtype == dtype
        assert convgrad.conv1d(x.double(), w.double()).dtype == torch.float64
    torch.testing.assert_close(ours, theirs)
    ours.float().sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == torch.float32


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(6, 2, 3, 3, requires_grad=True)
    problem = convgrad.ConvProblem.parse("g2mb2ic4ih8oc6kh3ph1sh2")
    with FlopCounterMode(display=False) as counter:
        convgrad.conv2d(x, w, padding=1, stride=2, groups=2).sum().backward()
    assert counter.get_total_flops() == 3 * problem.flops
    with FlopCounterMode(display=False) as counter:
        convgrad.conv_transpose2d(x, torch.randn(4, 3, 3, 3), groups=2)
    assert counter.get_total_flops() == 2 * x.numel() * 3 * 9


def profiled(call: Callable[[], Any]) -> dict[str, int]:
    """The FLOPs of each kind of operator that the profiler counts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True) as seen:
        call()
    return {event.key: event.flops for event in seen.key_averages() if event.flops}


@pytest.mark.parametrize("options", [{}, {"padding": (1, 2), "stride": 2}, {"padding": 2, "dilation": 2}])
def test_the_profiler_counts_a_call_as_it_counts_pytorchs(options: dict[str, Any]) -> None:
    x, w = torch.randn(2, 4, 9, 9, requires_grad=True), torch.randn(6, 2, 3, 3, requires_grad=True)
    known = profiled(lambda: torch.conv2d(x, w, groups=2, **options))
    assert set(known) == {"aten::conv2d"}
    for _ in range(2):
        assert profiled(lambda: convgrad.conv2d(x, w, groups=2, **options)) == known
    layer = convgrad.nn.Conv2d(4, 6, 3, groups=2, **options)
    assert profiled(lambda: layer(x).sum().backward()) == known
    with convgrad.takeover():
        assert profiled(lambda: torch.conv2d(x, w, groups=2, **options)) == known
    if "dilation" in options:  # of PyTorch's own call with these words its profiler counts nothing
        assert profiled(lambda: convgrad.conv2d(x, w, groups=2, padding="same", dilation=2)) == known


def test_the_profiler_shows_a_call_with_the_inputs_of_pytorchs() -> None:
    x, w = torch.randn(1, 4, 9), torch.randn(4, 2, 3, requires_grad=True)
    for name, padding in (("conv1d", 1), ("conv_transpose1d", 1), ("conv1d", (1, 2))):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
            getattr(convgrad, name)(x, w, padding=padding, groups=2)
        (event,) = (event for event in seen.events() if event.name == f"aten::{name}")
        assert event.input_shapes[:2] == ([[1, 4, 9], [4, 2, 3]] if padding == 1 else [])
    x, w = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
    assert profiled(lambda: convgrad.conv2d(x, w, padding=(1, 1, 2, 0))) == profiled(
        lambda: torch.conv2d(x, w, padding=1)
    )


# ---- the compiler --------------------------------------------------------------------------------


def net_of_ours() -> torch.nn.Module:
    return torch.nn.Sequential(
        convgrad.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        convgrad.nn.Conv2d(8, 8, 3, padding=1, groups=8),
        convgrad.nn.ConvTranspose2d(8, 4, 2, stride=2),
    )


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(
    ("backend", "request_"),
    [
        ("aot_eager", None),
        ("aot_eager", "im2col"),
        pytest.param("inductor", "im2col", marks=pytest.mark.slow),  # compiles C++
        pytest.param("inductor", None, marks=pytest.mark.slow),  # compiles PyTorch's own convolutions
    ],
)
def test_compile_with_dynamic_shapes(backend: str, request_: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("CI", "1")  # Inductor is stricter there
    # A graph keeps the choice that was made when it was traced, and Inductor's caches bring back earlier graphs.
    net = net_of_ours()
    # Where the choice is ATen the graph holds aten's operator; of the three layers one is depthwise.
    expected = [request_] * 3 if request_ else [] if _native_library.why_absent() else ["native"]
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=backend)
    with convgrad.use_backend(request_), torch.compiler.config.patch(force_disable_caches=True):
        for size in (8, 12):
            x = torch.randn(2, 3, size, size)
            want = net(x)
            with convgrad.trace() as t:
                got = compiled(x)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            grads = [torch.autograd.grad(y.pow(2).sum(), list(net.parameters())) for y in (got, want)]
            torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-3)
            assert [r.backend for r in t.records] == expected


@pytest.mark.slow  # compiles C++
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_inductor_chooses_the_layout_for_our_operators_too() -> None:
    """Beside PyTorch's convolutions, which it computes in channels_last; else it would convert at every other layer."""
    torch.compiler.reset()
    x, w = torch.randn(2, 32, 12, 12), torch.randn(32, 32, 3, 3)
    depthwise = torch.randn(32, 1, 3, 3)

    def net(x: Tensor) -> Tensor:
        return convgrad.conv2d(torch.conv2d(x, w), depthwise, groups=32)

    with convgrad.use_backend("im2col"), torch.compiler.config.patch(force_disable_caches=True):
        compiled = torch.compile(net)
        with convgrad.trace() as t:
            got = compiled(x)
        torch.testing.assert_close(got, net(x), rtol=1e-4, atol=1e-4)
    assert ["channels_last" in r.problem for r in t.records] == [True]


@pytest.mark.parametrize("backend", ["aten", "im2col", "reference"])
@pytest.mark.parametrize("operands", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("wanted", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_has_the_layout_that_is_named(
    backend: str, operands: torch.memory_format, wanted: torch.memory_format
) -> None:
    sizes = (2, 8, 6, 6), (2, 4, 6, 6), (8, 4, 3, 3)
    g, x, w = (torch.randn(size).contiguous(memory_format=operands) for size in sizes)
    arguments = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    with convgrad.use_backend(backend):
        grad_input = torch.ops.convgrad.grad_input(g, w, x.shape, *arguments, memory_format=wanted)
        grad_weight = torch.ops.convgrad.grad_weight(g, x, w.shape, *arguments, memory_format=wanted)
    assert grad_input.is_contiguous(memory_format=wanted)
    assert grad_weight.is_contiguous(memory_format=wanted)


@pytest.mark.parametrize("of_other", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_gradient", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_without_a_named_layout_has_atens(
    of_gradient: torch.memory_format, of_other: torch.memory_format
) -> None:
    """For an input that lies as grad_output does, or for a contiguous weight: these it does not get."""
    x, w, g = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(2, 8, 6, 6)
    g = g.contiguous(memory_format=of_gradient)
    arguments, backward = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1), torch.ops.aten.convolution_backward
    image, kernel = (t.contiguous(memory_format=of_other) for t in (x, w))
    want, _, _ = backward(g, x.contiguous(memory_format=of_gradient), kernel, None, *arguments, [True, False, False])
    with convgrad.use_backend("reference"):
        assert ops.grad_input(g, kernel, x.shape, *arguments).stride() == want.stride()
        _, want, _ = backward(g, image, w, None, *arguments, [False, True, False])
        assert ops.grad_weight(g, image, w.shape, *arguments).stride() == want.stride()


def test_transforms_inside_a_compiled_function() -> None:
    """A graph that is being made calls the operators with fake tensors inside of functorch's wrappers."""
    torch.compiler.reset()
    x, w = torch.randn(3, 2, 5, 5, dtype=torch.double), torch.randn(2, 1, 3, 3, dtype=torch.double)

    def of(conv: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def loss(w: Tensor, image: Tensor) -> Tensor:
            return conv(image, w, padding=1, groups=2).tanh().sum()

        def function(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            product = torch.func.jvp(lambda w: torch.func.grad(loss)(w, x), (w,), (w,))[1]
            return product, torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x)

        return function

    compiled = torch.compile(of(convgrad.conv2d), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(w, x), of(torch.conv2d)(w, x))


def graph_of(**options: Any) -> str:
    torch.compiler.reset()
    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    from functorch.compile import aot_function, make_boxed_func

    x, w = torch.randn(1, 2, 8, 8, requires_grad=True), torch.randn(2, 2, 3, 3, requires_grad=True)
    aot_function(lambda x, w: convgrad.conv2d(x, w, **options), fw_compiler=keep, bw_compiler=keep)(
        x, w
    ).sum().backward()
    return "\n".join(graphs)


@pytest.mark.parametrize(
    ("backend", "padding", "namespace"),
    [(None, 1, "aten"), ("im2col", 1, "convgrad"), (None, (1, 0, 0, 1), "convgrad"), (None, (1, 1, 1, 1), "aten")],
)
def test_a_choice_of_aten_is_aten_in_the_graph(backend: str | None, padding: Any, namespace: str) -> None:
    """Any other choice stays ours, as does padding that ATen cannot state."""
    with convgrad.use_backend(backend):
        code = graph_of(padding=padding)
    assert f"{namespace}.convolution.default" in code
    assert f"{namespace}.convolution_backward.default" in code
    assert ("convgrad" in code) == (namespace == "convgrad")


def test_what_gains_in_contiguous_layout_alone_is_aten_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor lays PyTorch's convolutions out in channels_last on a CPU."""

    def chosen(problem: ConvProblem, *_: object) -> Any:
        step = SimpleNamespace(backend=SimpleNamespace(name="native"), reason=reason, proposed=())
        return SimpleNamespace(aten=problem.channels_last, steps=() if problem.channels_last else (step,))

    monkeypatch.setattr(lowering.engine, "plan_for", chosen)
    reason = "by rule: it is faster"
    assert "convgrad" not in graph_of(padding=1)
    reason = "your preference"
    assert "convgrad" in graph_of(padding=1)


def test_export() -> None:
    net = net_of_ours().eval()
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(net, (x,), dynamic_shapes={"input": {0: torch.export.Dim("n", min=1, max=64)}})
    other = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(program.module()(other), net(other))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_use_backend_inside_a_compiled_function(fullgraph: bool) -> None:
    """The graph carries each request, its backward too; nothing of it is left when the function has run."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with convgrad.use_backend("im2col"):
            y = convgrad.conv2d(x, w)
            with convgrad.use_backend(forward="reference"):
                z = convgrad.conv2d(y, w)
            return convgrad.grad_input(z.shape, w, convgrad.conv2d(z, w)).sum()

    torch._dynamo.reset()
    x, w = torch.randn(1, 4, 9, 9, requires_grad=True), torch.randn(4, 4, 3, 3)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        with convgrad.trace() as seen:
            loss = compiled(x, w)
            (got,) = torch.autograd.grad(loss, x)
        forward = [(r.outputs, r.backend) for r in seen][:4]
        kinds = ["im2col", "reference", "im2col", "im2col"]
        assert forward == list(zip(["forward"] * 3 + ["grad_input"], kinds, strict=True))
        assert [r.backend for r in seen][4:].count("im2col") >= 3
        (want,) = torch.autograd.grad(function(x, w), x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with convgrad.trace() as seen:
        convgrad.conv2d(x, w)
    assert [r.backend for r in seen] == ["aten"]


def test_use_backend_inside_an_exported_function() -> None:
    class Requests(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            with convgrad.use_backend("im2col"):
                return convgrad.conv1d(x, w)

    graph = torch.export.export(Requests(), (torch.randn(1, 4, 9), torch.randn(4, 4, 3)), strict=False).graph
    (call,) = [n for n in graph.nodes if n.op == "call_function"]
    assert call.kwargs["backend"] == "im2col;im2col;im2col"


def test_a_request_in_a_graph_for_a_library_with_two_flags() -> None:
    """As `convgrad.direct` registers them: their names have commas."""

    class Flagged(ReferenceBackend):
        name = "flagged[benchmark=1,deterministic=1]"

    x, w = torch.randn(1, 4, 9), torch.randn(4, 4, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        with convgrad.use_backend(Flagged.name):
            return convgrad.conv1d(x, w)

    register(Flagged())
    with convgrad.trace() as seen:
        convgrad.nn.Conv1d(4, 4, 3, backend=Flagged.name)(x)
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert [r.backend for r in seen] == [Flagged.name] * 2
