"""`banded` under Triton's interpreter, in the process that `test_bands` starts; pytest alone does not collect it.

The interpreter multiplies matrices in float32, whatever precision is asked for: what it checks is which values meet,
not how a chip rounds them.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import pytest
import torch

from convgrad.backends.reference import ReferenceBackend
from convgrad.backends.triton import bands
from convgrad.backends.triton.on_bands import BandWay, TritonBandedBackend
from convgrad.backends.triton.ways import Way, tiny
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output, Pass
from convgrad.testing import check_problem

assert os.environ.get("TRITON_INTERPRET") == "1"

# Fewer shares of a sum than on a GPU, but more than one: each is a program to interpret.
bands._PROGRAMS = 8

# numpy warns where an infinity meets a zero of a band.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CPU = torch.device("cpu")

#: Several tiles along every dimension, strides, dilation, multipliers, uneven and negative paddings, one row or column.
EXACT = """
g2mb3ic2ih13iw17oc2kh9kw11ph4pw5
g2mb2ic2ih9iw70oc4oh9ow66kh5kw9ph2pw3 float16
g1ic1oc1mb1ih40iw12oc1oh40ow12kh31kw9ph15pw4 bfloat16
g2mb2ic2ih13iw17oc4oh7ow6kh9kw9sh2sw3ph4pw3 channels_last
g2mb2ic2ih16iw30oc4kh3kw9dh1dw2ph2pw6 bfloat16 channels_last
g2mb3ic2iw33oc2ow35kw10sw1pw5
g2mb1ic2id4ih5iw9oc4kd3kh2kw9sd2sh2sw1pd1ph1pw3
""".strip().splitlines()

EXACT_SLOW = """
mb2ic1ih32iw32oc1kh31kw31ph15pw15
mb1ic1ih20iw66oc1kh13kw65ph6pw32
g2mb20ic2ih7iw7oc2kh13kw13ph6pw6
g2mb2ic2ih15iw37oc4oh15ow9kh2kw9sh1sw4dh3dw2ph2pw4 float16
g2mb2ic2ih11iw20oc2oh7ow12kh3kw9ph-1pw-1
g2mb2ic2id5ih6iw9oc2kd3kh3kw9sd1sh2sw3pd1ph1pw4 float16 channels_last
g2mb1ic2id7ih8iw12oc2kd2kh3kw9sd3sh2sw2dd1dh2dw1pd1ph2pw6
g2mb2ic2ih25iw1oc2kh9kw1ph4pw0
g1ic1oc1mb2iw300ow300kw63pw31
""".strip().splitlines()

#: For the whole conformance suite: alignment, poison, strides of zero, NaN and infinities, repeated bits, the bound.
CONFORM = [
    "g2mb2ic2ih9iw12oc2kh7kw9ph3pw4",
    "g2mb1ic2ih8iw20oc4kh3kw10sh2sw3ph1pw2dh0dw1 channels_last",
    "g2mb2ic2iw16oc2ow16kw9pw4 float16",
    "g2mb1ic2ih6iw9oc2oh12ow18kh4kw10sh2sw2ph1pw4 transposed bias",
]


def integers(problem: ConvProblem, slot: str) -> torch.Tensor:
    tensor = torch.randint(-2, 3, problem.shape_of(slot)).to(problem.dtype)  # type: ignore[arg-type]
    return tensor if slot == "weight" else tensor.contiguous(memory_format=problem.memory_format)


def check(text: str) -> None:
    problem = ConvProblem.parse(text)
    backend, reference = TritonBandedBackend(), ReferenceBackend()
    given = {slot: integers(problem, slot) for slot in ("input", "weight", "grad_output")}
    for pass_ in PASSES:
        assert not backend.reasons_against(problem, (pass_,), CPU)
        operands = [given[slot] for slot in OPERANDS[pass_]]
        got, expected = backend.bind(problem, (pass_,))(*operands), reference.bind(problem, (pass_,))(*operands)
        assert torch.equal(got, expected), pass_


@pytest.mark.parametrize("text", [*EXACT, *(pytest.param(text, marks=pytest.mark.slow) for text in EXACT_SLOW)])
def test_exact(text: str) -> None:
    check(text)


@pytest.mark.parametrize("use", ["result", "sum"])
def test_every_tile(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tuner may choose is as exact as the fixed tile."""
    from convgrad.backends.triton import banded_launch

    text = "g1ic1oc1mb3ih9iw41oc1oh10ow37kh8kw9ph4pw2"
    problem = ConvProblem.parse(text)
    g = bands.geometry(problem, adjoint=False, channel_lanes=False)
    for half in (False, True):
        sized = dataclasses.replace(g, itemsize=2 if half else 4)
        ways = ("ieee",) if half else ("tf32", "tf32x3")
        for band in dict.fromkeys(b for way in ways for b in bands.candidates(sized, use, way)):  # type: ignore[arg-type]
            banded_launch._bound.cache_clear()
            fixed = partial(_only, use, band)
            with monkeypatch.context() as patch:
                patch.setattr(banded_launch, "fixed", fixed)
                check(text)


def _only(use: str, band: bands.Band, g: bands.Geometry, wanted: str, precision: str) -> bands.Band:
    return band if wanted == use else bands.fixed(g, wanted, precision)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("text", CONFORM)
@pytest.mark.parametrize("output", PASSES)
def test_conforms(text: str, output: Output) -> None:
    results = check_problem(TritonBandedBackend(), text, output, repeats=2)
    assert not [str(r) for r in results if r.status == "failed"]


@pytest.mark.parametrize("pass_", PASSES)
def test_a_first_call_in_poisoned_memory(pass_: Output) -> None:
    """What it prepares at its first call allocates nothing that has no memory to poison."""
    from convgrad.backends.triton import banded_launch

    banded_launch._bound.cache_clear()
    (result,) = check_problem(TritonBandedBackend(), "g2mb1ic2ih4iw10oc2kh3kw9ph1pw4", pass_, properties=["memory"])
    assert result.status == "passed", str(result)


@pytest.mark.parametrize("pass_", PASSES)
def test_what_is_not_finite_stays_with_its_readers(pass_: str) -> None:
    """A band's zeros meet every value of a row; see `banded`."""
    text = "g2mb1ic2ih6iw20oc2kh3kw9ph1pw3"
    (result,) = check_problem(TritonBandedBackend(), text, pass_, properties=["nonfinite"])  # type: ignore[arg-type]
    assert result.status == "passed", str(result)


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from convgrad.backends.triton import banded_launch

    monkeypatch.setattr(banded_launch, "needs_wide", lambda *_: True)
    banded_launch._bound.cache_clear()
    check("g2mb2ic2ih7iw10oc4oh4ow10kh3kw9ph1pw3sh2sw1")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("way", [BandWay(1, 1, False, False, "ieee"), BandWay(4, 2, True, True, "ieee")])
def test_the_check_of_first_use(pass_: Pass, way: BandWay) -> None:
    """It finds nothing wrong, and runs the kernel that it is asked about."""
    backend = TritonBandedBackend()
    assert backend._fault(torch.float16, pass_, way, CPU) is None
    problem = tiny(pass_, torch.float16, Way("patches", way.result, way.source, strided=way.strided), (9, 11))
    a, b = (torch.empty(problem.shape_of(slot), dtype=problem.dtype) for slot in OPERANDS[pass_])
    assert backend._way(problem, pass_, a, b) == way._replace(wide=False)
