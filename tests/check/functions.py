"""Functions that tests register as backends, made of PyTorch's own, and what they are called with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import ConvProblem

DEPTHWISE = ConvProblem.parse("g8mb2ic8ih9oc8kh3ph1")
#: PyTorch's own 16-bit gradients on the CPU sum in 16 bits, and would be refused.
WIDE = (torch.float32, torch.float64)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, first: Tensor, second: Tensor, problem: ConvProblem) -> Any:
        self.calls += 1
        return self.function(first, second, problem)


def padding(p: ConvProblem) -> list[int]:
    return [low for low, _ in p.padding]


def forward(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    return F.conv2d(input, weight, None, p.stride, padding(p), p.dilation, p.groups)


def grad_input(grad_output: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
    return torch.nn.grad.conv2d_input(p.input_shape, weight, grad_output, p.stride, padding(p), p.dilation, p.groups)


def grad_weight(grad_output: Tensor, input: Tensor, p: ConvProblem) -> Tensor:
    return torch.nn.grad.conv2d_weight(input, p.weight_shape, grad_output, p.stride, padding(p), p.dilation, p.groups)


def accepts(p: ConvProblem) -> bool:
    return p.ndim == 2 and p.symmetric


def counted(name: str = "mine", **options: Any) -> Counted:
    function = Counted(forward)
    convgrad.register(name, forward=function, **{"accepts": accepts, "verify": False, **options})
    function.calls = 0
    return function


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 8, 9, 9, dtype=dtype, requires_grad=True)
    return x, torch.randn(8, 1, 3, 3, dtype=dtype, requires_grad=True)


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return convgrad.conv2d(x, w, padding=1, groups=w.shape[0])


def passed(backend: Any) -> int:
    """How many problems a backend was checked on that nothing was found wrong with; in a short time they may be few."""
    found = re.search(r"(\d+)(?: of \d+)? problem", backend.note)
    assert found, backend.note
    return int(found[1])
