"""The compiled CPU kernels of pointwise convolutions: channels and pixels that fill no vector, blocks, threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad.backends import _native_library as library
from convgrad.problem import ConvProblem

from .native_cases import BACKEND, CPU, DTYPES, everything, on_threads, operands, pointwise, reference

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


@settings(max_examples=80)
@given(p=pointwise(), threads=st.sampled_from([1, 1, 3]))
def test_every_result_is_exact(p: ConvProblem, threads: int) -> None:
    with on_threads(threads):
        tensors = operands(p, 1)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("instruction_set", ["x86-64-v3", "baseline"])
def test_other_instruction_sets_are_exact(instruction_set: str) -> None:
    before = library.instruction_set()
    try:
        library.select(instruction_set)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        for text in (
            "mb3ic67ih9iw11oc35kh1kw1",
            "mb2g2ic34ih5oc90kh1",
            "mb40ic20ih1oc19kh1",
            "mb2ic5ih40oc21kh1",
            "mb3ic67ih9iw11oc35kh1kw1 channels_last",
        ):
            for dtype in DTYPES[: 2 if "last" in text else 4]:
                p = ConvProblem.parse(text).replace(dtype=dtype)
                tensors = operands(p, 1)
                expected = reference(p, *tensors)
                for name, result in everything(p, *tensors):
                    assert torch.equal(result, expected[name]), (text, dtype, name)
    finally:
        library.select(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_biases(dtype: torch.dtype, transposed: bool, channels_last: bool) -> None:
    """A transposed convolution's is added to what the plain problem calls grad_input, and sums the input."""
    p = ConvProblem.parse("mb3ic35ih7oc21kh1").replace(dtype=dtype, origin="transposed" if transposed else "plain")
    if channels_last:
        if dtype.itemsize == 2:
            pytest.skip("PyTorch's")
        p = p.replace(memory_format=torch.channels_last)
    x, w, g = operands(p, 1)
    expected = reference(p, x, w, g)
    added_to, from_ = ("grad_input", g) if transposed else ("forward", x)
    bias = torch.arange(p.shape_of(p.bias_slot)[1]).to(dtype)
    biased = expected[added_to].double() + bias.double().view(-1, 1, 1)
    assert torch.equal(BACKEND.bind(p, (added_to,))(from_, w, bias), biased.to(dtype))
    expected["grad_bias"] = (x if transposed else g).double().sum((0, 2, 3)).to(dtype)
    for threads in (1, 2):
        with on_threads(threads):
            for sweep in BACKEND.sweeps:
                for name, result in zip(sweep, BACKEND.bind(p, sweep)(g, x, w), strict=True):
                    assert torch.equal(result, expected[name]), name


def test_sums_are_the_same_bits_every_time() -> None:
    p = ConvProblem.parse("mb4ic48ih28oc33kh1")
    g, x, w = torch.randn(p.output_shape), torch.randn(p.input_shape), torch.randn(p.weight_shape)
    with on_threads(2):
        kernel = BACKEND.bind(p, ("grad_input", "grad_weight", "grad_bias"))
        first = kernel(g, x, w)
        for _ in range(10):
            assert all(map(torch.equal, first, kernel(g, x, w)))


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("mb2ic48ih7oc33kh1", True),
        ("mb2ic48iw7oc33kw1", True),
        ("mb2g2ic48id3ih7iw5oc66kd1kh1kw1", True),
        ("mb2ic48ih1oc33kh1sh2", True),  # a single position, whatever the stride
        ("mb2ic48ih7oc33kh1 channels_last", True),
        ("mb2g3ic144id2ih3iw5oc99kd1kh1kw1 channels_last float64", True),
        ("mb2ic48ih7oc33kh1 channels_last bfloat16", False),
        ("mb2ic48ih7oc33kh1sh2", False),
        ("mb2ic48ih7oc33kh1ph1", False),
        ("mb2ic48ih7oc33kh3ph1", False),
    ],
)
def test_wide_groups_are_taken_where_they_are_matrix_products(text: str, taken: bool) -> None:
    p = ConvProblem.parse(text)
    reasons = BACKEND.reasons_against(p, ("forward",), CPU)
    assert (reasons == []) == taken
    if taken:
        assert BACKEND.kernel_name(p, ("forward",)) == "pointwise"
        tensors = operands(p)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name
    else:
        assert "here a group has 48 input and 33 output channels" in reasons[0]


@pytest.mark.parametrize(("layout", "kernels"), [("", "pointwise"), (" channels_last", "grouped")])
def test_few_channels_are_computed_in_both_layouts(layout: str, kernels: str) -> None:
    p = ConvProblem.parse("mb2ic16ih7oc12kh1" + layout)
    assert BACKEND.reasons_against(p, ("forward",), CPU) == []
    assert BACKEND.kernel_name(p, ("forward",)) == kernels
