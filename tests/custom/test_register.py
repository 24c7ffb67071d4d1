"""A registered function is a backend like any other: autograd, transforms, the compiler, choice, modules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import BackendError, ConvProblem
from convgrad.engine.explain import explain_problem
from convgrad.engine.trace import trace

DEPTHWISE = ConvProblem.parse("g8mb2ic8ih9oc8kh3ph1")
#: PyTorch's own 16-bit gradients on the CPU sum in 16 bits, and would be refused.
WIDE = (torch.float32, torch.float64)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, first: Tensor, second: Tensor, problem: ConvProblem) -> Any:
        self.calls += 1
        return self.function(first, second, problem)


def padding(p: ConvProblem) -> list[int]:
    return [low for low, _ in p.padding]


def forward(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    return F.conv2d(input, weight, None, p.stride, padding(p), p.dilation, p.groups)


def grad_input(grad_output: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    return torch.nn.grad.conv2d_input(p.input_shape, weight, grad_output, p.stride, padding(p), p.dilation, p.groups)


def grad_weight(grad_output: Tensor, input: Tensor, p: ConvProblem) -> Tensor:
    return torch.nn.grad.conv2d_weight(input, p.weight_shape, grad_output, p.stride, padding(p), p.dilation, p.groups)


def accepts(p: ConvProblem) -> bool:
    return p.ndim == 2 and p.symmetric


def counted(name: str = "mine", **options: Any) -> Counted:
    function = Counted(forward)
    convgrad.register(name, forward=function, **{"accepts": accepts, "seconds": 0.2, **options})
    function.calls = 0
    return function


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 8, 9, 9, dtype=dtype, requires_grad=True)
    return x, torch.randn(8, 1, 3, 3, dtype=dtype, requires_grad=True)


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return convgrad.conv2d(x, w, padding=1, groups=w.shape[0])


# ---- calculus --------------------------------------------------------------------------------------


def test_derivatives_of_every_order() -> None:
    mine = counted()
    x, w = operands()
    y = depthwise(x, w)
    assert mine.calls == 1
    torch.testing.assert_close(y, F.conv2d(x, w, padding=1, groups=8))
    assert torch.autograd.gradcheck(depthwise, (x, w), fast_mode=True)
    assert torch.autograd.gradgradcheck(depthwise, (x, w), fast_mode=True)


def test_one_pass_of_three() -> None:
    """A grad_weight alone: forward and grad_input stay with the engine, and the function is called once a backward."""
    mine = Counted(grad_weight)
    convgrad.register("mine", grad_weight=mine, accepts=accepts, dtypes=WIDE, seconds=0.2)
    x, w = operands()
    for fresh in (True, False):
        mine.calls = 0
        got = torch.autograd.grad(depthwise(x, w).square().sum(), (x, w))
        expected = torch.autograd.grad(F.conv2d(x, w, padding=1, groups=8).square().sum(), (x, w))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
        assert mine.calls == 1, fresh
    torch.autograd.grad(depthwise(x, w).sum(), x)
    assert mine.calls == 1


def test_all_three_passes() -> None:
    functions = {"forward": Counted(forward), "grad_input": Counted(grad_input), "grad_weight": Counted(grad_weight)}
    convgrad.register("mine", **functions, accepts=accepts, dtypes=WIDE, seconds=0.5)
    for f in functions.values():
        f.calls = 0
    depthwise(*operands()).sum().backward()
    assert [f.calls for f in functions.values()] == [1, 1, 1]
    chosen = explain_problem(DEPTHWISE).chosen()
    assert [chosen[o] for o in ("forward", "grad_input", "grad_weight")] == ["mine"] * 3


def test_function_transforms() -> None:
    mine = counted()
    x, w = operands()
    many = torch.randn(3, *x.shape, dtype=torch.float64)
    got = torch.func.vmap(lambda x: depthwise(x, w))(many)
    assert mine.calls == 1
    torch.testing.assert_close(got, torch.stack([F.conv2d(x, w, padding=1, groups=8) for x in many]))
    _, tangent = torch.func.jvp(lambda x: depthwise(x, w), (x,), (many[0],))
    torch.testing.assert_close(tangent, F.conv2d(many[0], w, padding=1, groups=8))
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: depthwise(x[None], w).square().sum()), (None, 0))(w, x)
    expected = [torch.autograd.grad(F.conv2d(one[None], w, padding=1, groups=8).square().sum(), w)[0] for one in x]
    torch.testing.assert_close(per_sample, torch.stack(expected))


def test_a_transposed_convolution_uses_grad_input() -> None:
    mine = Counted(grad_input)
    convgrad.register("mine", grad_input=mine, accepts=accepts, dtypes=WIDE, seconds=0.2)
    mine.calls = 0
    x, w, b = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(3)
    torch.testing.assert_close(
        convgrad.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
    )
    assert mine.calls == 1


def test_the_function_is_not_differentiated_through() -> None:
    """It sees plain tensors without a history, whatever it does with them."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
            return forward(input, weight, p)

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Any:
            raise AssertionError("differentiated through")

    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        assert not input.requires_grad
        assert not weight.requires_grad
        with torch.enable_grad():
            return Inner.apply(input, weight, p)  # pyright: ignore[reportReturnType]

    convgrad.register("mine", forward=mine, accepts=accepts, seconds=0.2)
    x, w = operands()
    depthwise(x, w).sum().backward()
    torch.func.grad(lambda x: depthwise(x, w).sum())(x)


# ---- results ---------------------------------------------------------------------------------------


def test_a_result_of_another_shape() -> None:
    convgrad.register("mine", forward=lambda x, w, p: x, accepts=lambda p: accepts(p) and p.depthwise, verify=False)
    x, w = operands()
    with pytest.raises(BackendError, match=r"forward of 'mine' returned \(2, 8, 9, 9\).*asks for \(2, 8, 7, 7\)"):
        convgrad.conv2d(x, w, groups=8)


def test_an_operand_as_the_result() -> None:
    """An identity may return its input: what the engine and the caller do to the result does not reach the input."""
    convgrad.register("mine", forward=lambda x, w, p: x, accepts=lambda p: p.pointwise, verify=False)
    x = torch.randn(1, 1, 3, 3)
    before = x.clone()
    y = convgrad.conv2d(x, torch.ones(1, 1, 1, 1), torch.ones(1))
    assert torch.equal(x, before)
    assert torch.equal(y, x + 1)


def test_the_bias() -> None:
    """Added by the engine, or by the function if it has the parameter."""
    x, w = operands()
    b = torch.randn(8, dtype=torch.float64)
    expected = F.conv2d(x, w, b, padding=1, groups=8)
    counted()
    torch.testing.assert_close(convgrad.conv2d(x, w, b, padding=1, groups=8), expected)

    def fused(
        input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor:
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)

    backend = convgrad.register("mine", forward=fused, signature="torch", accepts=accepts, seconds=0.5)
    assert backend.fuses_bias(DEPTHWISE)
    torch.testing.assert_close(convgrad.conv2d(x, w, b, padding=1, groups=8), expected)


def test_layouts() -> None:
    """Contiguous operands for who asks for them; the result is in channels_last all the same."""
    seen = []

    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        seen.append((input.is_contiguous(), weight.is_contiguous()))
        return forward(input, weight, p).contiguous()

    convgrad.register("mine", forward=mine, accepts=accepts, layouts=("contiguous",), seconds=0.2)
    seen.clear()
    y = convgrad.conv2d(torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last), torch.randn(8, 8, 3, 3))
    assert seen == [(True, True)]
    assert y.is_contiguous(memory_format=torch.channels_last)


# ---- being chosen ----------------------------------------------------------------------------------


def test_preferred_where_it_accepts() -> None:
    mine = counted(accepts=lambda p: accepts(p) and p.depthwise)
    depthwise(*operands())
    assert mine.calls == 1
    convgrad.conv2d(torch.randn(1, 8, 9, 9), torch.randn(8, 8, 3, 3))
    assert mine.calls == 1
    rows = {r.backend: r for r in explain_problem(DEPTHWISE).rows if r.output == "forward"}
    assert rows["mine"].chosen
    assert rows["mine"].reasons == ("registered by the user",)
    dense = {r.backend: r for r in explain_problem(ConvProblem.parse("ic8ih9oc8kh3")).rows if r.output == "forward"}
    assert dense["mine"].reasons == ("its accepts says no",)


def test_not_preferred() -> None:
    mine = counted(prefer=False)
    x, w = operands()
    depthwise(x, w)
    assert mine.calls == 0
    with convgrad.use_backend("mine"):
        depthwise(x, w)
    assert mine.calls == 1


def test_by_name() -> None:
    """A forward alone trains under its name: the other passes stay with the engine."""
    mine = counted(prefer=False, accepts=lambda p: accepts(p) and p.depthwise)
    x, w = operands()
    with convgrad.use_backend("mine"):
        depthwise(x, w).sum().backward()
        assert mine.calls == 1
        with pytest.raises(BackendError, match="its accepts says no"):
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
    with pytest.raises(KeyError, match="no backend called 'mine' was registered"):
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


# ---- the compiler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(compiler: str) -> None:
    """It stays one operator in the graph, without a break, forward and backward."""
    functions = {"forward": Counted(forward), "grad_weight": Counted(grad_weight)}
    convgrad.register("mine", **functions, accepts=accepts, dtypes=WIDE, seconds=0.2)
    x, w = operands()
    compiled = torch.compile(depthwise, backend=compiler, fullgraph=True)
    compiled(x, w).sum().backward()
    x.grad = w.grad = None
    for f in functions.values():
        f.calls = 0
    compiled(x, w).square().sum().backward()
    assert [f.calls for f in functions.values()] == [1, 1]
    got, (x.grad, w.grad) = (x.grad, w.grad), (None, None)
    F.conv2d(x, w, padding=1, groups=8).square().sum().backward()
    for a, b in zip(got, (x.grad, w.grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["mine", "im2col"])
def test_a_compiled_module_by_name(name: str) -> None:
    """Its request is part of the graph: for all passes, though nobody asks when the graph runs."""
    counted(prefer=False)
    module = torch.nn.Sequential(
        convgrad.nn.Conv2d(8, 8, 3, groups=8, backend=name), convgrad.nn.ConvTranspose2d(8, 4, 3, backend="im2col")
    )
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(x).sum().backward()
    with trace() as seen:
        got = torch.autograd.grad(compiled(x).square().sum(), [x, *module.parameters()])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    ran = {("transposed" in r.problem, o): r.backend for r in seen for o in r.outputs.split("+")}
    assert ran[False, "forward"] == name
    assert {b for (transposed, _), b in ran.items() if transposed} == {"im2col"}


def test_compiled_graphs_know_the_kernels() -> None:
    """A graph on disk that was traced with another kernel, or with none, is not found again."""
    from torch.compiler import config

    tags = [config.cache_key_tag]
    counted()
    tags.append(config.cache_key_tag)
    convgrad.register("mine", forward=lambda x, w, p: forward(x, w, p) * 1, accepts=accepts, seconds=0.2)
    tags.append(config.cache_key_tag)
    assert len(set(tags)) == 3
    convgrad.unregister("mine")
    assert config.cache_key_tag == tags[0]


# ---- what can be registered ------------------------------------------------------------------------


def test_decorator_of_a_function() -> None:
    @convgrad.register("mine", accepts=accepts, seconds=0.2)
    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        return forward(input, weight, p)

    assert mine.__name__ == "mine"
    assert convgrad.list_backends()["mine"].passes == ("forward",)


def test_decorator_of_a_class() -> None:
    @convgrad.register("mine", accepts=accepts, dtypes=WIDE, seconds=0.2)
    class Mine:
        forward = staticmethod(forward)
        grad_weight = staticmethod(grad_weight)

    assert isinstance(Mine, type)
    assert convgrad.list_backends()["mine"].passes == ("forward", "grad_weight")


def test_plain_ints_of_a_mobilenet() -> None:
    """3x3 and 5x5 only, stride 1 or 2 only, everything an int; trained with, beside stock PyTorch."""
    calls = []

    def depthwise_forward(input: Tensor, filter: Tensor, filter_height: int, stride: int) -> Tensor:
        assert type(filter_height) is int
        assert filter_height in (3, 5)
        assert type(stride) is int
        assert stride in (1, 2)
        calls.append(1)
        windows = (
            F.pad(input, [filter_height // 2] * 4).unfold(2, filter_height, stride).unfold(3, filter_height, stride)
        )
        return (windows * filter[:, 0, None, None]).sum((-2, -1))  # [N, C, H, W, k, k] -> [N, C, H, W]

    backend = convgrad.register(
        "mobile",
        forward=depthwise_forward,
        args=("input", "weight", "kernel_size[0]", "stride[0]"),
        accepts=lambda p: (
            p.depthwise
            and p.in_channels == p.out_channels
            and p.kernel_size in {(3, 3), (5, 5)}
            and p.stride in {(1, 1), (2, 2)}
            and p.dilation == (1, 1)
            and p.padding == tuple((k // 2, k // 2) for k in p.kernel_size)
        ),
        dtypes=(torch.float32, torch.float64),
        seconds=1,
    )
    assert backend.verified
    calls.clear()
    torch.manual_seed(0)
    ours = mobile(convgrad.nn.Conv2d)
    theirs = mobile(torch.nn.Conv2d)
    theirs.load_state_dict(ours.state_dict())
    losses = [train(model) for model in (ours, theirs)]
    assert len(calls) == 2 * 10
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0][-1] < losses[0][0]


def mobile(conv: Any) -> torch.nn.Module:
    return torch.nn.Sequential(
        conv(3, 8, 1), conv(8, 8, 3, stride=2, padding=1, groups=8), torch.nn.ReLU(),
        conv(8, 8, 5, padding=2, groups=8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4),
    )  # fmt: skip


def train(model: torch.nn.Module) -> Tensor:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, target, losses = torch.randn(8, 3, 13, 11), torch.arange(8) % 4, []
    for _ in range(10):
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_an_operator_of_torch_library() -> None:
    @torch.library.custom_op("convgrad_test::conv", mutates_args=())
    def op(input: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
        return F.conv2d(input, weight, None, stride, padding)

    assert convgrad.register("library", forward=op, signature="torch", accepts=only_dense, seconds=0.2).verified
    packet = torch.ops.convgrad_test.conv
    assert convgrad.register("library", forward=packet, signature="torch", accepts=only_dense, seconds=0.2).verified
    overload = packet.default
    assert convgrad.register("library", forward=overload, signature="torch", accepts=only_dense, seconds=0.2).verified
    x, w = torch.randn(1, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3)
    convgrad.conv2d(x, w).sum().backward()


def only_dense(p: ConvProblem) -> bool:
    return accepts(p) and p.groups == 1 and p.dilation == (1, 1)


def test_a_builtin() -> None:
    arguments = ("input", "weight", None, "stride", "padding", "dilation", "groups")
    assert convgrad.register("builtin", forward=torch.conv2d, args=arguments, accepts=accepts, seconds=0.2).verified


def test_a_list_of_one_tensor() -> None:
    """What an extension that returns std::vector<at::Tensor> gives."""
    assert convgrad.register("list", forward=lambda x, w, p: [forward(x, w, p)], accepts=accepts, seconds=0.2).verified


# ---- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "aten"}, ValueError, "'aten' is the name of a backend that comes with the library"),
        ({"name": "my kernel"}, ValueError, "a backend's name consists of"),
        ({"signature": "mine"}, ValueError, "signature is 'native' or 'torch'"),
        ({"layouts": ("nhwc",)}, ValueError, "layouts are among"),
        ({"layouts": ()}, ValueError, "layouts are among"),
        ({"seconds": 0}, ValueError, "seconds is a positive number"),
        ({"forward": 3}, TypeError, "forward= is a function, got int"),
        ({"args": "input"}, TypeError, "args is a sequence"),
        ({"problems": ["nonsense"]}, ValueError, "nonsense"),
    ],
)
def test_arguments_that_make_no_backend(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    before = convgrad.list_backends()
    with pytest.raises(error, match=message):
        convgrad.register(**{"name": "mine", "forward": forward, "accepts": accepts, **arguments})
    assert convgrad.list_backends() == before


def test_accepts_that_raises_says_no() -> None:
    backend = convgrad.register("mine", forward=forward, accepts=lambda p: p.kernel_size[1] == 3, verify=False)
    one = ConvProblem.parse("ic2iw9oc2kw3")
    reasons = backend.reasons_against(one, ("forward",), torch.device("cpu"))
    assert reasons == ["its accepts raised IndexError: tuple index out of range"]


def test_dtypes() -> None:
    """Integers and complex numbers were not verified, so they are not offered unless asked for."""
    backend = convgrad.register("mine", forward=forward, accepts=accepts, verify=False)
    reasons = backend.reasons_against(DEPTHWISE.replace(dtype=torch.complex64), ("forward",), torch.device("cpu"))
    assert reasons == ["it was registered for float32, float64, bfloat16, float16, not for complex64"]


def test_one_dtype_layout_or_device_may_stand_alone() -> None:
    options: dict[str, Any] = {"dtypes": torch.float64, "devices": "cpu", "layouts": "contiguous"}
    backend = convgrad.register("alone", forward=forward, accepts=accepts, seconds=0.2, **options)
    assert (backend.devices, backend.layouts) == (("cpu",), ("contiguous",))
    double = DEPTHWISE.replace(dtype=torch.float64)
    assert not backend.reasons_against(double, ("forward",), torch.device("cpu"))
    assert "float64" in backend.reasons_against(DEPTHWISE, ("forward",), torch.device("cpu"))[0]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dtypes": "float32"}, "dtypes are such as torch.float32, got 'float32'"),
        ({"devices": ["gpu"]}, "devices are types such as 'cpu' and 'cuda', got 'gpu'"),
        ({"devices": "cuda:0"}, "got 'cuda:0'"),
        ({"layouts": "nchw"}, r"layouts are among .* got \('nchw',\)"),
    ],
)
def test_what_is_no_dtype_device_or_layout_is_refused(option: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        convgrad.register("odd", forward=forward, accepts=accepts, seconds=0.2, **option)
