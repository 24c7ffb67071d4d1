"""`accelerate_` runs no forward of the model: what lives outside of it, and its own tensors, are as before."""

from __future__ import annotations

import math
from typing import Any

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
    assert done.rows() == plan.rows()
    assert [d.name for d in done.decisions] == ["0", "1", "3"]


def test_a_second_time_it_says_that_all_is_done() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=32))
    convgrad.accelerate_(model, only_gains=False)
    again = convgrad.accelerate_(model)
    assert again.summary.startswith("0 of 2 convolutions replaced (2 already), 0 of 1 normalizations (1 already);")
