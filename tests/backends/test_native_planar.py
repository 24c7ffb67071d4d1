"""The compiled CPU kernels that read contiguous rows where they lie: small kernels, stride 1, large enough planes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad.backends import _native_library as library
from convgrad.problem import ConvProblem
from convgrad.sizes import output_length

from .native_cases import BACKEND, DTYPES, everything, on_threads, operands, reference

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


@st.composite
def planar(draw: st.DrawFn) -> ConvProblem:
    """Borders of every width beside rows of 14 to 130 columns, which few or many vectors cover; long sequences."""
    ndim = draw(st.integers(1, 3))
    groups, multiplier = draw(st.sampled_from([4, 5, 9, 16])), draw(st.sampled_from([1, 1, 1, 2, 3]))

    def dimension(least: int, longest: int, kernels: int) -> tuple[int, int, tuple[int, int], int, int]:
        kernel, dilation = draw(st.integers(1, kernels)), draw(st.integers(1, 3))
        low, high = draw(st.integers(-2, 5)), draw(st.integers(-2, 5))
        reach = dilation * (kernel - 1)
        size = draw(st.integers(max(least, least + reach - low - high, 1 + reach - low - high), longest + reach + 4))
        return size, kernel, (low, high), dilation, output_length(size, kernel, 1, low, high, dilation)

    dims = [dimension(14, 1200, 4) if ndim == 1 else dimension(14, 130, 3)]
    if ndim > 1:
        dims.insert(0, dimension(1, 24, 3))
    if ndim > 2:
        dims.insert(0, dimension(1, 4, 3))
    size, kernel, padding, dilation, output = zip(*dims, strict=True)
    return ConvProblem(
        draw(st.integers(2, 5)),
        groups,
        groups * multiplier,
        groups,
        size,
        kernel,
        (1,) * ndim,
        padding,
        dilation,
        output,
        dtype=draw(st.sampled_from(DTYPES)),
    )


@settings(max_examples=200)
@given(p=planar(), threads=st.sampled_from([1, 2]))
def test_every_result_is_exact(p: ConvProblem, threads: int) -> None:
    with on_threads(threads):
        tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize(
    "text", ["mb2g8ic8ih58oc8kh3ph1", "mb2g8ic8ih58oc8oh58kh3ph2dh1", "mb3g8ic8iw600oc8ow603kw4pw3"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_infinite_spoils_its_own_sums_only(text: str, dtype: torch.dtype, operand: str, value: float) -> None:
    p = ConvProblem.parse(text).replace(dtype=dtype)
    slots = ("input", "weight", "grad_output")
    for wanted in (0, 1, -1, 13, 58 * 5):  # corners, and in the middle
        tensors = [torch.ones(p.shape_of(slot), dtype=dtype) for slot in slots]
        marked = [torch.ones(p.shape_of(slot)) * (slot != operand) for slot in slots]
        at = slots.index(operand)
        position = wanted % tensors[at].numel() if wanted < tensors[at].numel() else 0
        tensors[at].view(-1)[position], marked[at].view(-1)[position] = value, 1
        spoilt = reference(p.replace(dtype=torch.float32), *marked)  # how often the marked element is part of a sum
        input, weight, grad_output = tensors
        for pass_, a, b, slots_read in (
            ("forward", input, weight, {"input", "weight"}),
            ("grad_input", grad_output, weight, {"grad_output", "weight"}),
            ("grad_weight", grad_output, input, {"grad_output", "input"}),
        ):
            if operand in slots_read:
                result = BACKEND.bind(p, (pass_,))(a, b)
                assert torch.equal(result.isfinite(), spoilt[pass_] == 0), (pass_, position)
