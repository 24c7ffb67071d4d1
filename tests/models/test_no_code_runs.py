"""`accelerate_` runs no forward of the model: what lives outside of it, and its own tensors, are as before."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import convgrad

CACHE: dict[str, Any] = {}


@functools.cache
def window(n: int) -> Tensor:
    CACHE["windows"] = CACHE.get("windows", 0) + 1
    return torch.hann_window(n)


class Keeps(nn.Module):
    """Keeps and updates things wherever a forward can: on its class and instance, in a module, a cache, a hook."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(3, 32, 3, padding=1)
        self.norm, self.depthwise = nn.BatchNorm2d(32), nn.Conv2d(32, 32, 3, 2, groups=32)
        self.depthwise.register_forward_pre_hook(self.clip)

    @staticmethod
    def clip(module: Any, args: Any) -> None:
        module.weight.data.clamp_(-0.2, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if not hasattr(self, "grid"):
            self.register_buffer("grid", torch.linspace(0, 1, x.shape[-1]).to(x), persistent=False)
        CACHE.setdefault("filter", torch.full((3, 1, 3, 3), 1 / 9).to(x))
        scale = CACHE.setdefault("scale", 1 / math.sqrt(x.shape[-1] * x.shape[-2]))
        with torch.no_grad():  # a momentum encoder
            for slow, fast in zip(self.other.parameters(), self.conv.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
                fast.data = 0.999 * fast.data
        x = F.conv2d(F.pad(x * window(x.shape[-1]) + self.grid, (1, 1, 1, 1)), CACHE["filter"], groups=3) * scale
        y = F.relu(self.norm(self.conv(x)))
        CACHE.setdefault("losses", []).append(y.mean())
        if self.training:
            y = y + 1e-3 * torch.randn_like(y)
        return self.depthwise(F.pad(y, (0, 1, 0, 1))) - self.other(x).mean()


@pytest.fixture
def model() -> Keeps:
    CACHE.clear()
    window.cache_clear()
    Keeps.calls = 0
    return Keeps()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"example_inputs": torch.ones(2, 3, 16, 16)}, {"dry_run": True}], ids=list)
@pytest.mark.parametrize("memory_format", [None, "channels_last", "auto"])
def test_nothing_runs_and_nothing_changes(model: Any, options: dict[str, Any], memory_format: str | None) -> None:
    if memory_format == "auto" and "example_inputs" in options:
        pytest.skip("runs copies")
    before, attributes, state = values(model), {*vars(model)}, torch.get_rng_state()
    report = convgrad.accelerate_(model, memory_format, only_gains=False, **options)
    assert (Keeps.calls, CACHE) == (0, {})
    assert {*vars(model)} == attributes
    assert unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert report.counts[0] == (3, 3)
    report.restore()
    assert unchanged(model, before)


def test_a_model_that_keeps_things_trains_as_stock(model: Any) -> None:
    stock, results = copy.deepcopy(model), []
    convgrad.accelerate_(model, only_gains=False)
    for each in (model, stock):
        CACHE.clear()
        torch.manual_seed(2)
        found: list[Tensor] = []
        for _ in range(3):
            each.zero_grad()
            y = each(torch.randn(2, 3, 20, 20))
            y.square().mean().backward()
            found += [y.detach(), *(p.grad.clone() for p in each.parameters() if p.grad is not None)]
        found += [each.eval()(torch.ones(2, 3, 20, 20)).detach(), *each.state_dict().values(), *CACHE["losses"]]
        assert {type(t) for t in (*CACHE["losses"], CACHE["filter"])} == {Tensor}
        results.append(found)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("brief_trial")
def test_auto_with_example_inputs_runs_copies_alone(model: Any) -> None:
    before = values(model)
    x, state = torch.randn(2, 3, 16, 16), torch.get_rng_state()
    convgrad.accelerate_(model, "auto", example_inputs=x).restore()
    assert torch.equal(torch.get_rng_state(), state)
    assert unchanged(model, before)
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


def test_a_layer_named_like_a_method_of_modules_is_found():
    model = torch.nn.Module()
    model.double = torch.nn.Conv2d(8, 8, 3, groups=8)
    report = convgrad.accelerate_(model)
    assert isinstance(model._modules["double"], convgrad.nn.Conv2d)
    report.restore()
    assert type(model._modules["double"]) is torch.nn.Conv2d
