"""Rules for other ways to PyTorch's results: which, where, and that what they take computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings

import convgrad
from convgrad import settings
from convgrad.engine import cache, choose, measurements, measurer, rules
from convgrad.engine.registry import backends, reasons_against
from convgrad.engine.rules import why_other
from convgrad.problem import PASSES, ConvProblem, Output
from convgrad.testing import problems

CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
VOLUME = "mb1ic32id8ih16iw16oc32kd3kh3kw3pd1ph1pw1"
ROWS = [
    # what, the problem, the outputs, and the backends of the steps
    ("half", "mb4ic64ih28oc64kh3ph1 float16", ("forward",), ["aten:float32"]),
    ("half", "mb4ic64ih28oc64kh3ph1 bfloat16 channels_last", BOTH, ["aten:float32"]),
    ("half", "mb1ic20ih3oc20kh1 float16", ("forward",), ["aten"]),
    ("half", "mb4g64ic64ih28oc64kh3ph1 float16", ("forward",), ["native"]),
    ("half", "mb4ic3ih28oc16kh3ph1 float16", ("forward",), ["native"]),
    ("half", "mb4ic64ih28oc64kh3ph1", ("forward",), ["aten"]),
    ("", VOLUME, ("forward",), ["aten:mkldnn"]),
    ("", VOLUME, BOTH, ["aten:mkldnn", "aten:mkldnn"]),
    ("", VOLUME.replace("mb1", "mb2"), ("forward",), ["aten"]),
    ("", f"{VOLUME} float64", ("forward",), ["aten"]),
    ("", "mb2ic64ih28oc128kh1sh2", ("grad_input",), ["im2col"]),
    ("", "mb2ic64ih28oc128kh1sh2", BOTH, ["im2col", "aten"]),
    ("", "mb2ic64ih28oc128kh1sh2", ("forward",), ["aten"]),
    ("", "mb2ic64ih28oc128kh1sh2 channels_last", ("grad_input",), ["aten"]),
    ("", "mb1ic512ih14oc512kh1sh2", ("grad_input",), ["aten"]),
    ("", "mb8ic3ih32oc96kh4sh4", ("grad_input",), ["im2col"]),
    ("", "mb2ic4ih16oc8kh2sh2", ("grad_input",), ["aten"]),
    ("", "mb2ic64ih28oc128kh3sh2ph1", ("grad_input",), ["aten"]),
    ("", "mb1ic64ih64oc3kh9ph4", ("grad_input",), ["aten:channels_last"]),
    ("", "mb1ic64ih64oc3kh9ph4", ("grad_weight",), ["aten"]),
    ("", "mb2g16ic768iw250oc768kw128pw64", ("forward",), ["aten:channels_last"]),
    ("", "mb2g16ic768iw250oc768kw128pw64", BOTH, ["aten:channels_last"]),
]


def chosen(problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device = CPU) -> Any:
    return choose(problem, outputs, device, settings.current(), None)


@pytest.mark.parametrize(("lacks", "text", "outputs", "expected"), ROWS)
def test_what_is_taken(
    lacks: str, text: str, outputs: tuple[Output, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: bool(lacks) and dtype.itemsize == 2)
    steps = chosen(ConvProblem.parse(text), outputs)
    assert [s.backend.name for s in steps] == expected
    for step in steps:
        assert (step.backend.name in ("aten", "native")) == ("a compiled graph holds it" not in step.reason)


def test_a_processor_with_their_arithmetic_computes_16_bits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: False)
    for dtype in ("float16", "bfloat16"):
        [step] = chosen(ConvProblem.parse(f"mb4ic64ih28oc64kh3ph1 {dtype}"), ("forward",))
        assert step.backend.name == "aten"


def test_elsewhere_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: True)
    for _, text, outputs, _ in ROWS:
        assert why_other(ConvProblem.parse(text), outputs, torch.device("cuda")) == ("", "")


@given(problems(largest=40))
@hypothesis_settings(max_examples=150, deadline=None)
def test_no_rule_names_a_backend_that_cannot(problem: ConvProblem) -> None:
    for pass_ in PASSES:
        name, _ = why_other(problem, (pass_,), CPU)
        if name:
            assert not reasons_against(backends()[name], problem, (pass_,), CPU, settings.current())


@pytest.fixture
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("CONVGRAD_CACHE", str(tmp_path))
        measurements.reload()
        yield
    measurements.reload()
    cache.invalidate()


@pytest.mark.usefixtures("empty_store")
def test_what_a_rule_takes_is_measured_too() -> None:
    """Else a measurement would settle on less than the rule; oneDNN by name is no candidate of its own."""
    problem = ConvProblem.parse(VOLUME)
    assert not backends()["aten:mkldnn"].candidate
    known = measurer.measure_now(problem, ("forward",), CPU, settings.current(), force=True)
    assert known is not None
    assert "aten:mkldnn" in {way for way, _ in known.ranked()}


@pytest.mark.parametrize("text", [VOLUME, "mb8ic64ih28oc64kh1sh2", "mb8ic20ih28oc4kh5ph2"])
def test_the_public_function_gives_what_pytorch_gives(text: str) -> None:
    p = ConvProblem.parse(text)
    x, w = torch.randn(p.input_shape, requires_grad=True), torch.randn(p.weight_shape, requires_grad=True)
    names = [s.backend.name for s in chosen(p, ("forward",)) + chosen(p, BOTH)]
    assert set(names) != {"aten"}
    arguments = (None, p.stride, [low for low, _ in p.padding])
    ours, theirs = (getattr(m, f"conv{p.ndim}d") for m in (convgrad, torch.nn.functional))
    g = torch.randn(p.output_shape)
    for mine, expected in zip(
        torch.autograd.grad(ours(x, w, *arguments), (x, w), g),
        torch.autograd.grad(theirs(x, w, *arguments), (x, w), g),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
