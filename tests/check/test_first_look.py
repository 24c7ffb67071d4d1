"""Reduced problems: small enough, and of the same kind."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from convgrad.backends import ReferenceBackend
from convgrad.check import first_look, shrunk
from convgrad.problem import ConvProblem
from convgrad.testing import problems

from .broken import around

LARGE = [
    "mb256ic64ih56oc64oh56kh3ph1",
    "mb64g512ic512ih112oc512oh56kh3sh2ph1",
    "mb2ic2048ih7oc2048kh1",
    "mb1ic64id32ih112iw112oc64kd3kh3kw3pd1ph1pw1",
    "mb8g128ic128ih32oc128oh32kh31ph15",
    "mb1g1536ic1536iw8192oc1536ow8192kw4pw3",
    "mb8ic256ih32oc256oh64kh4sh2ph1 transposed",
    "mb4g4ic256ih31iw67oc512kh3kw5sh3sw2ph2pw0dh1dw2",
]


@pytest.mark.parametrize("text", LARGE)
def test_large_ones_become_small_and_stay_of_their_kind(text: str) -> None:
    p = ConvProblem.parse(text)
    q = shrunk(p, 2_000_000)
    assert q.flops <= 2_000_000
    kept = ("kernel_size", "stride", "dilation", "dtype", "memory_format", "origin", "ndim", "depthwise", "pointwise")
    for name in kept:
        assert getattr(q, name) == getattr(p, name)
    assert [low for low, _ in q.padding] == [low for low, _ in p.padding]
    assert (q.groups > 1) == (p.groups > 1)
    assert ConvProblem.parse(str(q)) == q


@given(problems(), st.integers(1, 10_000))
def test_any_problem_stays_a_problem(p: ConvProblem, most: int) -> None:
    q = shrunk(p, most)
    assert q.flops <= p.flops
    assert q.kernel_size == p.kernel_size
    assert shrunk(p, p.flops) == p


def test_a_kernel_of_few_problems_gets_a_smaller_one_that_it_accepts() -> None:
    p = ConvProblem.parse("mb8g96ic96ih56oc96oh56kh3ph1")
    q = shrunk(p, 200_000, lambda p: p.in_channels % 8 == 0)
    assert q.flops <= 200_000
    assert q.in_channels == q.groups == 16
    assert shrunk(p, 200_000, lambda q: q == p) == p


def test_a_padding_mode_keeps_the_input_that_it_reads() -> None:
    assert shrunk(ConvProblem.parse("mb2ic8ih9oc8kh7ph6 circular"), 1000).input_size == (9, 9)


def test_what_is_known_to_be_wrong_in_the_smaller_one_does_not_run() -> None:
    """As PyTorch's depthwise float16, which for 16 channels may never return."""

    def wrong_here(self: Any, problem: ConvProblem, outputs: Any, device: torch.device) -> tuple[str, tuple[str, ...]]:
        return ("it hangs" if problem.flops < 100_000_000 else ""), ()

    wrong = around(ReferenceBackend, lambda *_: pytest.fail("computed"), wrong_here=wrong_here)
    assert first_look(wrong, ConvProblem.parse(LARGE[0]), ("forward",), torch.device("cpu")) == ""


def test_that_there_is_no_memory_is_raised_and_no_finding() -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    p = ConvProblem.parse("mb2ic8ih9oc8kh3")
    with pytest.raises(torch.OutOfMemoryError):
        first_look(around(ReferenceBackend, lambda *_: full), p, ("forward",), torch.device("cpu"))
