"""Patches as matrix products: what the conformance suite's sample does not hold, which has few of them."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

import convgrad
from convgrad.backends import products
from convgrad.engine.registry import get_backend
from convgrad.problem import PASSES, ConvProblem, Pass
from convgrad.testing import check_problem

from .test_routes import Called, operands_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
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


@pytest.mark.parametrize("dtype", ["", " float64", " bfloat16", " float16"])
@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("text", PROBLEMS)
def test_conforms(text: str, layout: str, dtype: str) -> None:
    if layout and "iw12" in text:
        return  # a sequence has no such layout
    problem = ConvProblem.parse(f"{text}{layout}{dtype}")
    for one in (problem, problem.replace(has_bias=True)):
        for pass_ in PASSES:
            results = check_problem("aten:patches", one, pass_, repeats=2)
            assert not [r for r in results if r.status == "failed"], "\n".join(map(str, results))
            assert "passed" in {r.status for r in results}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("text", PROBLEMS)
def test_it_is_one_product(text: str, pass_: Pass) -> None:
    problem = ConvProblem.parse(text)
    operands = operands_of(problem, convgrad.problem.OPERANDS[pass_])
    with Called() as seen:
        get_backend("aten:patches").bind(problem, (pass_,))(*operands)
    names = [name for name, _ in seen.calls]
    assert sum(name in ("mm", "bmm", "addmm", "baddbmm") for name in names) == 1
    assert not any("convolution" in name for name in names)
    copies = sum(name in ("clone", "_unsafe_view", "copy_") for name in names)
    if prod(problem.output_size) == 1:
        assert copies == 0, names


def test_a_layer_and_its_gradients() -> None:
    x = torch.randn(2, 3, 4, 28, 28, dtype=torch.float64, requires_grad=True)
    layer = convgrad.nn.Conv3d(3, 8, (2, 14, 14), stride=(2, 14, 14), dtype=torch.float64)
    other = nn.Conv3d(3, 8, (2, 14, 14), stride=(2, 14, 14), dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    with convgrad.use_backend("aten:patches"):
        y = layer(x)
        found = torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))
    expected = torch.autograd.grad(other(x).square().sum(), (x, *other.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mb2ic3ih8oc4kh4sh2", "stride = kernel"),
        ("mb2ic3ih8oc4kh4sh4ph2", "without padding"),
        ("mb2ic4g2ih8oc4kh4sh4", "groups"),
        ("mb2ic3ih8oc4kh1", "more than one element"),
        ("mb2ic3ih9oc4kh2sh2dh1", "stride = kernel"),
        ("mb2ic3ih8oc4kh4sh4 complex64", "got torch.complex64"),
    ],
)
def test_reasons(text: str, why: str) -> None:
    [reason] = get_backend("aten:patches").reasons_against(ConvProblem.parse(text), ("forward",), CPU)
    assert why in reason


def test_never_in_fewer_bits_than_convolutions_have(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, problem = get_backend("aten:patches"), ConvProblem.parse(PROBLEMS[1])
    monkeypatch.setattr(products, "exact_matmul", lambda library: library != "cuda")
    assert backend.arithmetic(problem, "forward", CUDA) == "tf32"
    for allowed in (True, False):
        monkeypatch.setattr(products, "cudnn_allows_tf32", lambda allowed=allowed: allowed)
        reasons = backend.reasons_against(problem, ("forward",), CUDA)
        assert reasons == ([] if allowed else ["it would multiply in TF32, which is forbidden here"])
    assert not backend.reasons_against(problem.replace(dtype=torch.bfloat16), ("forward",), CUDA)
