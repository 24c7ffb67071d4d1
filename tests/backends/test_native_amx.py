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
        "mb2ic33ih9oc40kh3ph1",  # ragged, and a border
        "mb2ic33ih9oc40kh3ph1 channels_last",
        "mb3ic16ih40oc48kh3ph1sh2",  # remainders of a stride; several boxes
        "mb1ic70iw900oc20ow450kw5sw2pw2",
        "mb1ic18ih12oc18kh2sh3",  # elements that nothing reads
        "mb2ic32ih13oc16kh3dh2ph3",
        "g3mb2ic60id4ih6iw7oc48kd3kh3kw3pd1ph1pw1",
        "g2mb2ic40ih5oc40kh1",
        "mb1ic16ih9oc32kh4sh2ph1 transposed",
    ],
)
def test_the_conformance_suite_passes(text: str, output: Output) -> None:
    results = list(check_problem("native:amx", ConvProblem.parse(text), output, repeats=3))
    assert not [str(r) for r in results if r.status == "failed"]
    assert any(r.status == "passed" for r in results)


@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", ["mb4ic300ih14oc200kh1", "mb4ic150ih14oc100kh3ph1"])
def test_it_is_as_near_to_float64_as_pytorchs_kernels(size: str, layout: str, threads: int) -> None:
    """On sums long enough for rounding to show, whatever the threads share out.

    The squares of PyTorch's own errors differ by up to a factor of ten between layouts.
    """
    p = ConvProblem.parse(size + layout)
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
        assert errors["native:amx"] <= 1.25 * errors["aten"], (pass_, errors)


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

    for text in ("mb1ic16ih4oc16kh1", "g2mb1ic32ih4oc32kh1", "mb1ic16ih8oc16kh3", "mb1ic16ih8oc16kh1sh2"):
        assert not reasons(text)
    assert "only for torch.float32" in reasons("mb1ic16ih4oc16kh1 float64")
    assert "16 channels a group on both sides" in reasons("mb1ic15ih4oc16kh1")
    assert "16 channels a group on both sides" in reasons("g2mb1ic32ih8oc16kh3")
    assert "16 pixels" in reasons("mb1ic16ih3oc16kh1")
    assert "too large" in reasons("mb1ic2048ih9oc2048kh5")  # the packed weight would take 600 MB
    assert "too large" in reasons("mb1ic512ih300oc16kh3dh140ph140")  # what one position reads, 240 MB
    assert "too large" in reasons(f"mb1ic16iw{2**40}oc16kw{2**40 - 20}")  # at once, whatever the size


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3.4e38])
@pytest.mark.parametrize("output", PASSES)
def test_infinities_reach_exactly_the_results_whose_sums_they_are_in(output: Output, value: float) -> None:
    """3.4e38 is finite, and rounds to infinity in bfloat16."""
    p = ConvProblem.parse("mb2ic32ih8oc32kh3ph1")
    slots = {"forward": ("input", "weight"), "grad_input": ("output", "weight"), "grad_weight": ("output", "input")}
    a, b = (torch.randn(p.shape_of(slot)) for slot in slots[output])
    a.view(-1)[77] = value
    found = get_backend("native:amx").bind(p, (output,))(a, b)
    exact = get_backend("reference").bind(p, (output,))(a, b)
    assert torch.equal(found.isfinite(), exact.isfinite())
