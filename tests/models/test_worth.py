"""Whether a layer is worth replacing on a device that is not here, by a choice that is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convgrad.engine import plan_for
from convgrad.models import worth
from convgrad.models.worth import linear_may_gain, may_gain
from convgrad.problem import ConvProblem


def plan(backend: str, reason: str) -> Any:
    return SimpleNamespace(steps=(SimpleNamespace(backend=SimpleNamespace(name=backend), reason=reason),))


@pytest.mark.parametrize(("device", "expected"), [("meta", True), ("cpu", False)])
def test_on_a_gpu_autocast_may_make_bfloat16_of_float32(device: str, expected: bool) -> None:
    def chosen(problem: ConvProblem, *_: object) -> Any:
        return plan("triton:banded" if problem.dtype is torch.bfloat16 else "aten", "by rule: large")

    layer = torch.nn.Conv2d(8, 8, 31, padding=15, groups=8, device=device)
    assert may_gain(layer, layer.weight, chosen) == expected


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("fast", [torch.float16, torch.float32])
def test_on_a_cpu_it_gets_what_autocast_makes_of_it_now(autocast: bool, fast: torch.dtype) -> None:
    def chosen(problem: ConvProblem, *_: object) -> Any:
        return plan("native" if problem.dtype is fast else "aten", "by rule: fast")

    with torch.autocast("cpu", torch.float16, enabled=autocast):
        layer = torch.nn.Conv2d(8, 8, 3)
        assert may_gain(layer, layer.weight, chosen) == (autocast == (fast is torch.float16))


@pytest.mark.parametrize(("lacking", "expected"), [("", False), ("all", True)])
def test_under_autocast_pytorch_computes_a_linear_layer_if_the_processor_can(
    monkeypatch: pytest.MonkeyPatch, lacking: str, expected: bool
) -> None:
    monkeypatch.setattr(worth, "cpu_lacks", lambda dtype: lacking)
    monkeypatch.setattr(worth, "beats_matmul", lambda plan: True)
    layer = torch.nn.Linear(512, 512)
    assert linear_may_gain(layer, layer.weight, plan_for)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_may_gain(layer, layer.weight, plan_for) == expected
