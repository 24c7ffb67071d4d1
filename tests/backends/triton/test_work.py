"""What a launch is said to multiply, against the products of the problem: none is missing, few are idle."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given

pytest.importorskip("triton")

from convgrad.backends.triton.variants import BANDED, TOGETHER, launches
from convgrad.backends.triton.work import work_of
from convgrad.problem import PASSES, ConvProblem
from convgrad.testing import problems


def multiplied(problem: ConvProblem, what: str, together: bool = False) -> list[float]:
    """Products of each launch that multiplies, over all of its threads."""
    found = [(work_of(call), call.programs * call.warps * 32) for call in launches(problem, what, together)]
    return [work.products * threads for work, threads in found if work is not None]


def needed(problem: ConvProblem) -> int:
    """Products of a pass that do not meet the padding."""
    p = problem
    dims = zip(
        p.input_size, p.output_size, p.kernel_size, p.stride, p.dilation, (low for low, _ in p.padding), strict=True
    )
    each = (
        sum(0 <= o * stride + k * dilation - low < size for o in range(out) for k in range(kernel))
        for size, out, kernel, stride, dilation, low in dims
    )
    return p.batch * p.out_channels * prod(each)


@given(problems(dtypes=(torch.float32, torch.float16)))
def test_no_product_is_missing(problem: ConvProblem) -> None:
    multiplier = max(1, problem.out_channels // problem.groups)
    problem = problem.replace(in_channels=problem.groups, out_channels=problem.groups * multiplier)
    wanted = needed(problem)
    for what in (*PASSES, "sweep", *BANDED):
        for products in multiplied(problem, what):
            assert products > 0 or not wanted
            assert products * (1 + 1e-9) >= wanted * (2 if what == "sweep" else 1), what


@pytest.mark.parametrize("dtype", ["", " bfloat16"])
@pytest.mark.parametrize("what", [*PASSES, "sweep"])
def test_where_everything_divides(what: str, dtype: str) -> None:
    """56 rows in patches of 14, 8 or 4, 32 images: results times kernel positions, no more."""
    problem = ConvProblem.parse("g144ic144oc144mb32ih56kh3ph1" + dtype)
    (products,) = multiplied(problem, what)
    every = 32 * 144 * 56 * 56 * 9 * (2 if what == "sweep" else 1)
    assert every <= products * (1 + 1e-9) <= every * 1.05


def test_a_stride_has_no_products_with_inserted_zeros() -> None:
    problem = ConvProblem.parse("g96ic96oc96mb32ih112kh3sh2ph1")
    (products,) = multiplied(problem, "grad_input")
    assert products == pytest.approx(32 * 96 * 112 * 112 * 9 / 4)


def test_whole_planes_multiply_no_padding() -> None:
    problem = ConvProblem.parse("g960ic960oc960mb32ih7kh3ph1")
    for what in PASSES:
        (products,) = multiplied(problem, what)
        assert products == pytest.approx(needed(problem))


def test_sequences_and_bands() -> None:
    sequence = ConvProblem.parse("g64ic64oc64mb8iw2048ow2048kw4pw3")
    every = 8 * 64 * 2048 * 4
    for together in (False, True):
        for what in PASSES:
            (products,) = multiplied(sequence, what, together)
            assert products == pytest.approx(every)
    assert TOGETHER  # what a problem's text says of such strides
    large = ConvProblem.parse("g128ic128oc128mb8ih32kh31ph15")
    tf32, split = multiplied(large, "forward banded")
    assert needed(large) < tf32 < 2.2 * needed(large)
    assert 2 * tf32 < split < 4 * tf32
