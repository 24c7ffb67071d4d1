"""Explanations of accelerated models: they name what a training step runs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad
from convgrad.backends.reference import ReferenceBackend
from convgrad.diagnostics import ModelExplanation, layer_ranges
from convgrad.engine import Event, observing, register
from convgrad.models import Usage, observe_aten
from convgrad.problem import ConvProblem
from tests.check.broken import around
from tests.norms import NEEDS_KERNELS

pytestmark = [NEEDS_KERNELS, pytest.mark.usefixtures("small_norms", "nothing_compiled")]


class Pads(nn.Module):
    """A convolution that strides, whose input is padded by a function or a module."""

    def __init__(self, by: str, conv: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.act, self.by = nn.BatchNorm2d(8), nn.SiLU(), by
        if by == "module":
            self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.conv = nn.Conv2d(8, 8, 3, 2, groups=8) if conv is None else conv

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin() if self.by == "without normalization" else self.act(self.norm(x))
        return self.conv(self.pad(x) if self.by == "module" else F.pad(x, (0, 1, 0, 1)))


class Same(nn.Conv2d):
    """Pads by itself."""

    def forward(self, input: Tensor) -> Tensor:
        x = F.pad(input, (0, 1, 0, 1))
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def same(norm: nn.Module) -> nn.Module:
    return nn.Sequential(norm, nn.ReLU(), Same(8, 8, 3, 2, groups=8))


class ReadTwice(Pads):
    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.act(self.norm(x)), (0, 1, 0, 1))
        return self.conv(x) + x.mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "function": (lambda: Pads("function"), "ih16 ph0:1"),
    "module": (lambda: Pads("module"), "ih16 ph0:1"),
    "own forward": (lambda: same(nn.BatchNorm2d(8)), "ih16 ph0:1"),
    "instance norm": (lambda: same(nn.InstanceNorm2d(8, affine=True)), "ih16 ph0:1"),
    "circular": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode="circular"), "ih16 ph1"),
    "read twice": (lambda: ReadTwice("function"), "ih17 ph0"),
    "no normalization": (lambda: Pads("without normalization"), "ih17 ph0"),
    "PyTorch computes": (lambda: Pads("function", nn.Conv2d(8, 32, 3, 2)), "ih17 ph0"),
    "evaluation": (lambda: Pads("function").eval(), "ih17 ph0"),
    "frozen": (lambda: Pads("function").requires_grad_(False), "ih17 ph0"),
}


def explained(model: nn.Module, x: Tensor) -> dict[ConvProblem, dict[Any, str]]:
    found = convgrad.explain(model, x)
    each = [layer.explanation for layer in found] if isinstance(found, ModelExplanation) else [found]
    return {e.problem.replace(name=""): {o: b for o, b in e.chosen().items() if o != "grad_bias"} for e in each}


def ran(model: nn.Module, x: Tensor) -> dict[ConvProblem, dict[Any, str]]:
    """The second step's calls."""
    seen: dict[ConvProblem, dict[Any, str]] = {}

    def note(event: Event) -> None:
        outputs = {o: event.backend for o in event.outputs if o != "grad_bias"}
        seen.setdefault(event.problem.replace(has_bias=True), {}).update(outputs)

    for _ in range(2):
        seen.clear()
        with convgrad.takeover(), observing(note):
            y = model(x)
            if y.requires_grad:
                y.sum().backward()
    return seen


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("which", MODELS)
def test_padding_that_a_kernel_reads_is_in_the_problem(which: str, before: bool, device: str) -> None:
    build, words = MODELS[which]
    model = build()
    convgrad.accelerate_(model, only_gains=False)
    x = torch.randn(2, 8, 16, 16)
    if before:
        ran(model, x)
    state = copy.deepcopy(model.state_dict())
    found = explained(model, x.to(device))
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert all(word in str(problem) for problem in found for word in words.split())
    seen = ran(model, x.requires_grad_(which != "frozen"))
    assert found.keys() == seen.keys()
    for problem, outputs in seen.items():
        assert {o: found[problem][o] for o in outputs} == outputs


@pytest.fixture
def pads() -> nn.Module:
    model = Pads("function")
    convgrad.accelerate_(model, only_gains=False)
    return model


def test_a_registered_kernel_that_takes_the_padding(pads: nn.Module) -> None:
    def against(_: Any, problem: ConvProblem, *__: Any) -> list[str]:
        return [] if problem.padding == ((0, 1), (0, 1)) else ["only of padding at the end"]

    kernel = around(ReferenceBackend, lambda kernel, *_: kernel, name="at_the_end", reasons_against=against)
    register(kernel, preferred=True)
    for seen in (explained, ran):
        (outputs,) = seen(pads, torch.randn(2, 8, 16, 16)).values()
        assert set(outputs.values()) == {"at_the_end"}


def test_a_profile_names_the_layer_of_a_problem_with_padding(pads: nn.Module) -> None:
    with layer_ranges(), observe_aten(), Usage() as usage:
        pads(torch.randn(2, 8, 16, 16))
    (row,) = usage.rows
    assert row.layers == ("conv",)
    assert "ph0:1" in row.problem


def test_another_machine_reads_the_padded_input(pads: nn.Module) -> None:
    for device in ("h100 cudnn 9.10", "cpu arm"):
        assert "ih17" in str(convgrad.explain(pads, torch.empty(2, 8, 16, 16, device="meta"), device=device))
