"""Patches as matrix products: what the conformance suite's sample does not hold, which has few of them."""

from math import prod

import pytest
import torch

from convgrad.backends import products
from convgrad.engine.registry import get_backend
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Pass
from convgrad.testing import check_problem

from .test_routes import Called, operands_of

CUDA = torch.device("cuda")
PROBLEMS = [
    "mb2ic3iw12oc5kw4sw4",
    "mb2ic3ih12iw8oc5kh4kw4sh4sw4",
    "mb3ic2ih9iw8oc4kh3kw2sh3sw2",
    "mb2ic2id4ih6iw4oc3kd2kh3kw2sd2sh3sw2",
    "mb5ic3id2ih4iw4oc7kd2kh4kw4sd2sh4sw4",  # a patch is the whole input
    "mb5ic3ih4iw4oc7kh4kw4sh1sw1",
    "mb2ic3ih14iw9oc5kh4kw4sh4sw4",  # the last rows and columns are in no patch
    "mb2ic3ih7iw9oc5kh1kw3sh1sw3",
    "mb2ic6ih4oc3oh8kh2sh2 transposed",
    "mb2ic6id2ih3iw2oc3od4oh9ow4kd2kh3kw2sd2sh3sw2 transposed",
]  # fmt: skip


@pytest.mark.parametrize(
    "text", [*PROBLEMS, *(f"{PROBLEMS[1]} {dtype}" for dtype in ("float64", "bfloat16", "float16"))]
)
@pytest.mark.parametrize("layout", ["", " channels_last"])
def test_conforms(text: str, layout: str) -> None:
    if layout and text == PROBLEMS[0]:
        return  # a sequence has no such layout
    problem = ConvProblem.parse(f"{text}{layout}")
    for one in (problem, problem.replace(has_bias=True)):
        for pass_ in PASSES:
            results = check_problem("aten:patches", one, pass_, repeats=2)
            assert not [r for r in results if r.status == "failed"], "\n".join(map(str, results))
            assert "passed" in {r.status for r in results}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("text", PROBLEMS)
def test_it_is_one_product(text: str, pass_: Pass) -> None:
    problem = ConvProblem.parse(text)
    operands = operands_of(problem, OPERANDS[pass_])
    with Called() as seen:
        get_backend("aten:patches").bind(problem, (pass_,))(*operands)
    names = [name for name, _ in seen.calls]
    assert sum(name in ("mm", "bmm", "addmm", "baddbmm") for name in names) == 1
    assert not any("convolution" in name for name in names)
    copies = sum(name in ("clone", "_unsafe_view", "copy_") for name in names)
    if prod(problem.output_size) == 1:
        assert copies == 0, names


def test_never_in_fewer_bits_than_convolutions_have(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, problem = get_backend("aten:patches"), ConvProblem.parse(PROBLEMS[1])
    monkeypatch.setattr(products, "exact_matmul", lambda library: library != "cuda")
    assert backend.arithmetic(problem, "forward", CUDA) == "tf32"
    for allowed in (True, False):
        monkeypatch.setattr(products, "cudnn_allows_tf32", lambda allowed=allowed: allowed)
        reasons = backend.reasons_against(problem, ("forward",), CUDA)
        assert reasons == ([] if allowed else ["it would multiply in TF32, which is forbidden here"])
    assert not backend.reasons_against(problem.replace(dtype=torch.bfloat16), ("forward",), CUDA)
