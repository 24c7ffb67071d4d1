"""Normalizations and activations of accelerated models: whatever the forward does, the results are stock's."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import convgrad
from tests.copies import copies
from tests.models.forwards import (
    ACTIVATIONS,
    FLAGGED,
    OTHERS,
    Activated,
    Block,
    Checkpointing,
    FunctionInPlace,
    Method,
    MethodInPlace,
    OfSizes,
    Optional,
    Padded,
    Rebound,
    called,
    called_in_norm,
    layers,
    with_identity,
)
from tests.models.joining import agree, pair
from tests.norms import NEEDS_KERNELS, watch

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of the backward passes that our kernels computed."""
    seen: list[str] = []
    watch(monkeypatch, "normalization_gradients", lambda *args: seen.append(args[-1]))
    return seen


BUILDS = [layers, with_identity, Block, Padded, Optional, Rebound, OfSizes, Activated, called, called_in_norm]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_an_activation_is_fused_in_any_forward(build: Any, activation: nn.Module, fused: list[str]) -> None:
    ours, stock, report = pair(build(copy.deepcopy(activation)))
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


@pytest.mark.parametrize("why", OTHERS)
def test_other_forwards(why: str) -> None:
    ours, stock, _ = pair(OTHERS[why]())
    for _ in range(3):
        agree(ours, stock)


@pytest.mark.parametrize("build", FLAGGED)
def test_a_flag_that_changes(build: Any) -> None:
    ours, stock, _ = pair(build(nn.ReLU()).double())
    for flag in (False, False, True, True, False, True, False):
        ours.flag = stock.flag = flag
        agree(ours, stock, torch.randn(2, 3, 9, 7, dtype=torch.float64))
    assert len(ours.seen) == len(stock.seen)
    for one, other in zip(ours.seen, stock.seen, strict=True):
        torch.testing.assert_close(one * 1, other * 1)


@pytest.mark.parametrize("build", [Method, MethodInPlace, FunctionInPlace])
def test_a_method_that_is_called(build: Any, fused: list[str]) -> None:
    ours, stock, _ = pair(build(nn.Identity()))
    agree(ours, stock)
    assert fused == ["relu"]
    assert type(ours(torch.randn(2, 3, 9, 7))) is Tensor


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
    ours, stock, _ = pair(called(nn.SiLU()))
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


def test_another_limit_of_relu6(fused: list[str]) -> None:
    ours, stock, _ = pair(layers(nn.ReLU6()))
    agree(ours, stock)
    ours[2].max_val = stock[2].max_val = 0.5
    agree(ours, stock)
    assert fused == ["relu6", ""]


def test_another_layer_in_the_place_of_an_activation() -> None:
    ours, stock, _ = pair(layers(nn.ReLU()))
    for change in (lambda model: None, lambda model: model.__setitem__(2, nn.Tanh()), lambda model: model.pop(2)):
        change(ours)
        change(stock)
        agree(ours, stock)


@pytest.mark.parametrize("build", [layers, Block, Activated])
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


def test_a_checkpoint_in_the_forward_itself(fused: list[str]) -> None:
    ours, stock, _ = pair(Checkpointing(nn.SiLU()))
    for _ in range(3):
        agree(ours, stock)
    assert fused == ["silu"] * 3


def test_autocast_checkpoints_and_transforms(fused: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, rtol=0.1, atol=0.5)
    x = torch.randn(2, 3, 9, 7)
    for reentrant in (False, True):
        for model in (ours, stock):
            model.zero_grad()
            a = x.clone().requires_grad_()
            y: Any = checkpoint(model, a, use_reentrant=reentrant)
            y.square().sum().backward()
        for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert set(fused) == {"silu"}
    for norm in (ours.norm, stock.norm):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    one, other = (torch.func.jvp(model, (x,), (x,)) for model in (ours, stock))
    torch.testing.assert_close(one, other)
    one, other = (torch.func.vmap(model)(x[None]) for model in (ours, stock))
    torch.testing.assert_close(one, other)
    one, other = (torch.fx.symbolic_trace(model, {"scale": 1.0})(x) for model in (ours, stock))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled(fused: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock)
    assert fused == []


def test_a_model_that_was_compiled_and_run_before() -> None:
    model = layers(nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 3, 9, 7)
    want = compiled(x)
    report = convgrad.accelerate_(compiled, example_inputs=x, only_gains=False)
    assert report.counts == ((2, 2), (1, 1), (0, 0))
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
    convgrad.conv2d(x, model[0].weight)
