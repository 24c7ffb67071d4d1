"""`convgrad.testing.check_backend` of functions and modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convgrad
from convgrad.testing import check_backend

QUICK = {"properties": ("exact", "bound"), "repeats": 2}


class Depthwise(torch.autograd.Function):
    """A forward and a backward written by hand; the sign of grad_weight is given."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, sign: int) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.sign = sign
        return F.conv2d(input, weight, padding=1, groups=len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        c = len(weight)
        return (
            torch.nn.grad.conv2d_input(input.shape, weight, grads[0], padding=1, groups=c),
            ctx.sign * torch.nn.grad.conv2d_weight(input, weight.shape, grads[0], padding=1, groups=c),
            None,
        )


class Layer(nn.Conv2d):
    sign = 1

    def forward(self, input: Tensor) -> Tensor:
        return Depthwise.apply(input, self.weight, self.sign)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    "module",
    [
        Layer(4, 4, 3, padding=1, groups=4),
        nn.Conv1d(3, 4, 5, dilation=2, padding="same"),
        nn.Conv2d(4, 6, 3, stride=2, padding=(1, 0), groups=2),
        nn.Conv3d(2, 3, 2, bias=False),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.ConvTranspose1d(3, 2, 4),
        convgrad.nn.Conv1d(3, 2, 4, padding="causal"),
    ],
    ids=str,
)
def test_right_modules(module: nn.Module) -> None:
    report = check_backend(module, **QUICK)
    report.raise_if_failed()
    assert {r.output for r in report.results if r.status == "passed"} == {"forward", "grad_input", "grad_weight"}


def test_a_wrong_backward_of_a_module() -> None:
    layer = Layer(4, 4, 3, padding=1, groups=4)
    layer.sign = -1
    report = check_backend(layer, **QUICK)
    assert {r.output for r in report.failures} == {"grad_weight"}


@pytest.mark.usefixtures("brief_search")
def test_functions(monkeypatch: pytest.MonkeyPatch, brief_search: None) -> None:
    monkeypatch.setattr("convgrad.check.problem_set._MOST", 30)

    def forward(input: Tensor, weight: Tensor, stride: Any) -> Tensor:
        return F.conv2d(input, weight, stride=stride)

    def plain(p: Any) -> bool:
        return p.ndim == 2 and p.padding == ((0, 0), (0, 0)) and p.dilation == (1, 1) and p.groups == 1

    args = ("input", "weight", "stride")
    assert check_backend(forward, args=args, accepts=plain, **QUICK).ok
    report = check_backend(lambda x, w: -F.conv2d(x, w), ["ic2ih5oc2kh3"], args=args[:2], **QUICK)
    assert {r.output for r in report.failures} == {"forward"}


def test_one_problem_output_or_property_may_stand_alone() -> None:
    report = check_backend("reference", "ic2iw5oc3kw3", outputs="grad_weight", properties="exact")
    assert [(r.output, r.property_name, r.status) for r in report.results] == [("grad_weight", "exact", "passed")]


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (3, {}, "expected a backend or its name, a function or a module, got 3"),
        (nn.Linear(2, 2), {}, "Linear is no zero-padded convolution .*: it has no in_channels"),
        (nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), {}, "its padding_mode is circular"),
        (nn.Conv1d(1, 1, 3), {"args": ("input",)}, "args and accepts belong to a function"),
        ("aten", {"accepts": bool}, "args and accepts belong to a function"),
        (lambda x: x, {}, r"forward= is called with \(input, weight, problem\), as no args= are given"),
    ],
)
def test_what_cannot_be_checked(what: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_backend(what, **options)
