"""`accelerate_` runs no forward of the model: what lives outside of it, and its own tensors, are as before."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import convgrad

CACHE: dict[str, Any] = {}


class Watched(nn.Module):
    """Counts its calls where nothing that is copied can see it."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(3, 32, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(32), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        CACHE.setdefault("filter", torch.full((3, 1, 3, 3), 1 / 9).to(x))
        CACHE.setdefault("scale", 1 / math.sqrt(x.shape[-1] * x.shape[-2]))
        with torch.no_grad():
            for slow, fast in zip(self.other.parameters(), self.conv.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        x = F.conv2d(F.pad(x, (1, 1, 1, 1)), CACHE["filter"], groups=3) * CACHE["scale"]
        CACHE.setdefault("losses", []).append(x.mean())
        return self.act(self.norm(self.conv(x))) - self.other(x)


@pytest.mark.parametrize("options", [{}, {"example_inputs": torch.ones(2, 3, 16, 16)}, {"dry_run": True}], ids=list)
@pytest.mark.parametrize("memory_format", [None, "channels_last", "auto"])
def test_nothing_runs_and_nothing_changes(options: dict[str, Any], memory_format: str | None) -> None:
    if memory_format == "auto" and "example_inputs" in options:
        pytest.skip("runs copies")
    CACHE.clear()
    Watched.calls = 0
    model = Watched()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    report = convgrad.accelerate_(model, memory_format, only_gains=False, **options)
    assert (Watched.calls, CACHE) == (0, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert report.counts[0] == (2, 2)
    report.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert type(CACHE["filter"]) is Tensor


@pytest.mark.usefixtures("brief_trial")
def test_auto_with_example_inputs_runs_copies_alone() -> None:
    CACHE.clear()
    model = Watched()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, state = torch.randn(2, 3, 16, 16), torch.get_rng_state()
    convgrad.accelerate_(model, "auto", example_inputs=x).restore()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(type(loss) is Tensor for loss in CACHE["losses"])


class Counts(nn.Module):
    """A parametrization that must not run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight


@pytest.mark.parametrize("memory_format", [None, "auto"])
def test_a_parametrized_weight_is_not_computed(memory_format: str | None) -> None:
    model = nn.Sequential(nn.Conv2d(4, 32, 1), nn.Conv2d(32, 32, 3, groups=32), nn.Flatten(), nn.Linear(32 * 12, 5))
    counters = [Counts() for _ in range(4)]
    for name, counter in zip(("0", "1", "3"), counters, strict=False):
        parametrize.register_parametrization(model.get_submodule(name), "weight", counter)
    parametrize.register_parametrization(model[0], "bias", counters[3])
    before = [counter.calls for counter in counters]
    report = convgrad.accelerate_(model, memory_format)
    assert [counter.calls for counter in counters] == before
    assert "1" in report.replaced
    model(torch.randn(2, 4, 6, 5))
    assert all(counter.calls > n for counter, n in zip(counters, before, strict=True))


def test_a_dry_run_changes_nothing_and_says_what_would_be() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32))
    classes = [type(m) for m in model]
    plan = convgrad.accelerate_(model, "channels_last", only_gains=False, dry_run=True)
    assert [type(m) for m in model] == classes
    assert not model._forward_pre_hooks
    assert model[0].weight.is_contiguous()
    assert "2 of 2 convolutions would be replaced, 1 of 1 normalizations" in str(plan)
    done = convgrad.accelerate_(model, "channels_last", only_gains=False)
    assert done.decisions == plan.decisions
    assert [d.name for d in done.decisions] == ["0", "1", "3"]


def test_a_second_time_it_says_that_all_is_done() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32))
    convgrad.accelerate_(model, only_gains=False)
    again = convgrad.accelerate_(model)
    assert again.summary.startswith("0 of 2 convolutions replaced (2 already), 0 of 1 normalizations (1 already);")


# ---- wherever a forward keeps something, and whatever it updates ---------------------------------------


class Base(nn.Module):
    """Sizes that the kernels gain at, a normalization with an activation, and `F.pad`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32)
        self.depthwise = nn.Conv2d(32, 32, 3, 2, groups=32)

    def features(self, x: Tensor) -> Tensor:
        return self.depthwise(F.pad(F.relu(self.norm(self.conv(x))), (0, 1, 0, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


class OfClass(Base):
    """A cache on the class, by size."""

    scales: ClassVar[dict[Any, Any]] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.features(x)
        return y * self.scales.setdefault(tuple(y.shape[-2:]), 1 / math.sqrt(y.shape[-1] * y.shape[-2]))


class OfInstance(Base):
    """A buffer that is made, and an attribute that is counted, at the first call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not hasattr(self, "grid"):
            self.register_buffer("grid", torch.linspace(0, 1, x.shape[-1]).to(x), persistent=False)
        return self.features(x + self.grid)


KEPT: list[Any] = []


@functools.cache
def window(n: int) -> Tensor:
    KEPT.append(n)
    return torch.hann_window(n)


class Cached(Base):
    """A function with a cache."""

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x * window(x.shape[-1]))


def closed() -> nn.Module:
    """A cache in a closure, and a result that is kept."""
    kept: list[Tensor] = []

    class Closed(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.norm(self.conv(x)))
            kept[:] = [y]
            y = self.depthwise(F.pad(y, (0, 1, 0, 1)))
            return y + kept[0].mean()

    return Closed()


class InTraining(Base):
    """What only training does: a loss that is collected, noise, and weights that decay."""

    losses: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p in self.parameters():
                    p.mul_(0.999)
        y = self.features(x)
        if self.training:
            type(self).losses.append(y.square().mean())
            return y + 1e-3 * torch.randn_like(y)
        return y


class Momentum(Base):
    """Another network follows: by `lerp_`, by `copy_` of a dictionary, or by `data`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.target = how, Base().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        own = {n: p for n, p in self.named_parameters() if not n.startswith("target.")}
        with torch.no_grad():
            for name, p in self.target.named_parameters():
                if self.how == "lerp":
                    p.lerp_(own[name], 0.1)
                elif self.how == "data":
                    p.data = 0.9 * p.data + 0.1 * own[name].data
            if self.how == "dictionary":
                self.target.load_state_dict({**self.target.state_dict(), **{n: p.clone() for n, p in own.items()}})
            target = self.target(x)
        return self.features(x) - target


class ByHook(Base):
    """The update is in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise.register_forward_pre_hook(self.clip)

    @staticmethod
    def clip(module: Any, args: Any) -> None:
        module.weight.data.clamp_(-0.2, 0.2)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "a cache on the class": OfClass,
    "a buffer of the first call": OfInstance,
    "a function with a cache": Cached,
    "a closure": closed,
    "a branch of training": InTraining,
    **{f"a momentum encoder, {how}": functools.partial(Momentum, how) for how in ("lerp", "data", "dictionary")},
    "an update in a hook": ByHook,
}


@pytest.mark.parametrize("options", [{}, {"example_inputs": torch.ones(2, 3, 20, 20)}], ids=["", "examples"])
@pytest.mark.parametrize("which", PROGRAMS)
def test_what_a_forward_keeps_and_updates(which: str, options: dict[str, Any]) -> None:
    build = PROGRAMS[which]
    OfClass.scales.clear()
    InTraining.losses.clear()
    window.cache_clear()
    KEPT.clear()
    torch.manual_seed(1)
    stock = build()
    ours = copy.deepcopy(stock)
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    kept = set(vars(ours))
    report = convgrad.accelerate_(ours, only_gains=False, **options)
    assert (OfClass.scales, InTraining.losses, KEPT) == ({}, [], [])
    assert set(vars(ours)) == kept
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())
    report.restore()
    assert all(torch.equal(t, before[name]) for name, t in ours.state_dict().items())
    convgrad.accelerate_(ours, only_gains=False, **options)
    results: list[list[Tensor]] = []
    for model in (ours, stock):
        torch.manual_seed(2)
        found: list[Tensor] = []
        for _ in range(3):
            for size in (20, 24):
                model.zero_grad()
                x = torch.randn(2, 3, 20, size).requires_grad_(which != "a buffer of the first call")
                if which == "a buffer of the first call":
                    x = x[..., :20]
                y = model(x)
                y.square().mean().backward()
                found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.eval()
        found += [model(torch.ones(2, 3, 20, 20)).detach(), *model.state_dict().values()]
        results.append(found)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)
    assert all(type(loss) is Tensor for loss in InTraining.losses)
    assert all(type(scale) is float for scale in OfClass.scales.values())


def test_a_layer_named_like_a_method_of_modules_is_found():
    model = torch.nn.Module()
    model.double = torch.nn.Conv2d(8, 8, 3, groups=8)
    report = convgrad.accelerate_(model)
    assert isinstance(model._modules["double"], convgrad.nn.Conv2d)
    report.restore()
    assert type(model._modules["double"]) is torch.nn.Conv2d
