"""What the tests of measured choices share: fakes that sleep, so that what wins is certain, and short ways to ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import convgrad
from convgrad.backends import Backend
from convgrad.engine import cache, get_backend, measurements
from convgrad.engine.measure import measurer
from convgrad.engine.measure.measurements import Measurement
from convgrad.problem import ConvProblem, Output
from convgrad.settings import measure

P = ConvProblem.parse("g1mb2ic72ih20oc8oh20kh3ph1")  # not for native
CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
X, W = torch.randn(2, 72, 20, 20), torch.randn(8, 72, 3, 3)


class Fake(Backend):
    """ATen, later by ``seconds``; where these are 0 and it ``cheats``, nothing of a problem that is not small."""

    sweeps = (BOTH,)
    layouts = ("strided",)

    def __init__(self, name: str, seconds: dict[str, float] | float = 0.0, *, cheats: bool = False, off: float = 0.0):
        self.name, self._cheats, self._off = name, cheats, off
        self._seconds = seconds if isinstance(seconds, dict) else dict.fromkeys(("forward", *BOTH, "sweep"), seconds)
        self.calls: list[tuple[str, ...]] = []

    def reasons_against(self, problem: ConvProblem, outputs: Any, device: torch.device) -> list[str]:
        missing = ("sweep" if len(outputs) > 1 else outputs[0]) not in self._seconds
        return ["it does not"] if missing else get_backend("aten").reasons_against(problem, outputs, device)

    def bind(self, problem: ConvProblem, outputs: Any) -> Callable[..., Any]:
        kernel = get_backend("aten").bind(problem, outputs)
        large = problem.flops > 400_000
        seconds = self._seconds["sweep" if len(outputs) > 1 else outputs[0]]
        shapes = {"forward": problem.output_shape, "grad_input": problem.input_shape}
        empty = [torch.zeros(shapes.get(o, problem.weight_shape)) for o in outputs]

        def run(*args: Any) -> Any:
            self.calls.append(outputs)
            if self._cheats and large and not seconds:
                return empty[0] if len(empty) == 1 else tuple(empty)
            time.sleep(seconds * large)
            found = kernel(*args)
            return found if len(outputs) > 1 else found + self._off

        return run

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True


def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process begins."""
    state = measurer._State()
    state.check = measurer._state.check
    monkeypatch.setattr(measurer, "_state", state)
    measurements.reload()
    cache.invalidate()


def known() -> Measurement | None:
    measurements.reload()
    return measurements.find(P, ("forward",), CPU)


def certainly_known() -> Measurement:
    found = known()
    assert found is not None
    return found


def forward(x: torch.Tensor = X) -> torch.Tensor:
    return convgrad.conv2d(x, W, padding=1)


def chosen(outputs: Any = ("forward",), problem: ConvProblem = P) -> tuple[str, str]:
    """Backends and the reason of the first."""
    steps = convgrad.engine.choose(problem, outputs, CPU)
    return "+".join(s.backend.name for s in steps), steps[0].reason


def everything() -> measure:
    return measure(share=float("inf"))


@contextmanager
def deterministic() -> Generator[None, None, None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
