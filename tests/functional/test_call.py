"""Where a call is PyTorch's own, and where it must not be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import checkpoint

import convgrad
from convgrad.backends import _native_library
from convgrad.engine import rules

needs_native = pytest.mark.skipif(bool(_native_library.why_absent()), reason="needs the compiled CPU kernels")


def is_pytorchs(y: Tensor) -> bool:
    """Whether PyTorch's own autograd recorded the call."""
    assert y.grad_fn is not None
    return y.grad_fn.name() == "ConvolutionBackward0"


def operands(groups: int = 1, kernel: int = 3, channels: int = 8) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, channels, 6, 6, requires_grad=True)
    return x, torch.randn(channels, channels // groups, kernel, kernel, requires_grad=True)


@pytest.mark.parametrize(("groups", "kernel"), [(1, 1), (1, 3), (2, 3), (4, 3)])
def test_what_aten_computes_anyway_is_pytorchs_own(groups: int, kernel: int) -> None:
    x, w = operands(groups, kernel, 80 * groups)  # of 80 channels, which native cannot compute
    for _ in range(3):  # made, looked up, looked up without strides
        y = convgrad.conv2d(x, w, groups=groups)
        assert is_pytorchs(y)
        assert torch.equal(y, torch.conv2d(x, w, groups=groups))


def test_what_would_lose_something_is_not() -> None:
    x, w = operands()
    assert is_pytorchs(convgrad.conv2d(x, w))
    assert is_pytorchs(convgrad.conv2d(x, w.detach()))  # PyTorch keeps the input, which is small
    large = torch.randn(2, 8, 256, 256, requires_grad=True)
    assert not is_pytorchs(convgrad.conv2d(large, w.detach()))
    assert not is_pytorchs(convgrad.conv2d(x, w, padding=(0, 1, 0, 1)))  # it cannot state this
    with convgrad.use_backend("aten"):
        assert not is_pytorchs(convgrad.conv2d(x, w))  # its backward would not know the request
    assert not is_pytorchs(convgrad.conv2d(*operands(8), groups=8))  # depthwise: second derivatives
    assert not is_pytorchs(convgrad.conv2d(*operands(64, channels=128), groups=64))  # for the same reason


def test_the_first_layer_of_a_network_is_pytorchs_own() -> None:
    """Only the weight needs a gradient, and PyTorch keeps nothing that does not live anyway."""
    x, w = operands()
    assert is_pytorchs(convgrad.conv2d(x.detach(), w))
    assert is_pytorchs(convgrad.conv2d(x.detach(), w, torch.randn(8, requires_grad=True)))
    y = convgrad.conv2d(x.detach(), w)
    (found,) = torch.autograd.grad(y, w, torch.ones_like(y), create_graph=True)
    assert torch.equal(found, torch.autograd.grad(torch.conv2d(x.detach(), w), w, torch.ones_like(y))[0])


@needs_native
def test_another_number_of_threads_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is the fastest may depend on it: a plan that was made for one thread does not serve four."""

    def ruled(*_: Any) -> list[tuple[str, str]]:
        return [("native", "it has four threads")] if torch.get_num_threads() == 4 else []

    monkeypatch.setattr("convgrad.engine.choice.by_rule", ruled)
    x, w = torch.randn(2, 64, 20, 20), torch.randn(64, 8, 3, 3)
    seen = []
    for threads in (1, 4, 1):
        torch.set_num_threads(threads)
        with convgrad.trace() as ran:
            y = convgrad.conv2d(x, w, stride=2, groups=8)
        seen.append((ran.records[0].backend, y))
    assert [name for name, _ in seen] == ["aten", "native", "aten"]
    torch.testing.assert_close(seen[0][1], seen[1][1])


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "im2col", "aten"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_threads_that_change_between_calls_change_no_result(backend: str, layout: torch.memory_format) -> None:
    """Scratch memory is sized for the threads there are: what was prepared for one of them must not serve four."""
    x = torch.randint(-3, 4, (3, 16, 21, 19)).float().contiguous(memory_format=layout).requires_grad_()
    w = torch.randint(-3, 4, (16, 1, 3, 3)).float().requires_grad_()
    seen = []
    for threads in (1, 4, 2, 1):
        torch.set_num_threads(threads)
        with convgrad.use_backend(backend):
            y = convgrad.conv2d(x, w, padding=1, groups=16)
            seen.append((y, *torch.autograd.grad(y, (x, w), y.detach().sign())))
    assert all(torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later, strict=True))


def test_a_frozen_bias_changes_nothing() -> None:
    x, w = operands()
    assert is_pytorchs(convgrad.conv2d(x, w, torch.randn(8)))
    bias = torch.randn(8, requires_grad=True)
    for input, pytorchs in ((x.detach(), True), (torch.randn(2, 8, 256, 256), False)):
        bias.grad = None
        y = convgrad.conv2d(input, w.detach(), bias)
        assert is_pytorchs(y) is pytorchs
        y.sum().backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [y[:, 0].numel()] * 8


def test_a_bad_bias_is_refused_as_it_is_the_first_time() -> None:
    x, w = operands()
    for _ in range(3):
        assert is_pytorchs(convgrad.conv2d(x, w, torch.randn(8)))
    for recording in (True, False):
        with torch.set_grad_enabled(recording):
            with pytest.raises(convgrad.ShapeError, match=r"8 elements, but got bias of size \[7\]"):
                convgrad.conv2d(x, w, torch.randn(7))
            with pytest.raises(convgrad.ConvgradError, match="bias on meta"):
                convgrad.conv2d(x, w, torch.randn(8, device="meta"))


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_without_gradients_a_frozen_operand_makes_no_difference(groups: int) -> None:
    x, w = operands(groups)
    want = torch.conv2d(x.double(), w.double(), groups=groups).float().detach()
    with torch.no_grad():
        for first, second in ((x, w), (x.detach(), w), (x, w.detach())):
            for _ in range(2):
                y = convgrad.conv2d(first, second, groups=groups)
                assert y.grad_fn is None
                torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", [*itertools.product([True, False], repeat=3)], ids=str)
@pytest.mark.parametrize("sizes", [None, [8]])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_backward_gives_what_pytorch_gives(
    mask: tuple[bool, bool, bool], sizes: Any, groups: int, transposed: bool
) -> None:
    x, w = (t.detach().double() for t in operands(groups))
    arguments = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    go = torch.randn_like(torch.convolution(x, w, None, *arguments))
    want = torch.ops.aten.convolution_backward(go, x, w, [8], *arguments, mask)
    for _ in range(2):
        got = convgrad.convolution_backward(go, x, w, sizes, *arguments, mask)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("defaults", [("reference", None), (None, "reference")])
def test_the_choice_may_change_between_the_forwards_of_a_checkpoint(defaults: tuple[str | None, str | None]) -> None:
    """As measuring makes it change. For a first layer, PyTorch's own call would save one tensor more than ours."""
    x, w = operands()
    convgrad.set_default_backend(defaults[0])
    y: Any = checkpoint(lambda x: convgrad.conv2d(x, w), x.detach(), use_reentrant=False)
    convgrad.set_default_backend(defaults[1])
    y.sum().backward()
    (want,) = torch.autograd.grad(torch.conv2d(x, w).sum(), w)
    torch.testing.assert_close(w.grad, want)


def test_the_third_derivative_with_an_output_padding() -> None:
    """PyTorch's autograd has none, so it must not record the call."""
    x, w = (torch.randn(n, 2, k, k, dtype=torch.float64, requires_grad=True) for n, k in ((1, 4), (2, 3)))
    y: Tensor = convgrad.conv_transpose2d(x, w, None, 2, 1, 1)
    for _ in range(3):
        grads = torch.autograd.grad(y.pow(3).sum(), (x, w), create_graph=True)
        y = grads[0].pow(2).sum() + grads[1].pow(2).sum()
    assert y.isfinite()


def test_batched_gradients_of_a_function_of_the_users() -> None:
    weight = torch.randn(4, 1, 3, 3)

    class Blur(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
            return convgrad.conv2d(g, weight, None, 1, 1, 1, 4)

    x, cotangents = torch.randn(2, 4, 9, 9, requires_grad=True), torch.randn(3, 2, 4, 9, 9)
    (found,) = torch.autograd.grad(Blur.apply(x), x, cotangents, is_grads_batched=True)
    for one, g in zip(found, cotangents, strict=True):
        torch.testing.assert_close(one, torch.conv2d(g, weight, None, 1, 1, 1, 4))


def test_a_batched_gradient_as_the_third_operand() -> None:
    x, weight, grad_output = torch.randn(2, 4, 9, 9), torch.randn(4, 1, 3, 3), torch.randn(2, 4, 7, 7)
    arguments: Any = (None, 1, 0, 1, False, 0, 4, (True, True, False))

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return b * 1, w * 1

        @staticmethod
        def backward(ctx: Any, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
            return gradients(convgrad, b, w)

    def gradients(of: Any, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        grad_input = of.convolution_backward(grad_output, x, w, *arguments)[0]
        return of.conv2d(x, weight, b, groups=4).sum((0, 2, 3)), grad_input.sum() * w

    gradients(convgrad, torch.randn(4), weight)  # the plans are there now
    leaves = [torch.randn(4, requires_grad=True), weight.clone().requires_grad_()]
    cotangents = [torch.randn(3, 4), torch.randn(3, 4, 1, 3, 3)]
    found = torch.autograd.grad(Fn.apply(*leaves), leaves, cotangents, is_grads_batched=True)
    for *got, b, w in zip(*found, *cotangents, strict=True):
        torch.testing.assert_close(tuple(got), gradients(convgrad, b, w))


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
@pytest.mark.parametrize(
    ("d", "options"),
    [
        (1, {"padding": "same", "padding_mode": "reflect"}),
        (2, {}),
        (2, {"groups": 2, "dilation": 2}),
        (3, {"groups": 2, "padding": 1, "padding_mode": "circular"}),
    ],
)
def test_the_class_of_a_parameter_has_its_own_rules(d: int, options: dict[str, Any], frozen: str | None) -> None:
    """PyTorch's expanded weights know its functions, and no others."""
    ours: Any = getattr(convgrad.nn, f"Conv{d}d")(4, 4, 3, **options)
    theirs: Any = getattr(torch.nn, f"Conv{d}d")(4, 4, 3, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 4, *(9,) * d)
    for layer in (ours, theirs):
        if frozen:
            layer.get_parameter(frozen).requires_grad_(False)
        call_for_per_sample_grads(layer)(x).square().sum().backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name != frozen:
            torch.testing.assert_close(p.grad_sample, q.grad_sample)


def test_autocast_casts_a_weight_once_where_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps the cast weight until the block ends; each call of ours would keep another."""
    monkeypatch.setattr(rules, "TABLE", {})
    x, w = torch.randn(2, 23, 5, 5, requires_grad=True), torch.randn(23, 23, 3, 3, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16):
        convgrad.conv2d(x, w, None, 1, 1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            results = [convgrad.conv2d(x, w, None, 1, 1) for _ in range(3)]
    assert len({t.data_ptr() for t in kept if t.shape == w.shape}) == 1
    for y in results:
        assert y.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["conv1d", "conv3d", "conv_transpose2d"])
def test_autocast_where_pytorch_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "TABLE", {})
    d = int(name[-2])
    x, w = torch.randn(2, 22, *(6,) * d, requires_grad=True), torch.randn(22, 11, *(3,) * d, requires_grad=True)
    raw: Any = (None, 2, 1, 1, 2, 2) if "transpose" in name else (None, 2, 1, 2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            y, expected = getattr(convgrad, name)(x, w, *raw), getattr(F, name)(x, w, *raw)
            assert (y.dtype, y.stride()) == (expected.dtype, expected.stride())
            torch.testing.assert_close(y, expected, rtol=0.05, atol=0.1)
            ours, theirs = (torch.autograd.grad(t.float().square().sum(), (x, w)) for t in (y, expected))
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.5)
