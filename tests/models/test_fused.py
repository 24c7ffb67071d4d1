"""Normalizations and activations of accelerated models: whatever the forward does, the results are stock's.

`tests/nn/test_deferred.py` has every function that may read a normalization; here are the modules that call them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import convgrad
from tests.copies import copies
from tests.models.joining import agree, pair
from tests.norms import NEEDS_KERNELS, watch

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the backward passes that our kernels computed."""
    seen: list[str] = []
    watch(monkeypatch, "normalization_gradients", lambda *args: seen.append(args[-1]))
    return seen


class Block(nn.Module):
    """A forward of the user's that calls both, by default the activation twice."""

    def __init__(self, activation: Any, use: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.conv, self.norm, self.activation = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), activation
        self.use, self.flag = use, False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = self.norm(self.conv(x))
        return self.activation(self.activation(y) - scale) if self.use is None else self.use(self, y)


class Activated(nn.BatchNorm2d):
    """The activation is its own, as that of timm's BatchNormAct2d."""

    def __init__(self, activation: Any) -> None:
        super().__init__(3)
        self.drop, self.act = nn.Identity(), activation

    def given(self) -> tuple[Any, ...]:
        return self.running_mean, self.running_var, self.weight, self.bias, self.training

    def forward(self, input: Tensor) -> Tensor:
        torch._assert(input.ndim == 4, f"{input.ndim}")
        return self.act(self.drop(F.batch_norm(input, *self.given(), eps=self.eps)))


class ActivatedTwice(Activated):
    def forward(self, input: Tensor) -> Tensor:
        x = F.batch_norm(input, *self.given())
        return self.act(F.batch_norm(self.act(x), *self.given()))


class Halved(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input)


class Crossed(nn.Module):
    """Two results wait for one activation, and one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.activation = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        return self.activation(self.one(self.activation(one) * self.activation(other)))


def by_function(activation: Any) -> Callable[[Tensor], Tensor]:
    function = {nn.ReLU: F.relu, nn.ReLU6: F.relu6, nn.SiLU: F.silu, nn.Hardswish: F.hardswish}[type(activation)]
    return partial(function, inplace=activation.inplace)


def layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), *between, nn.Conv2d(6, 2, 1))


BUILDS: dict[str, Callable[[Any], nn.Module]] = {
    "layers": layers,
    "an identity between": lambda activation: layers(nn.Identity(), activation),
    "modules in a forward": Block,
    "a function in a forward": lambda a: Block(by_function(a), lambda m, y: m.activation(y)),
    "a module in a normalization": Activated,
    "a function in a normalization": lambda activation: Activated(by_function(activation)),
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(True), nn.SiLU(True), nn.Hardswish()], ids=repr)
def test_an_activation_is_fused_in_any_forward(build: str, activation: nn.Module, fused: list[str]) -> None:
    ours, stock, report = pair(BUILDS[build](copy.deepcopy(activation)))
    for _ in range(3):
        agree(ours, stock)
    assert fused == [type(activation).__name__.lower()] * 3
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert repr(ours) == repr(stock)
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)
    ours.eval()
    stock.eval()
    agree(ours, stock)
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert [vars(m).keys() for m in ours.modules()] == [vars(m).keys() for m in stock.modules()]


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "two results at once": Crossed,
    "the function called twice": lambda: ActivatedTwice(nn.ReLU()),
    "a normalization of the user's": lambda: nn.Sequential(nn.Conv2d(3, 6, 1, bias=False), Halved(6), nn.ReLU()),
    "a graph of torch.fx": lambda: fx.symbolic_trace(layers(nn.ReLU())),
}


@pytest.mark.parametrize("why", OTHERS)
def test_other_forwards(why: str) -> None:
    ours, stock, _ = pair(OTHERS[why]().double())
    for _ in range(3):
        agree(ours, stock, torch.randn(2, 3, 9, 7, dtype=torch.float64))


FLAGGED: dict[str, Callable[[Any, Tensor], Any]] = {
    "no activation": lambda m, y: y if m.flag else m.activation(y),
    "another one": lambda m, y: (torch.neg if m.flag else m.activation)(y),
    "read before": lambda m, y: (m.flag and m.seen.append(y.detach().clone()), m.activation(y))[1],
    "read after": lambda m, y: m.activation(y) + (y if m.flag else 0.0),
    "kept": lambda m, y: (m.activation(y), m.flag and m.seen.append(y))[0],
}


@pytest.mark.parametrize("how", FLAGGED)
def test_a_flag_that_changes(how: str) -> None:
    ours, stock, _ = pair(Block(nn.ReLU(), FLAGGED[how]).double())
    for flag in (False, False, True, True, False, True, False):
        ours.flag = stock.flag = flag
        agree(ours, stock, torch.randn(2, 3, 9, 7, dtype=torch.float64))
    assert len(ours.seen) == len(stock.seen)
    for one, other in zip(ours.seen, stock.seen, strict=True):
        torch.testing.assert_close(one * 1, other * 1)


@pytest.mark.parametrize("which", ["norm", "activation"])
@pytest.mark.parametrize("how", ["forward", "compile", "wrapper"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own
def test_what_is_put_around_one_of_them_later(which: str, how: str) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()).double())
    x = torch.randn(2, 3, 9, 7, dtype=torch.float64)
    agree(ours, stock, x)
    for model in (ours, stock):
        part = getattr(model, which)
        if how == "forward":
            part.forward = lambda x, run=part.forward: 2 * run(x)
        elif how == "compile":
            part.compile(backend="eager")
        else:
            setattr(model, which, torch.compile(part, backend="eager"))
    agree(ours, stock, x)


def test_a_function_that_someone_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's profiler of operations does."""
    ours, stock, _ = pair(layers(nn.SiLU()))
    agree(ours, stock)
    monkeypatch.setattr(F, "silu", partial(F.silu))
    agree(ours, stock)


@pytest.mark.parametrize("which", ["norm", "activation"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_sees_what_it_always_saw(which: str, kind: str) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    seen: list[list[Tensor]] = []
    agree(ours, stock)
    for model in (ours, stock):
        seen.append([])

        def hook(module: nn.Module, *tensors: Any, to: list[Tensor] = seen[-1]) -> None:
            to.extend(t for given in tensors for t in (given if isinstance(given, tuple) else (given,)))

        getattr(getattr(model, which), f"register_{kind}_hook")(hook)
    agree(ours, stock)
    torch.testing.assert_close(*[[t * 1 for t in each] for each in seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [Block, Activated])
def test_copies_and_pickles(build: Any, fused: list[str]) -> None:
    ours, stock, _ = pair(build(nn.SiLU()))
    for twin in copies(ours):
        agree(twin, copy.deepcopy(stock))
        assert fused.pop() == "silu"
        assert type(twin) is type(ours)


@pytest.mark.parametrize("frozen", ["all", "conv", "norm"])
def test_frozen_parameters(frozen: str, fused: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    for model in (ours, stock):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen != "all" and not name.startswith(frozen))
    agree(ours, stock)
    with torch.no_grad():
        x = torch.randn(2, 3, 9, 7)
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    assert fused == ["silu"]


def test_autocast_checkpoints_and_transforms(fused: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, rtol=0.1, atol=0.5)
    x = torch.randn(2, 3, 9, 7)
    for reentrant in (False, True):
        by_checkpoint = partial(checkpoint, use_reentrant=reentrant)
        agree(ours, stock, x, by_checkpoint, rtol=1e-3, atol=1e-3)
    assert set(fused) == {"silu"}
    for norm in (ours.norm, stock.norm):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    for call in (
        lambda model: torch.func.jvp(model, (x,), (x,)),
        lambda model: torch.func.vmap(model)(x[None]),
        lambda model: torch.fx.symbolic_trace(model, {"scale": 1.0})(x),
    ):
        torch.testing.assert_close(call(ours), call(stock), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled(fused: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock)
    assert fused == []


def test_a_model_that_was_compiled_and_run_before() -> None:
    compiled = torch.compile(layers(nn.ReLU()), backend="eager")
    x = torch.randn(2, 3, 9, 7)
    want = compiled(x)
    report = convgrad.accelerate_(compiled, example_inputs=x, only_gains=False)
    assert report.counts == ((2, 2), (1, 1), (0, 0))
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
