"""``native:winograd``: larger problems than those of the conformance suite, which it leaves to others."""

from __future__ import annotations

import pytest
import torch

from convgrad.backends import _native_library as library
from convgrad.engine import get_backend
from convgrad.problem import PASSES, ConvProblem, Output
from convgrad.testing import check_problem

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(library.why_not("winograd")), reason="no compiled kernels")
SLOTS = {"forward": ("input", "weight"), "grad_input": ("output", "weight"), "grad_weight": ("output", "input")}


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("output", PASSES)
@pytest.mark.parametrize(
    "text",
    [
        "mb1ic16ih4oc16kh3ph1",
        "mb3ic33ih7iw10oc50kh3kw3ph1pw1",  # ragged on every side
        "mb3ic33ih7iw10oc50kh3kw3ph1pw1 channels_last",
        "mb2ic100ih5oc20kh3",  # sums in pieces; three results in a row
        "mb1ic17ih3iw150oc18kh3kw3ph0pw2 channels_last",  # a row in several stretches
        "mb1ic18ih70oc17kh3ph1",  # several blocks
        "g3mb2ic60ih8oc48kh3ph1",
        "mb2ic20ih9iw13oc16kh3kw3dh2dw3ph2pw3",  # results of a tile lie apart
        "mb1ic16ih12oc16kh3dh5ph5 channels_last",
        "mb2ic16id4ih6iw7oc20kd3kh3kw3pd1ph1pw1",
        "mb1ic40id5ih6iw7oc16kd2kh3kw3dd2pd1ph1pw1 channels_last",
        "mb2ic16id3ih6iw6oc16kd1kh3kw3ph1pw1",
        "mb1ic16ih9oc32kh3ph1 transposed",
        "mb1ic16ih6oc17kh3ph1 float64",
        "mb2ic17iw100oc18kw3pw2",  # a sequence in several stretches
        "mb1ic16iw9oc16kw3dw3pw1 float64",
        "mb2ic17ih7iw10oc18kh3kw1ph1",
        "mb2ic17ih7iw10oc18kh1kw3pw1ph2 channels_last",
        "mb1ic16id5ih3iw4oc17kd3kh1kw1pd1dd2dh2",  # along depth
        "mb1ic16id5ih3iw4oc17kd3kh1kw1pd2 channels_last",
        "mb1ic16id4ih3iw5oc17kd2kh3kw1ph1",
        "g2mb1ic32id4ih3iw5oc34kd3kh1kw3pw1pd1 channels_last",
    ],
)
def test_the_conformance_suite_passes(text: str, output: Output) -> None:
    results = list(check_problem("native:winograd", ConvProblem.parse(text), output, repeats=3))
    assert not [str(r) for r in results if r.status == "failed"]
    assert any(r.status == "passed" for r in results)


@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", ["mb4ic300ih14oc200kh3ph1", "mb2ic64ih56oc64kh3ph1", "mb2ic64ih56iw56oc64kh3kw1ph1"])
def test_it_is_nearly_as_near_to_float64_as_pytorchs_kernels(size: str, layout: str, threads: int) -> None:
    """On sums long enough for rounding to show, whatever the threads share out.

    How near PyTorch's kernels are depends on the processor. One running sum in float32, of n products of normal values,
    has an error of n u / sqrt(6) on average, with u = 2^-24: a kernel that is nearer than that is near enough.
    """
    p = ConvProblem.parse(size + layout)
    operands = {
        slot: torch.randn(p.shape_of(slot)).to(memory_format=p.memory_format) for slot in ("input", "weight", "output")
    }
    torch.set_num_threads(threads)
    for pass_ in PASSES:
        a, b = (operands[slot] for slot in SLOTS[pass_])
        exact = get_backend("reference").bind(p, (pass_,))(a, b).double()
        errors = {
            name: (get_backend(name).bind(p, (pass_,))(a, b).double() - exact).pow(2).mean().sqrt().item()
            for name in ("native:winograd", "aten")
        }
        running = p.flops / 2 / exact.numel() * 2**-24 / 6**0.5  # flops / 2: products of all results
        assert errors["native:winograd"] <= max(1.7 * errors["aten"], running), (pass_, errors, running)


def test_it_says_what_it_does_not_compute() -> None:
    def reasons(text: str) -> str:
        return "; ".join(get_backend("native:winograd").reasons_against(ConvProblem.parse(text), PASSES[:1], CPU))

    for text in ("mb1ic16ih4oc16kh3", "g2mb1ic32ih4oc32kh3dh2ph9", "mb1ic16id4oc16kd3 float64", "mb1ic16iw8oc16kw3"):
        assert not reasons(text)
    assert "only for torch.float32, torch.float64" in reasons("mb1ic16ih4oc16kh3 bfloat16")
    assert "16 channels a group on both sides" in reasons("mb1ic15ih4oc16kh3")
    assert "16 channels a group on both sides" in reasons("g2mb1ic32ih8oc16kh3")
    others = (
        "mb1ic16ih8iw8oc16kh3kw5",
        "mb1ic16iw8oc16kw5",
        "mb1ic16id8ih8iw8oc16kd5kh1kw1",
        "mb1ic16id8ih8iw8oc16kd3kh1kw1ph1",
    )
    for text in ("mb1ic16ih8oc16kh3sh2", "mb1ic16ih8oc16kh1", *others):
        assert "kernels of 3" in reasons(text), text
    assert "too many" in reasons("mb1ic2048ih9oc2048kh3")  # the transformed weight would take 256 MB
    assert "too many" in reasons("mb1ic32768ih9oc16kh3")  # and the transformed values of 64 tiles 128 MB
    assert "too many" in reasons(f"mb1ic16id{2**40}ih3iw3oc16kd{2**40 - 20}kh3kw3")  # at once, whatever the size


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("output", PASSES)
def test_infinities_reach_exactly_the_results_whose_sums_they_are_in(output: Output, value: float) -> None:
    """3e38 is finite, and with others of its size overflows in a transform."""
    p = ConvProblem.parse("mb2ic32ih8oc32kh3ph1")
    a, b = (torch.randn(p.shape_of(slot)) for slot in SLOTS[output])
    a.view(-1)[77:79] = value
    b *= 0.1
    found = get_backend("native:winograd").bind(p, (output,))(a, b)
    exact = get_backend("reference").bind(p, (output,))(a, b)
    assert torch.equal(found.isfinite(), exact.isfinite())
