"""Fourier transforms: what the conformance suite's sample does not hold, which has no long kernels."""

import math

import pytest
import torch

import convgrad
from convgrad.backends import transform_sizes
from convgrad.engine.choice import choose
from convgrad.engine.registry import get_backend
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Outputs, Pass
from convgrad.testing import check_problem

from .test_routes import operands_of

CPU = torch.device("cpu")
BOTH: Outputs = ("grad_input", "grad_weight")
PROBLEMS = [
    "g3mb2ic3iw90oc3kw65pw32",
    "g2mb2ic2iw80oc2ow80kw80pw79",  # causal, as long as its input
    "g2mb3ic2ih9iw11oc4oh9ow11kh9kw11ph4pw5",
    "g2mb2ic2ih22iw24oc2oh4ow2kh8kw9sh3sw4ph1pw0dh1dw1",
    "g2mb2ic2id5ih6iw7oc4kd3kh5kw5pd1ph2pw2",
    "g2mb2ic2ih12oc2kh8ph-1",
    "g1ic1oc1mb2iw1ow1kw65pw32",
    "g2mb1ic2iw30oc2ow60kw64sw2pw31 transposed",
]


@pytest.mark.parametrize("text", [*PROBLEMS, *(f"{PROBLEMS[2]} {d}" for d in ("float64", "bfloat16", "channels_last"))])
def test_conforms(text: str) -> None:
    for pass_ in PASSES:
        results = check_problem("fft", text, pass_, repeats=2)
        assert {r.status for r in results} <= {"passed", "skipped"}, "\n".join(map(str, results))
        assert {r.status for r in results if r.property_name == "bound"} == {"passed"}


def test_channels_and_images_in_parts() -> None:
    problem = ConvProblem.parse("g16mb5ic16iw65000oc16ow65000kw300pw299")  # 15 channels take 4 MB
    g, x, w = operands_of(problem, ("grad_output", "input", "weight"))
    for pass_, got in zip(BOTH, get_backend("fft").bind(problem, BOTH)(g, x, w), strict=True):
        of = {"grad_output": g, "input": x, "weight": w}
        expected = get_backend("aten").bind(problem, (pass_,))(*[of[slot] for slot in OPERANDS[pass_]])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_in_a_compiled_graph() -> None:
    """Where PyTorch's operators ignore that a tensor is lazily conjugated."""
    x, w = torch.randn(4, 64, 2048), torch.randn(64, 1, 2048)

    def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return convgrad.conv1d(x, w, padding="causal", groups=64)

    with convgrad.trace() as seen:
        got = torch.compile(conv, backend="aot_eager", fullgraph=True)(x, w)
    assert [call.backend for call in seen] == ["fft"]
    torch.testing.assert_close(got, conv(x, w))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("pass_", PASSES)
def test_what_is_not_finite_does_not_spread(value: float, pass_: Pass) -> None:
    problem = ConvProblem.parse(PROBLEMS[0])
    a, b = operands_of(problem, OPERANDS[pass_])
    a[0, 1, 3] = value
    got, expected = (get_backend(name).bind(problem, (pass_,))(a, b) for name in ("fft", "aten"))
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert not got.isfinite().all()
    assert got.isfinite().any()


def test_reasons() -> None:
    for text, why in (
        ("mb2ic3iw90oc3kw65pw32", "depthwise"),
        ("g3mb2ic3ih9oc3kh7ph3", "fewer than 64 elements"),
        ("g3mb2ic3iw90oc3kw65pw32 complex64", "complex64"),
    ):
        assert why in get_backend("fft").reasons_against(ConvProblem.parse(text), ("forward",), CPU)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g64ic64oc64mb4iw2048ow2048kw2048pw2047", "fft"),
        ("g64ic64oc64mb4ih56kh51ph25", "fft"),
        ("g8ic8oc8mb2id32kd17pd8", "fft"),
        ("g64ic64oc64mb4ih56kh7ph3", "native"),
        ("g64ic64oc64mb4ih14kh13ph6", "native"),
        ("g64ic64oc64mb4ih28kh51ph25", "native"),  # most products are with padding
        ("g1ic1oc1mb1iw2048ow2048kw2048pw2047", "native"),  # too little work for so many calls, and not depthwise
    ],
)
def test_the_rule(text: str, expected: str) -> None:
    for outputs in (("forward",), BOTH):
        names = {step.backend.name for step in choose(ConvProblem.parse(text), outputs, CPU, stored=False)}
        assert ("fft" in names) == (expected == "fft")


def test_transforms_are_long_enough() -> None:
    for text in PROBLEMS:
        problem = ConvProblem.parse(text)
        for n, dim in zip(transform_sizes(problem), problem.dims, strict=True):
            assert n % 2 == 0
            assert n >= dim.input + max(dim.low, dim.least_high, 0)
