"""Instance normalization modules: torch's semantics, its results up to rounding, and who computes a call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad
from tests.nn.test_batch_norm import BOTH, PLAIN, agree, calls, image
from tests.norms import NEEDS_KERNELS

__all__ = ["calls"]  # a fixture
pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]

SHAPES = [(2, 6, 50), (6, 50), (2, 6, 5, 7), (6, 5, 7), (1, 6, 5, 7), (2, 6, 3, 4, 5), (6, 3, 4, 5), (3, 1, 5, 7)]


def pair(d: int = 2, channels: int = 6, affine: bool = True, **options: Any) -> tuple[Any, Any]:
    theirs = getattr(nn, f"InstanceNorm{d}d")(channels, affine=affine, **options)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours = getattr(convgrad.nn, f"InstanceNorm{d}d")(channels, affine=affine, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_as_in_torch(shape: tuple[int, ...], affine: bool, training: bool, calls: list[str]) -> None:
    d = {50: 1, 7: 2}.get(shape[-1], 3)
    ours, theirs = (m.train(training) for m in pair(d, shape[-1 - d], affine))
    agree(ours, theirs, image(*shape))
    assert calls == 2 * BOTH


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (2, 6, 3, 4, 5)], ids=str)
def test_channels_last(shape: tuple[int, ...], calls: list[str]) -> None:
    """The result is contiguous, as torch's is."""
    ours, theirs = pair(len(shape) - 2)
    agree(ours, theirs, image(*shape, last=True))
    assert calls == 2 * BOTH


def test_one_image_in_channels_last_whose_gradient_is_wrong_in_torch(calls: list[str]) -> None:
    ours, theirs = pair()
    x, g = image(1, 6, 5, 7, last=True), image(1, 6, 5, 7, last=True)
    a, b = x.clone().requires_grad_(), x.double().contiguous().requires_grad_()
    ours(a).backward(g)
    theirs.double()(b).backward(g.double().contiguous())
    assert a.grad is not None
    torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)
    assert calls == BOTH


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes(dtype: torch.dtype, wide: bool, calls: list[str]) -> None:
    ours, theirs = (m.to(torch.float32 if wide else dtype) for m in pair())
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
    for one, other, like in zip((y, *found), (want, *expected), (x, x, *theirs.parameters()), strict=True):
        assert one.dtype is like.dtype
        torch.testing.assert_close(one.double(), other, rtol=near, atol=near)
    assert calls == BOTH


def test_gradients_in_float64_to_the_second_order() -> None:
    ours = pair(channels=2)[0].double()
    x = image(2, 2, 3, 4, dtype=torch.float64).requires_grad_()

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x,))

    operands = (x, *(p.detach().requires_grad_() for p in ours.parameters()))
    assert torch.autograd.gradcheck(call, operands)
    assert torch.autograd.gradgradcheck(call, operands)


# ---- with the activation behind it ---------------------------------------------------------------


class Calls(nn.InstanceNorm2d):
    """A layer of a user's, as timm has them."""

    def forward(self, input: Tensor) -> Tensor:
        x = F.instance_norm(input, weight=self.weight, bias=self.bias, eps=self.eps)
        return F.relu(x, inplace=True)


NETS = {
    "modules": lambda: nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.ReLU()),
    "in place": lambda: nn.Sequential(nn.InstanceNorm2d(6, affine=True), nn.ReLU(inplace=True)),
    "SiLU": lambda: nn.Sequential(nn.InstanceNorm2d(6), nn.SiLU()),
    "functions": lambda: Calls(6, affine=True),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("last", [False, True])
def test_activations_are_joined(net: str, last: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_a_batch_nothing_is_joined(calls: list[str]) -> None:
    theirs = NETS["modules"]()
    ours = copy.deepcopy(theirs)
    convgrad.accelerate_(ours)
    agree(ours, theirs, image(6, 5, 7))
    assert calls == 2 * BOTH


def test_an_activation_in_place_copies_nothing(calls: list[str]) -> None:
    ours = pair()[0]
    y = ours(image(2, 6, 5, 7).requires_grad_()).mul_(2)
    with torch._C.DisableTorchFunctionSubclass():
        assert y.read().grad_fn.name() == "MulBackward0"  # of torch's own, a view, it is CopySlices
    assert calls == ["normalize"]


# ---- torch's own computation ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [*(how for how in PLAIN if how not in ("in evaluation", "neither layout")), "running statistics"]
)
def test_by_torch(how: str, calls: list[str]) -> None:
    ours, theirs = pair(track_running_stats=how == "running statistics")
    x = image(2, 6, 5, 7)
    call: Any = PLAIN.get(how, lambda m, x: m(x))
    torch.testing.assert_close(call(ours, x), call(theirs, x), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert calls == []


def test_which_are_replaced() -> None:
    model = nn.Sequential(nn.InstanceNorm2d(6), nn.InstanceNorm2d(6, track_running_stats=True), nn.InstanceNorm2d(6))
    report = convgrad.accelerate_(model)
    assert report.left == {"1": "convgrad keeps no running statistics of instances"}
    assert "0 of 0 convolutions replaced, 2 of 3 normalizations" in report.summary


def test_torchs_errors_and_warnings() -> None:
    for module in pair():
        with pytest.raises(ValueError, match="expected input's size at dim=1"):
            module(torch.randn(2, 7, 5, 7))
        with pytest.raises(ValueError, match="expected 3D or 4D"):
            module(torch.randn(2, 6, 5, 7, 8))
    for module in pair(affine=False):
        with pytest.warns(UserWarning, match="does not match num_features"):
            module(torch.randn(2, 7, 5, 7))


def test_a_leaf_of_fx(calls: list[str]) -> None:
    ours, theirs = pair()
    x = image(2, 6, 5, 7)
    graph: Any = torch.fx.symbolic_trace(nn.Sequential(ours, nn.ReLU()))
    torch.testing.assert_close(graph(x), theirs(x).relu())
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert calls == ["normalize"]


def test_compiled(calls: list[str]) -> None:
    ours, theirs = pair()
    x = image(2, 6, 5, 7)
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(x), theirs(x))
    assert calls == []
