"""Batch and instance normalization: torch's semantics, its results up to rounding, and who computes a call."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import convgrad
from convgrad.backends.native_norm import LEAST_NORM
from tests.norms import NEEDS_KERNELS, watch

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels of ours ran."""
    seen: list[str] = []
    for name in BOTH:
        watch(monkeypatch, name, lambda *args, name=name: seen.append(name))
    return seen


BOTH = ["normalize", "normalization_gradients"]


def pair(kind: str = "Batch", d: int = 2, channels: int = 6, affine: bool = True, **options: Any) -> tuple[Any, Any]:
    theirs = getattr(nn, f"{kind}Norm{d}d")(channels, affine=affine, **options)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours = getattr(convgrad.nn, f"{kind}Norm{d}d")(channels, affine=affine, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


KINDS = pytest.mark.parametrize("kind", ["Batch", "Instance"])


def image(*shape: int, last: bool = False, **options: Any) -> Tensor:
    x = 3 * torch.randn(shape, **options) + 2
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[len(shape)]) if last else x


def agree(ours: Any, theirs: Any, x: Tensor, **near: Any) -> None:
    """Outputs, gradients, their layouts and the buffers after two steps."""
    for _ in range(2):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, want = ours(a), theirs(b)
        assert (y.stride(), y.dtype) == (want.stride(), want.dtype)
        torch.testing.assert_close(y, want, **near)
        g = torch.randn_like(y)
        y.backward(g)
        want.backward(g)
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.stride() == b.grad.stride()
        torch.testing.assert_close(a.grad, b.grad, **near)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert one.grad.dtype is other.grad.dtype
            torch.testing.assert_close(one.grad, other.grad, **(near or {"rtol": 1e-5, "atol": 1e-4}))
        for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(one, other, **near)


SHAPES = [(7, 6), (3, 6, 5), (2, 6, 5, 7), (2, 6, 3, 4, 5), (4, 6, 1, 1), (1, 6, 2, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_as_in_torch(shape: tuple[int, ...], last: bool, calls: list[str]) -> None:
    if last and len(shape) < 4:
        pytest.skip("it has no channels_last")
    x = image(*shape, last=last)
    agree(*pair(d=max(1, len(shape) - 2)), x)
    assert calls == (2 * BOTH if x.is_contiguous() and x.dim() > 2 else [])


# ---- in channels_last, with the activation behind it ---------------------------------------------


def activated(shape: tuple[int, ...], activation: nn.Module, **options: Any) -> tuple[Any, Any, Tensor]:
    theirs = nn.Sequential(pair("Batch", len(shape) - 2, shape[1], **options)[1], activation)
    ours = copy.deepcopy(theirs)
    x = image(*shape, last=True)
    convgrad.accelerate_(ours, example_inputs=x)
    return ours, theirs, x


OPTIONS: list[dict[str, Any]] = [{"momentum": None}, {"track_running_stats": False}, {"affine": False}]
CASES = [
    *product(
        [(2, 16, 5, 7), (3, 37, 9, 8), (2, 24, 3, 4, 5), (70, 33, 1, 2)],
        [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Hardswish()],
        [{}],
    ),
    *product([(2, 20, 5, 7)], [nn.ReLU()], OPTIONS),
]


@pytest.mark.parametrize(("shape", "activation", "options"), CASES, ids=str)
def test_channels_last(shape: tuple[int, ...], activation: nn.Module, options: Any, calls: list[str]) -> None:
    ours, theirs, x = activated(shape, activation, **options)
    agree(ours, theirs, x)
    assert calls == 2 * BOTH


def test_one_channel_has_torchs_strides(calls: list[str]) -> None:
    ours, theirs = pair(channels=1)
    x = torch.randn(2, 5, 7, 1).permute(0, 3, 1, 2)
    assert ours(x).stride() == theirs(x).stride()
    assert calls == ["normalize"]


@pytest.mark.parametrize("why", ["no activation", "few channels"])
def test_channels_last_by_torch(why: str, calls: list[str]) -> None:
    ours, theirs, x = activated((2, 15 if why == "few channels" else 16, 5, 7), nn.ReLU())
    if why == "no activation":
        ours, theirs = ours[0], theirs[0]
        ours(x.requires_grad_()).sum()  # what reads the result is not known before the first call
        theirs(x)
        calls.clear()
    agree(ours, theirs, x.detach())
    assert calls == []


@pytest.mark.parametrize("options", [*OPTIONS, {"momentum": 0.5, "eps": 1e-2}], ids=str)
def test_options(options: dict[str, Any], calls: list[str]) -> None:
    ours, theirs = pair(**options)
    agree(ours, theirs, image(2, 6, 5, 7))
    assert calls == 2 * BOTH
    ours.eval()
    theirs.eval()
    agree(ours, theirs, image(2, 6, 5, 7))
    assert calls == (4 if "track_running_stats" in options else 2) * BOTH  # without them the batch's are taken in eval


@KINDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes(kind: str, dtype: torch.dtype, wide: bool, calls: list[str]) -> None:
    """Parameters of the input's dtype, or of float32: where they are not, torch's error is raised."""
    ours, theirs = (m.to(torch.float32 if wide else dtype) for m in pair(kind))
    x = image(2, 6, 16, 16).to(dtype)
    if wide and dtype is torch.float64:
        with pytest.raises(RuntimeError, match="mixed dtype"):
            ours(x)
        return
    exact = copy.deepcopy(theirs).double()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    y, want = ours(a), exact(b)
    g = torch.randn_like(y)
    found = torch.autograd.grad(y, [a, *ours.parameters()], g)
    expected = torch.autograd.grad(want, [b, *exact.parameters()], g.double())
    near = {torch.float64: 1e-9, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    dtypes = [t.dtype for t in (x, x, *theirs.parameters(), *theirs.buffers())]
    pairs = zip((y, *found, *ours.buffers()), (want, *expected, *exact.buffers()), dtypes, strict=True)
    for one, other, like in pairs:
        assert one.dtype is like
        torch.testing.assert_close(one.double(), other.double(), rtol=near, atol=near)
    assert calls == BOTH


@pytest.mark.parametrize("needed", ["input", "weight", "bias"])
def test_only_the_gradients_that_are_needed(needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    watch(monkeypatch, "normalization_gradients", lambda *args: asked.append(args[-2]))
    ours, theirs = pair()
    x = image(2, 6, 5, 7)
    found = []
    for module in (ours, theirs):
        tensors = {"input": x.clone(), "weight": module.weight, "bias": module.bias}
        for name, tensor in tensors.items():
            tensor.requires_grad_(name == needed)
        module(tensors["input"]).square().sum().backward()
        found.append(tensors[needed].grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert asked == [tuple(name == needed for name in ("input", "weight", "bias"))]


@KINDS
@pytest.mark.parametrize("last", [False, True])
def test_gradients_in_float64_to_the_second_order(kind: str, last: bool) -> None:
    module = pair(kind, channels=2)[0].double()
    x = image(2, 2, 3, 3, dtype=torch.float64, last=last).requires_grad_()

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    operands = (x, module.weight, module.bias)
    assert torch.autograd.gradcheck(call, operands)
    assert torch.autograd.gradgradcheck(call, operands)


def test_create_graph_with_parameters_of_16_bits() -> None:
    ours, theirs = pair()
    start, c = image(2, 6, 5, 7).bfloat16(), torch.randn(2, 6, 5, 7)
    results = []
    for module in (ours.bfloat16(), theirs.bfloat16().double()):  # the same numbers
        x = start.clone().to(module.weight.dtype).requires_grad_()
        (g,) = torch.autograd.grad((c * module(x) ** 3).sum(), x, create_graph=True)
        (c * g).square().sum().backward()
        results.append((x.grad, module.weight.grad))
    for one, exact in zip(*results, strict=True):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one.double(), exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["expanded", "turned"])
def test_a_gradient_in_another_layout(last: bool, kind: str) -> None:
    ours, theirs = pair()
    grads = []
    for module in (ours, theirs):
        torch.manual_seed(2)
        x = image(2, 6, 5, 7, last=last).requires_grad_()
        y = module(x)
        g = torch.randn(2, 6, 1, 1).expand_as(y) if kind == "expanded" else torch.randn(2, 5, 7, 6).permute(0, 3, 1, 2)
        (grad,) = torch.autograd.grad(y, x, g if kind == "expanded" or not last else g.contiguous())
        grads.append(grad)
    assert grads[0].stride() == grads[1].stride()
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_gradient_of_one_image_that_became_tokens(create_graph: bool) -> None:
    """PyTorch 2.13's is off by all of its size on a CPU, unless it is laid out as the image was."""
    ours, theirs = pair()
    a, b = (image(1, 6, 5, 7).requires_grad_() for _ in range(2))
    b.data = a.data
    tokens = torch.randn(1, 35, 6)
    one = torch.autograd.grad(ours(a).flatten(2).transpose(1, 2), a, tokens, create_graph=create_graph)
    other = torch.autograd.grad(theirs(b), b, tokens.mT.reshape(b.shape).contiguous())
    torch.testing.assert_close(one, other)


def test_what_is_kept_is_what_torch_keeps() -> None:
    """The input itself, the weight, two numbers a channel, and the bias, which an activation may need."""
    module, kept = pair()[0], []
    x = image(2, 6, 5, 7).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(x)
    assert [t.numel() for t in kept] == [x.numel(), 6, 6, 12]
    assert [t.data_ptr() for t in kept[:2]] == [x.data_ptr(), module.weight.data_ptr()]


@pytest.mark.parametrize("affine", [True, False])
def test_without_gradients(affine: bool, calls: list[str]) -> None:
    ours, theirs = pair(affine=affine)
    x = image(2, 6, 5, 7)
    for block in (torch.no_grad, torch.inference_mode, *([] if affine else [torch.enable_grad])):
        with block():
            torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert set(calls) == {"normalize"}


# ---- torch's own computation ---------------------------------------------------------------------


class Subclass(Tensor):
    pass


def in_a_mode(module: nn.Module, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return module(x)


PLAIN = {
    "in evaluation": lambda m, x: m.eval()(x),
    "of a subclass": lambda m, x: m(x.as_subclass(Subclass)).as_subclass(Tensor),
    "neither layout": lambda m, x: m(x.transpose(0, 1).contiguous().transpose(0, 1)),
    "forward mode": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "func.grad": lambda m, x: torch.func.grad(lambda x: m(x).square().sum())(x),
    "vmap": lambda m, x: torch.func.vmap(m)(x[None]),
    "vmap, turned": lambda m, x: torch.func.vmap(m)(x[None].to(memory_format=torch.channels_last_3d)),
    "a mode": in_a_mode,
    "negated lazily": lambda m, x: m(torch._neg_view(x)),
    "zeros without memory": lambda m, x: m(torch._efficientzerotensor(x.shape)),
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("Batch", how) for how in PLAIN),
        *(("Instance", how) for how in PLAIN if how not in ("in evaluation", "neither layout")),
    ],
)
def test_by_torch(kind: str, how: str, calls: list[str]) -> None:
    transforms = ("vmap", "vmap, turned", "func.grad", "forward mode")
    ours, theirs = pair(kind, **({"track_running_stats": False} if how in transforms else {}))
    x = image(2, 6, 5, 7)
    torch.testing.assert_close(PLAIN[how](ours, x), PLAIN[how](theirs, x), rtol=0, atol=0)
    assert calls == []


@pytest.mark.parametrize("odd", [torch._neg_view, lambda g: torch._efficientzerotensor(g.shape)])
def test_gradients_that_lie_in_no_memory(odd: Any) -> None:
    ours, theirs = pair()
    x, g = image(2, 6, 5, 7), torch.randn(2, 6, 5, 7)
    found, expected = ([x.clone().requires_grad_(), *m.parameters()] for m in (ours, theirs))
    grads = (torch.autograd.grad(m(of[0]), of, odd(g)) for m, of in ((ours, found), (theirs, expected)))
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_small_inputs_by_torch(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    x = image(2, 6, 5, 7)
    for name, size in {"input": x.numel(), "channel": 70, "pixels": 35}.items():
        monkeypatch.setitem(LEAST_NORM, name, size + 1)
        pair()[0](x)
        assert calls == []
        monkeypatch.setitem(LEAST_NORM, name, size)
        pair()[0](x)
        assert calls.pop() == "normalize"


def test_in_channels_last_an_input_is_small_up_to_four_times_as_many_elements(monkeypatch, calls: list[str]) -> None:
    x = image(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    for size, called in ((x.numel() // 4 + 1, []), (x.numel() // 4, ["normalize"])):
        monkeypatch.setitem(LEAST_NORM, "input", size)
        pair(channels=16)[0](x)
        assert calls == called


@pytest.mark.parametrize("shape", [(1, 6), (1, 6, 1), (2, 5, 4), (2, 6, 4, 4)], ids=str)
def test_torchs_errors(shape: tuple[int, ...]) -> None:
    """One value a channel, another number of channels, another rank."""
    ours, theirs = pair(d=1)
    said = []
    for module in (ours, theirs):
        with pytest.raises((ValueError, RuntimeError)) as seen:
            module(torch.zeros(shape))
        said.append((seen.type, str(seen.value)))
    assert said[0] == said[1]
    assert ours.num_batches_tracked == theirs.num_batches_tracked


def test_autocast(calls: list[str]) -> None:
    ours, theirs = pair()
    x = image(2, 6, 5, 7).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, want = ours(x), theirs(x)
    assert y.dtype is want.dtype
    torch.testing.assert_close(y, want)
    assert calls == ["normalize"]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("Instance", "aot_eager"),
        pytest.param("Batch", "aot_eager", marks=pytest.mark.slow),
        pytest.param("Batch", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(kind: str, backend: str, calls: list[str]) -> None:
    ours, theirs = pair(kind)
    torch._dynamo.reset()
    agree(torch.compile(ours, fullgraph=True, backend=backend), theirs, image(2, 6, 5, 7))
    assert calls == []


# ---- a module like any other ---------------------------------------------------------------------


def test_a_leaf_of_fx(calls: list[str]) -> None:
    ours, theirs = pair()
    x = image(2, 6, 5, 7)
    graph: Any = torch.fx.symbolic_trace(nn.Sequential(ours, nn.ReLU()))
    torch.testing.assert_close(graph(x), theirs(x).relu())
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert calls == ["normalize"]


# ---- instances ------------------------------------------------------------------------------------

OF_INSTANCES = [(2, 6, 50), (6, 50), (2, 6, 5, 7), (6, 5, 7), (1, 6, 5, 7), (2, 6, 3, 4, 5), (6, 3, 4, 5), (3, 1, 5, 7)]


@pytest.mark.parametrize("shape", OF_INSTANCES, ids=str)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_instances_as_in_torch(shape: tuple[int, ...], affine: bool, training: bool, calls: list[str]) -> None:
    d = {50: 1, 7: 2}.get(shape[-1], 3)
    ours, theirs = (m.train(training) for m in pair("Instance", d, shape[-1 - d], affine))
    agree(ours, theirs, image(*shape))
    assert calls == 2 * BOTH


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 6, 3, 4, 5)], ids=str)
def test_instances_in_channels_last(shape: tuple[int, ...], calls: list[str]) -> None:
    """The result is contiguous, as torch's is."""
    agree(*pair("Instance", len(shape) - 2), image(*shape, last=True))
    assert calls == 2 * BOTH


def test_one_image_in_channels_last_whose_gradient_is_wrong_in_torch(calls: list[str]) -> None:
    ours, theirs = pair("Instance")
    x, g = image(1, 6, 5, 7, last=True), image(1, 6, 5, 7, last=True)
    a, b = x.clone().requires_grad_(), x.double().contiguous().requires_grad_()
    ours(a).backward(g)
    theirs.double()(b).backward(g.double().contiguous())
    assert a.grad is not None
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)
    assert calls == BOTH


class Calls(nn.InstanceNorm2d):
    """A layer of a user's, as timm has them."""

    def forward(self, input: Tensor) -> Tensor:
        x = F.instance_norm(input, weight=self.weight, bias=self.bias, eps=self.eps)
        return F.relu(x, inplace=True)


NETS = {
    "modules": lambda: nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.ReLU()),
    "without parameters": lambda: nn.Sequential(nn.InstanceNorm2d(6), nn.SiLU(inplace=True)),
    "functions": lambda: Calls(6, affine=True),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("last", [False, True])
def test_activations_are_joined(net: str, last: bool, calls: list[str]) -> None:
    theirs = NETS[net]()
    ours = copy.deepcopy(theirs)
    x = image(2, 6, 5, 7, last=last)
    report = convgrad.accelerate_(ours)
    agree(ours, theirs, x)
    assert calls == 2 * BOTH
    y: Any = ours(x.requires_grad_())
    assert type(y) is Tensor
    assert "Normalization" in str(y.grad_fn)  # what activates it is no node of its own
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]


def test_a_default_device_changes_nothing(calls: list[str]) -> None:
    ours, theirs = (nn.Sequential(one, nn.ReLU()) for one in pair())
    with torch.device("cpu"):
        agree(ours, theirs, image(2, 6, 5, 7))
        y: Any = ours(image(2, 6, 5, 7).requires_grad_())
    assert "Normalization" in str(y.grad_fn)


def test_an_activation_in_place_copies_nothing(calls: list[str]) -> None:
    ours = pair("Instance")[0]
    y = ours(image(2, 6, 5, 7).requires_grad_()).mul_(2)
    with torch._C.DisableTorchFunctionSubclass():
        assert y.read().grad_fn.name() == "MulBackward0"  # of torch's own, a view, it is CopySlices
    assert calls == ["normalize"]


def test_running_statistics_of_instances_are_torchs(calls: list[str]) -> None:
    ours, theirs = pair("Instance", track_running_stats=True)
    x = image(2, 6, 5, 7)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert calls == []
    model = nn.Sequential(nn.InstanceNorm2d(6), nn.InstanceNorm2d(6, track_running_stats=True), nn.InstanceNorm2d(6))
    report = convgrad.accelerate_(model)
    assert report.left == {"1": "convgrad keeps no running statistics of instances"}
    assert "0 of 0 convolutions replaced, 2 of 3 normalizations" in report.summary


def test_torchs_errors_and_warnings_of_instances() -> None:
    for module in pair("Instance"):
        with pytest.raises(ValueError, match="expected input's size at dim=1"):
            module(torch.randn(2, 7, 5, 7))
        with pytest.raises(ValueError, match="expected 3D or 4D"):
            module(torch.randn(2, 6, 5, 7, 8))
    for module in pair("Instance", affine=False):
        with pytest.warns(UserWarning, match="does not match num_features"):
            module(torch.randn(2, 7, 5, 7))
