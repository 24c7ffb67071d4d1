"""Kernels that are right in a single call on an idle machine, and wrong otherwise."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from convgrad.check import STRESS, check_problem
from convgrad.check.guards import paged_copy
from convgrad.problem import PASSES

from .broken import CORNER, TEXT, Broken


def failing(damage) -> set[str]:
    results = check_problem(Broken(damage), TEXT, "forward", properties=STRESS)
    return {r.property_name for r in results if r.status == "failed"}


@pytest.mark.parametrize("name", ["aten", "im2col", "reference"])
@pytest.mark.parametrize("output", PASSES)
def test_right_ones_pass(name: str, output) -> None:
    for text in (TEXT, "mb1g3ic6ih8iw5oc3kh3kw3sh2sw2ph1pw1 float64 channels_last", "mb2ic3iw13oc5kw3 bfloat16"):
        results = check_problem(name, text, output, properties=STRESS)
        assert {r.status for r in results} == {"passed"}, results


@pytest.mark.parametrize("text", ["mb2ic4ih6oc4kh3 int32", "mb1ic64ih12oc3kh3 int8"])
def test_integers(text: str) -> None:
    properties = ["layouts", *STRESS]
    assert {r.status for r in check_problem("reference", text, "forward", properties=properties)} == {"passed"}
    assert {r.status for r in check_problem(Broken(CORNER), text, "forward", properties=properties)} == {"failed"}


def test_shared_memory() -> None:
    scratch: dict[torch.Size, torch.Tensor] = {}

    def shared(p, pass_, a, b, result):
        mine = scratch.setdefault(result.shape, torch.empty_like(result))
        mine.copy_(result)
        return mine.clone()

    assert failing(shared) == {"threads"}


def test_traces_of_threads_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a debugger or of coverage; since Python 3.12 one that is left makes all threads slow."""
    last: dict[int, object] = {}

    def trace(*_: object) -> None:
        return None

    def settrace(function, original=sys.settrace) -> None:
        last[threading.get_ident()] = function
        original(function)

    monkeypatch.setattr(sys, "settrace", settrace)
    threading.settrace(trace)
    try:
        check_problem("reference", TEXT, "forward", properties=["threads"])
    finally:
        threading.settrace(None)  # pyright: ignore[reportArgumentType]
    assert last
    assert {*last.values()} == {trace}


def test_one_wrong_element_of_many() -> None:
    assert failing(CORNER) == {*STRESS}


def test_pages() -> None:
    """The same values and strides; the neighbors are closed: what that means, test_verify shows in a child."""
    for tensor in (torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last)):
        for at_end in (True, False):
            copy = paged_copy(tensor, at_end=at_end)
            assert torch.equal(copy, tensor)
            assert copy.stride() == tensor.stride()
    behind = paged_copy(torch.zeros(1000), at_end=True)
    assert (behind.data_ptr() + 4000) % 4096 == 0
    assert paged_copy(torch.zeros(1000), at_end=False).data_ptr() % 4096 == 0
