"""``native:amx``: larger problems than those of the conformance suite, which it leaves to others."""

from __future__ import annotations

import pytest
import torch

from convgrad.backends import _native_library as library
from convgrad.engine import get_backend
from convgrad.problem import PASSES, ConvProblem, Output
from convgrad.testing import check_problem

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(library.why_not("amx")), reason="no processor with AMX")


@pytest.mark.parametrize("output", PASSES)
@pytest.mark.parametrize(
    "text",
    [
        "mb1ic16ih4oc16kh1",  # one tile of everything
        "mb3ic33ih5iw7oc100kh1kw1",  # ragged on every side, a panel of an image
        "mb2ic600ih9oc50kh1",  # more channels than are packed at once
        "mb2ic48ih40oc36kh1",  # more pixels than are
        "mb1ic17iw700oc70kw1",
        "mb2ic20id3ih6iw5oc40kd1kh1kw1",
    ],
)
def test_the_conformance_suite_passes(text: str, output: Output) -> None:
    results = list(check_problem("native:amx", ConvProblem.parse(text), output, repeats=3))
    assert not [str(r) for r in results if r.status == "failed"]
    assert any(r.status == "passed" for r in results)


@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_it_is_as_near_to_float64_as_pytorchs_kernels(layout: str, threads: int) -> None:
    """On sums long enough for rounding to show, whatever the threads share out."""
    p = ConvProblem.parse(f"mb4ic300ih14oc200kh1{layout}")
    x, w, g = (
        torch.randn(p.shape_of(slot)).to(memory_format=p.memory_format) for slot in ("input", "weight", "output")
    )
    torch.set_num_threads(threads)
    for pass_, operands in (("forward", (x, w)), ("grad_input", (g, w)), ("grad_weight", (g, x))):
        exact = get_backend("reference").bind(p, (pass_,))(*operands).double()
        errors = {
            name: (get_backend(name).bind(p, (pass_,))(*operands).double() - exact).pow(2).mean().item()
            for name in ("native:amx", "aten")
        }
        assert errors["native:amx"] <= 1.1 * errors["aten"], (pass_, errors)


def test_onednn_finds_its_own_tiles_again() -> None:
    """Both configure the tiles of the same threads."""
    p = ConvProblem.parse("mb1ic64ih16oc64kh1")
    x, w = torch.randn(p.input_shape), torch.randn(p.weight_shape)
    a, b = torch.randn(96, 160).bfloat16(), torch.randn(160, 48).bfloat16()
    product, forward = a @ b, get_backend("native:amx").bind(p, ("forward",))
    result = forward(x, w)
    for _ in range(5):
        assert torch.equal(a @ b, product)
        assert torch.equal(forward(x, w), result)


def test_it_says_what_it_does_not_compute() -> None:
    def reasons(text: str) -> str:
        return "; ".join(get_backend("native:amx").reasons_against(ConvProblem.parse(text), PASSES[:1], CPU))

    assert not reasons("mb1ic16ih4oc16kh1")
    for text in ("g2mb1ic32ih4oc32kh1", "mb1ic16ih8oc16kh3", "mb1ic16ih8oc16kh1sh2"):
        assert "pointwise convolutions of float32 in one group" in reasons(text)
    assert "of float32" in reasons("mb1ic16ih4oc16kh1 float64")
    assert "16 channels on both sides" in reasons("mb1ic15ih4oc16kh1")
    assert "16 pixels" in reasons("mb1ic16ih3oc16kh1")
