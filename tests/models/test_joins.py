"""Batch normalization joined with its activation: only where nothing else sees what lies between them."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import random
import warnings
import weakref
from functools import partial
from typing import Any

import numpy as np
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
    LEFT,
    Activated,
    Block,
    Checkpointing,
    Drawing,
    FlaggedChoice,
    FlaggedFunction,
    FunctionInPlace,
    Method,
    MethodInPlace,
    OfSizes,
    Optional,
    Padded,
    Rebound,
    Remembering,
    called,
    called_in_norm,
    layers,
    with_identity,
)
from tests.models.joining import agree, pair
from tests.norms import NEEDS_KERNELS, watch

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms")]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations that a kernel of ours computed, of calls forward."""
    seen: list[str] = []
    watch(monkeypatch, "normalize", lambda *args: seen.append(args[-1]))
    return seen


@pytest.mark.parametrize("build", [Block, OfSizes, Padded])  # traced, refused by the tracer, in several tries
def test_it_is_freed_with_the_last_reference(build: Any) -> None:
    """The frames that tracing had looked at kept it, and what its callers held, until garbage was collected."""
    gc.collect()
    gc.disable()
    try:
        model = build(nn.ReLU())
        left = [weakref.ref(t) for t in (model, next(model.parameters()))]
        convgrad.accelerate_(model)
        del model
        assert [there() for there in left] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "build", [layers, with_identity, Block, Padded, Optional, Rebound, Activated, called, called_in_norm]
)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_nothing_is_different(build: Any, activation: nn.Module, joined: list[str]) -> None:
    ours, stock, report = pair(build(copy.deepcopy(activation)))
    agree(ours, stock)
    assert joined == [type(activation).__name__.lower()]
    assert sum("with" in what and "F.pad" not in what for what in report.replaced.values()) == 1
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert repr(ours) == repr(stock)
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward)
    ours.eval()
    stock.eval()
    agree(ours, stock)
    report.restore()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert [vars(m).keys() for m in ours.modules()] == [vars(m).keys() for m in stock.modules()]


class Keyword(Block):
    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(self.norm(input=self.conv(x)))


def test_an_input_given_by_keyword(joined: list[str]) -> None:
    agree(*pair(Keyword(nn.ReLU()))[:2])
    assert joined == ["relu"]


@pytest.mark.parametrize("why", LEFT)
def test_left_alone(why: str, joined: list[str]) -> None:
    ours, stock, _ = pair(LEFT[why]())
    agree(ours, stock)
    assert set(joined) == {""}
    assert not hasattr(ours, "_convgrad_pairs")


def test_looking_for_them_draws_no_random_numbers() -> None:
    model, x, drawn = Drawing(nn.ReLU()), torch.randn(2, 3, 9, 7), []
    for accelerate in (lambda: None, lambda: convgrad.accelerate_(model, example_inputs=x, only_gains=False)):
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        accelerate()
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_looking_for_them_changes_no_module(joined: list[str]) -> None:
    ours, stock, _ = pair(Remembering(nn.ReLU()))
    assert (ours.memory.kept, ours.memory.count) == ([], 0)
    agree(ours, stock)
    assert joined == ["relu"]


def test_a_module_without_a_pair_in_training_is_not_traced_in_evaluation() -> None:
    modes: list[bool] = []

    class Alone(nn.Sequential):
        def forward(self, x: Any) -> Any:
            modes.append(self.training)
            return self[0](x)

    convgrad.accelerate_(Alone(nn.BatchNorm2d(8)), only_gains=False)
    assert modes == [True]


class Awaited(Block):
    async def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.activation(self.norm(self.conv(x)))


def test_looking_for_them_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        pair(Awaited(nn.ReLU()))
    assert not seen


def test_python_is_as_it_was_while_they_are_looked_for() -> None:
    """Dynamo, which `checkpoint` imports, looks functions of `math` up by what they are when it is imported."""
    log, seen = math.log, []

    class Watching(Block):
        def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
            seen.append(math.log)
            return super().forward(x, scale)

    pair(Watching(nn.ReLU()))
    assert set(seen) == {log}


@pytest.mark.parametrize("which", ["norm", "activation"])
@pytest.mark.parametrize("how", ["forward", "compile", "wrapper"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile's own
def test_what_is_put_around_one_of_them_later(which: str, how: str, joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()).double())
    for model in (ours, stock):
        part = getattr(model, which)
        if how == "forward":
            part.forward = lambda x, run=part.forward: 2 * run(x)
        elif how == "compile":
            part.compile(backend="eager")
        else:
            setattr(model, which, torch.compile(part, backend="eager"))
    agree(ours, stock, torch.randn(2, 3, 9, 7, dtype=torch.float64))
    assert set(joined) <= {""}


@pytest.mark.parametrize("build", [Method, MethodInPlace, FunctionInPlace])
def test_a_method_that_is_called(build: Any, joined: list[str]) -> None:
    ours, stock, _ = pair(build(nn.Identity()))
    agree(ours, stock)
    assert joined == ["relu"]
    assert type(ours(torch.randn(2, 3, 9, 7))) is Tensor


def test_a_function_that_someone_wraps(joined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed's profiler of operations does; torch passes the wrapper on, for it looks the function up by name."""
    ours, stock, _ = pair(called(nn.SiLU()))
    monkeypatch.setattr(F, "silu", partial(F.silu))
    agree(ours, stock)
    assert joined == [""]


@pytest.mark.parametrize("change", ["hook", "layer"])
def test_what_lies_between_them_later(change: str, joined: list[str]) -> None:
    ours, stock, _ = pair(Activated(nn.SiLU()))
    for model in (ours, stock):
        if change == "hook":
            model.drop.register_forward_hook(lambda module, inputs, output: output + 1)
        else:
            model.drop = nn.Tanh()
    agree(ours, stock)
    assert joined == [""]


@pytest.mark.parametrize("which", ["norm", "activation"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_sees_what_it_always_saw(which: str, kind: str, joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    seen: list[list[Tensor]] = []
    for model in (ours, stock):
        seen.append([])

        def hook(module: nn.Module, *tensors: Any, to: list[Tensor] = seen[-1]) -> None:
            to.extend(t for given in tensors for t in (given if isinstance(given, tuple) else (given,)))

        getattr(getattr(model, which), f"register_{kind}_hook")(hook)
    agree(ours, stock)
    assert joined == [""]
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [Block, Activated])
def test_a_hook_on_all_modules_sees_what_it_always_saw(build: Any, joined: list[str]) -> None:
    ours, stock, _ = pair(build(nn.SiLU()))
    seen: list[Tensor] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(output))
    with handle:
        agree(ours, stock)
    torch.testing.assert_close(seen[: len(seen) // 2], seen[len(seen) // 2 :], rtol=1e-4, atol=1e-4)
    assert joined == [""]


class Weighted(Block):
    """It has a weight of its own."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__(activation)
        self.weight = nn.Parameter(torch.randn(3, 3, 1, 1))

    def forward(self, x: Tensor, scale: float = 0.0) -> Tensor:
        return self.activation(self.norm(self.conv(nn.functional.conv2d(x, self.weight))))


def test_a_parametrization_of_the_module_that_calls_both(joined: list[str]) -> None:
    model = Weighted(nn.ReLU())
    nn.utils.parametrizations.weight_norm(model)
    ours, stock, report = pair(model)
    agree(ours, stock)
    for model in (ours, stock):
        nn.utils.parametrize.remove_parametrizations(model, "weight")
    agree(ours, stock)
    assert joined == ["relu"] * 2
    report.restore()
    assert type(ours) is Weighted


def test_a_model_that_is_accelerated_again() -> None:
    ours, _, report = pair(Block(nn.ReLU()))
    again = convgrad.accelerate_(ours, only_gains=False)
    report.restore()
    again.restore()
    assert type(ours) is Block


def test_parts_by_themselves(joined: list[str]) -> None:
    """A slice, and modules that are called or replaced by someone else, know nothing of one another."""
    ours, stock, _ = pair(layers(nn.ReLU()))
    x = torch.randn(2, 3, 9, 7)
    torch.testing.assert_close(ours[:2](x), stock[:2](x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1](ours[0](x)), stock[1](stock[0](x)), rtol=1e-4, atol=1e-5)
    ours[2], stock[2] = nn.Tanh(), nn.Tanh()
    agree(ours, stock)
    assert set(joined) == {""}


def test_a_name_that_someone_gives_an_activation(joined: list[str]) -> None:
    ours, stock, _ = pair(layers(nn.ReLU()))
    ours[2]._name = "features.2"
    agree(ours, stock)
    assert joined == ["relu"]


def test_another_limit_of_relu6(joined: list[str]) -> None:
    ours, stock, _ = pair(layers(nn.ReLU6()))
    ours[2].max_val = stock[2].max_val = 0.5
    agree(ours, stock)
    assert joined == [""]


@pytest.mark.parametrize("build", FLAGGED)
def test_a_flag_that_is_set_later(build: Any) -> None:
    ours, stock, _ = pair(build(nn.ReLU()).double())
    ours.flag = stock.flag = True
    agree(ours, stock, torch.randn(2, 3, 9, 7, dtype=torch.float64))
    torch.testing.assert_close(ours.seen, stock.seen)


@pytest.mark.parametrize("build", [FlaggedChoice, FlaggedFunction])
def test_a_forward_that_changed_is_an_error(build: Any) -> None:
    ours, _, _ = pair(build(nn.ReLU()))
    ours.flag = True
    with pytest.raises(RuntimeError, match=f"forward of {build.__name__} has changed"):
        ours(torch.randn(2, 3, 9, 7))
    ours.flag = False
    ours(torch.randn(2, 3, 9, 7))


def test_a_forward_that_is_edited_and_reloaded() -> None:
    """As by autoreload in a notebook, or between pickling and unpickling; what stands before the change stays there."""

    def before(self: Any, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.activation(y) + x.sum()

    def after(self: Any, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.activation(y) + y.sum()

    cls = type("Edited", (Block,), {"forward": before})
    ours, stock, _ = pair(cls(nn.ReLU()).double())
    before.__code__ = after.__code__.replace(co_name="before", co_firstlineno=before.__code__.co_firstlineno)
    agree(ours, stock, torch.randn(2, 3, 9, 7, dtype=torch.float64))


def test_another_layer_in_the_place_of_an_activation() -> None:
    ours, stock, _ = pair(layers(nn.ReLU()))
    for model in (ours, stock):
        del model[2]
    agree(ours, stock)


@pytest.mark.parametrize("build", [layers, Block, Activated])
def test_copies_and_pickles(build: Any, joined: list[str]) -> None:
    ours, stock, _ = pair(build(nn.SiLU()))
    for twin in copies(ours):
        agree(twin, copy.deepcopy(stock))
        assert joined.pop() == "silu"
        assert type(twin) is type(ours)


@pytest.mark.parametrize("frozen", ["all", "conv", "norm"])
def test_frozen_parameters(frozen: str, joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    for model in (ours, stock):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen != "all" and not name.startswith(frozen))
    agree(ours, stock)
    with torch.no_grad():
        x = torch.randn(2, 3, 9, 7)
        torch.testing.assert_close(ours(x), stock(x), rtol=1e-4, atol=1e-5)
    assert joined == ["silu"] * 2


@pytest.mark.parametrize("activation", ACTIVATIONS[::2], ids=repr)
def test_second_derivatives(activation: nn.Module, joined: list[str]) -> None:
    ours, stock, _ = pair(Rebound(activation).double())
    x, results = torch.randn(2, 3, 4, 3, dtype=torch.float64), []
    for model in (ours, stock):
        a = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(a).square().sum(), a, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), (a, *model.parameters())))
    torch.testing.assert_close(*results)
    assert joined == [type(activation).__name__.lower()]


def test_a_checkpoint_in_the_forward_itself(joined: list[str]) -> None:
    """It must save the same tensors when it computes again."""
    agree(*pair(Checkpointing(nn.SiLU()))[:2])
    assert set(joined) == {""}


def test_autocast_checkpoints_and_transforms(joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    with torch.autocast("cpu", torch.bfloat16):
        agree(ours, stock, rtol=0.1, atol=0.5)
    x = torch.randn(2, 3, 9, 7)
    for model in (ours, stock):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert set(joined) == {"silu"}
    joined.clear()
    for norm in (ours.norm, stock.norm):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    one, other = (torch.func.jvp(model, (x,), (x,)) for model in (ours, stock))
    torch.testing.assert_close(one, other)
    one, other = (torch.func.vmap(model)(x[None]) for model in (ours, stock))
    torch.testing.assert_close(one, other)
    one, other = (torch.fx.symbolic_trace(model, {"scale": 1.0})(x) for model in (ours, stock))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert set(joined) <= {""}


@pytest.mark.slow
def test_compiled(joined: list[str]) -> None:
    ours, stock, _ = pair(Block(nn.SiLU()))
    torch._dynamo.reset()
    agree(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock)
    assert joined == []
