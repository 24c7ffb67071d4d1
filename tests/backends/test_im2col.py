"""im2col: pieces of any size give the same, buffers may be the caller's, and the memory bound holds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convgrad.backends import im2col
from convgrad.backends.im2col import Im2colBackend
from convgrad.backends.reference import ReferenceBackend
from convgrad.check.guards import PeakMemory
from convgrad.check.operands import integer_operands
from convgrad.errors import DtypeError, ShapeError
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Pass
from convgrad.testing import problems

REFERENCE, BACKEND = ReferenceBackend(), Im2colBackend()
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.complex64)


@given(
    st.one_of(
        st.tuples(problems(dtypes=DTYPES, largest=5), st.just(1)),  # a piece for each position takes its time
        st.tuples(problems(dtypes=DTYPES), st.sampled_from([500, 4000, 64 * 2**20])),
    )
)
@settings(max_examples=150)
def test_any_problem_in_pieces_of_any_size(problem_and_bytes: tuple[ConvProblem, int]) -> None:
    problem, max_bytes = problem_and_bytes
    slots = integer_operands(problem, PASSES, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(im2col, "MAX_BYTES", max_bytes)
        for pass_ in PASSES:
            a, b = (slots[s] for s in OPERANDS[pass_])
            size = BACKEND.workspace(problem, (pass_,))
            workspace = torch.full((size,), 255, dtype=torch.uint8)
            got = BACKEND.bind(problem, (pass_,))(a, b, None, workspace)
            assert torch.equal(got, REFERENCE.bind(problem, (pass_,))(a, b))
            assert torch.equal(got, BACKEND.bind(problem, (pass_,))(a, b))


@pytest.mark.parametrize("positions", [1, 7, 1000])
@pytest.mark.parametrize("text", ["mb3g2ic4ih7oc6kh3ph1sh2 f64", "mb2ic3iw9oc4kw4pw2 bf16"])
def test_the_callers_buffers_are_used(text: str, positions: int) -> None:
    p = ConvProblem.parse(text)
    slots = integer_operands(p, PASSES, 0)
    height = p.in_channels * math.prod(p.kernel_size)
    wide = im2col.accumulate_dtype(p.dtype)
    held = torch.full((height * positions,), float("nan"), dtype=wide)
    ones = torch.full((1000,), float("nan"), dtype=wide)
    bias = torch.arange(p.out_channels).to(p.dtype)
    x, w, g = slots["input"], slots["weight"], slots["grad_output"]

    output = im2col.forward(p, x, w, bias, columns=held, ones=ones)
    expected = REFERENCE.bind(p, ("forward",))(x, w) + bias.view(-1, *(1,) * p.ndim)
    assert torch.equal(output, expected)
    assert not held.isnan().all()
    assert ones[0] == 1
    for function, a, b in ((im2col.grad_input, g, w), (im2col.grad_weight, g, x)):
        held.fill_(float("nan"))
        assert torch.equal(function(p, a, b, columns=held), REFERENCE.bind(p, (function.__name__,))(a, b))
        assert not held.isnan().all()


@pytest.mark.parametrize("bias", [None, torch.zeros(4)])
def test_an_empty_batch_gives_zeros(bias: torch.Tensor | None) -> None:
    p = ConvProblem.parse("mb0ic2ih4oc4kh3ph1")
    x, w, g = (torch.ones(shape) for shape in (p.input_shape, p.weight_shape, p.output_shape))
    assert im2col.forward(p, x, w, bias).shape == p.output_shape
    assert im2col.grad_input(p, g, w).shape == p.input_shape
    assert not im2col.grad_weight(p, g, x).any()


def test_buffers_that_do_not_fit_are_refused() -> None:
    p = ConvProblem.parse("mb1ic2iw8oc3kw3")
    x, w = torch.zeros(p.input_shape), torch.zeros(p.weight_shape)
    with pytest.raises(ValueError, match=r"at least 6 elements .*36 for the fewest pieces.* got .* 5 elements"):
        im2col.forward(p, x, w, columns=torch.empty(5))
    with pytest.raises(ValueError, match=r"columns must be .*torch\.float32.* got torch\.float64"):
        im2col.grad_weight(p, torch.zeros(p.output_shape), x, columns=torch.empty(60, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"ones must be a contiguous tensor .* at least 6 elements, got .* 2 elements"):
        im2col.forward(p, x, w, torch.zeros(3), ones=torch.empty(2))


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    "text",
    [
        "mb8ic16ih32oc16kh5ph2",
        "mb2ic8id12oc8kd3pd1 f64",
        "mb4g64ic64ih32oc64kh3ph1 bf16 channels_last",
        "mb1ic4iw20000oc4kw9pw4",
    ],
)
def test_memory_stays_under_the_bound(text: str, pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    p = ConvProblem.parse(text)
    monkeypatch.setattr(im2col, "MAX_BYTES", 2**20)
    item = im2col.accumulate_dtype(p.dtype).itemsize
    declared = BACKEND.workspace(p, (pass_,))
    padded = (n + low + high for n, (low, high) in zip(p.input_size, p.padding, strict=True))
    beside = math.prod(p.weight_shape) + math.prod((p.batch, p.in_channels, *padded))  # images with their padding
    assert declared <= 2**20 + item * (beside + 200)
    columns_in_one = item * p.in_channels * math.prod(p.kernel_size) * p.batch * math.prod(p.output_size)
    assert columns_in_one > 2 * 2**20  # or the bound would bound nothing

    slots = integer_operands(p, (pass_,), 0)
    a, b = (slots[s] for s in OPERANDS[pass_])
    with PeakMemory(a, b) as watch:
        result = BACKEND.bind(p, (pass_,))(a, b)  # without a workspace it allocates what it needs
    used = watch.peak - result.untyped_storage().nbytes()
    assert used <= declared
    assert used > 2**20 // 4


def test_what_it_refuses() -> None:
    cuda = torch.device("cuda")
    p = ConvProblem.parse("ic2iw5oc2kw3")
    assert BACKEND.reasons_against(p, ("forward",), cuda) == []
    assert "int64" in BACKEND.reasons_against(p.replace(dtype=torch.int64), ("forward",), cuda)[0]
    assert BACKEND.reasons_against(p.replace(dtype=torch.int64), ("forward",), torch.device("cpu")) == []
    assert BACKEND.reasons_against(p.replace(dtype=torch.float8_e4m3fn), ("forward",), torch.device("cpu"))


@pytest.mark.parametrize("pass_", PASSES)
def test_operands_of_another_problem_are_refused(pass_: Pass) -> None:
    p = ConvProblem.parse("mb2ic2iw8oc3kw3")
    slots = integer_operands(p, PASSES, 0)
    operands, function = [slots[s] for s in OPERANDS[pass_]], getattr(im2col, pass_)
    function(p, *operands)
    for i, t in enumerate(operands):
        for other, error in ((t.double(), DtypeError), (torch.cat([t, t]), ShapeError), (t.to("meta"), DtypeError)):
            with pytest.raises(error, match=r"for the problem|same device"):
                function(p, *(other if i == j else u for j, u in enumerate(operands)))
    with pytest.raises(DtypeError, match="for the problem"):  # a float32 result of float64 operands
        function(p, *(t.double() for t in operands))
    if pass_ == "forward":
        with pytest.raises(ShapeError, match="Expected bias of size"):
            function(p, *operands, torch.zeros(4))
