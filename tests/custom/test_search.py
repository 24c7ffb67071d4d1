"""Problems are found wherever a kernel accepts any that networks use, and the first few differ in what matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from convgrad import ConvProblem
from convgrad.custom.search import admitted_problems

Accepts = Callable[[ConvProblem], bool]

NARROW: dict[str, Accepts] = {
    "mobilenet": lambda p: p.depthwise and p.kernel_size in {(3, 3), (5, 5)} and p.stride in {(1, 1), (2, 2)},
    "stem": lambda p: p.kernel_size == (7, 7) and p.stride == (2, 2) and p.in_channels == 3,
    "many channels": lambda p: p.pointwise and p.in_channels % 128 == 0 and p.out_channels % 128 == 0,
    "large and strided": lambda p: p.kernel_size == (7, 7) and p.in_channels % 64 == 0 and p.stride == (2, 2),
    "causal": lambda p: p.ndim == 1 and p.padding == ((3, 0),) and p.kernel_size == (4,) and p.depthwise,
    "patches": lambda p: p.kernel_size == (16, 16) and p.stride == (16, 16),
    "channels_last": lambda p: p.channels_last and p.kernel_size == (3, 3) and p.dtype == torch.float16,
}


@pytest.mark.parametrize("kind", NARROW)
def test_narrow(kind: str) -> None:
    found = admitted_problems(NARROW[kind], seconds=10)
    assert len(found) >= 60
    assert len(set(found)) == len(found)
    assert all(NARROW[kind](p) for p in found)
    assert {p.batch == 1 for p in found} == {True, False}
    assert {p.input_size[-1] % 8 == 0 for p in found} == {True, False}


def test_the_first_differ() -> None:
    first = admitted_problems(lambda p: p.ndim == 2)[:16]
    assert {p.batch == 1 for p in first} == {True, False}
    assert {p.input_size[0] == p.input_size[1] for p in first} == {True, False}
    assert {p.input_size[1] % 8 == 0 for p in first} == {True, False}
    assert {(1, 1), (2, 2)} < {p.stride for p in first}
    assert {p.dtype for p in first} == {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    assert {p.channels_last for p in first} == {True, False}


def test_nothing_is_accepted() -> None:
    assert admitted_problems(lambda p: False, seconds=0.1) == []


def test_the_same_every_time() -> None:
    takes = NARROW["mobilenet"]
    assert admitted_problems(takes, seconds=10) == admitted_problems(takes, seconds=10)
