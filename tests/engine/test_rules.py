"""The rules: how a line of the table is read, what it decides, and that the table in force is a sound one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import convgrad
from convgrad import settings
from convgrad.engine import cache, choose, measurements, measurer, rules
from convgrad.engine.registry import backends
from convgrad.engine.rules import by_rule, case_of, rules_of
from convgrad.problem import ConvProblem, Output

CPU = torch.device("cpu")
KINDS = ("depthwise", "grouped", "pointwise", "dense")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
VOLUME = "mb1ic32id8ih16iw16oc32kd3kh3kw3pd1ph1pw1"
TABLE = """
# a comment
forward      depthwise  taps >= 9, taps < 25, not channels_last  native             2.0x
forward      dense      kB < 100                          native             3.0x
forward      dense      kB < 100                          im2col             3.0x
forward      dense      patches                                  im2col             1.5x
forward      grouped    always                                   native:avx2        1.1x
forward      emulated   always                                   aten:float32       9.9x
forward      pointwise  always                                   native             1.2x
grad_input   pointwise  always                                   aten:mkldnn        1.2x
grad_input   dense      always                                   aten:mkldnn        1.2x
any          depthwise  dilation >= 2                                    im2col             1.2x
grad_weight  dense      threads >= 2                             im2col             1.2x
both         dense      ndim >= 3                                separate           1.2x
both         dense      ndim < 2                                 aten:channels_last 1.2x
""".replace(" 1.2x", "  1.2x")
ROWS = [
    ("mb1g8ic8ih9oc8kh3ph1", ("forward",), ["native"]),
    ("mb1g8ic8ih9oc8kh2", ("forward",), ["aten"]),  # 4 taps
    ("mb1g8ic8ih9oc8kh5", ("forward",), ["aten"]),  # 25
    ("mb1g8ic8ih9oc8kh3 channels_last", ("forward",), ["aten"]),
    ("mb1g8ic8ih9oc8kh3ph1", ("grad_input",), ["aten"]),  # no line about it
    ("mb4ic8ih9oc8kh3", ("forward",), ["native"]),
    ("mb1ic8ih9oc8kh3", ("forward",), ["aten"]),  # so few operations that PyTorch's own call is faster
    ("mb4ic272ih2oc1088kh1", ("grad_input",), ["aten:mkldnn"]),
    ("mb4ic8ih1oc128kh1", ("forward",), ["native"]),  # squeeze and excitation: as few operations, and yet
    ("mb4g2ic272ih2oc272kh1", ("grad_input",), ["aten:mkldnn"]),
    ("mb4g2ic272ih3oc272kh1sh2", ("grad_input",), ["aten"]),  # with a stride it is one of groups
    ("mb1ic8ih9oc32kh3", ("forward",), ["im2col"]),  # native cannot
    ("mb1ic64ih64oc64kh2sh2", ("forward",), ["im2col"]),
    ("mb1ic64ih64oc64kh3sh2", ("forward",), ["aten"]),
    ("mb1ic64ih64oc64kh3 bfloat16", ("forward",), ["aten:float32"]),
    ("mb1g8ic8ih9oc8kh2dh1", ("grad_weight",), ["im2col"]),
    ("mb1g8ic8ih9oc8kh2dh1", BOTH, ["im2col", "im2col"]),  # a line about any output; it has no call for both
    (VOLUME, BOTH, ["aten:mkldnn", "aten"]),
    ("mb1ic64iw64oc64kw3", BOTH, ["aten:channels_last"]),
    ("mb1ic64ih64oc64kh3", BOTH, ["aten"]),
]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rules are those above, on a processor without arithmetic for 16 bits, and nothing was measured."""
    monkeypatch.setattr(rules, "TABLE", TABLE)
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: dtype.itemsize == 2)
    cache.invalidate()
    yield
    cache.invalidate()


def chosen(text: str, outputs: tuple[Output, ...], threads: int = 1) -> Any:
    problem = ConvProblem.parse(text)
    return choose(problem, outputs, CPU, settings.current()._replace(threads=threads), None, stored=False)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("text", "outputs", "expected"), ROWS)
def test_the_first_line_that_fits_and_can(text: str, outputs: tuple[Output, ...], expected: list[str]) -> None:
    assert [step.backend.name for step in chosen(text, outputs)] == expected


@pytest.mark.usefixtures("table")
def test_apart_only_where_another_backend_takes_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own backward computes both gradients in one call, and its autograd does without ours."""
    both = "both  dense  always  separate  1.2x\n"
    for text, expected in ((both, ["aten"]), (both + "grad_weight  dense  always  im2col  2x\n", ["aten", "im2col"])):
        monkeypatch.setattr(rules, "TABLE", text)
        assert [step.backend.name for step in chosen("mb1ic64ih64oc64kh3", BOTH)] == expected


@pytest.mark.usefixtures("table")
def test_the_reason_is_the_line() -> None:
    [step] = chosen("mb1g8ic8ih9oc8kh3ph1", ("forward",))
    assert step.reason.startswith(
        "by rule: forward of depthwise problems, taps >= 9, taps < 25, not channels_last: 2.0x as fast as PyTorch"
    )
    [step] = chosen("mb1g8ic8ih9oc8kh5", ("forward",))
    assert step.reason == "no rule prefers another backend"


@pytest.mark.usefixtures("table")
def test_the_reason_for_pytorchs_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "TABLE", "both  dense  taps < 5  aten  1x\nboth  dense  always  im2col  2x\n")
    [step] = chosen("mb1ic64ih64oc64kh2", BOTH)
    said = "by rule: both gradients of dense problems, taps < 5: nothing is clearly faster than PyTorch's own call"
    assert (step.backend.name, step.reason) == ("aten", said)


@pytest.mark.usefixtures("table")
def test_threads_are_a_condition() -> None:
    names = [chosen("mb1ic64ih9oc64kh3", ("grad_weight",), threads)[0].backend.name for threads in (1, 2)]
    assert names == ["aten", "im2col"]


@pytest.mark.usefixtures("table")
def test_native_where_there_are_no_wider_vectors_than_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "mb1g2ic8ih9oc8kh3"
    known = {way for way, _ in by_rule(ConvProblem.parse(text), ("forward",), CPU, 1)}
    assert known == {"native:avx2", "native"}
    other = type(backends()["native:avx2"])
    monkeypatch.setattr(other, "reasons_against", lambda self, problem, outputs, device: ["not here"])
    assert [step.backend.name for step in chosen(text, ("forward",))] == ["native"]


@pytest.mark.usefixtures("table")
def test_elsewhere_nothing_was_measured() -> None:
    for text, outputs, _ in ROWS:
        assert not list(by_rule(ConvProblem.parse(text), outputs, torch.device("cuda"), 1))
    mostly_padding = ConvProblem.parse("mb1g8ic8ih4oc8kh3ph2000sh400")
    assert not list(by_rule(mostly_padding, ("forward",), CPU, 1))


@pytest.mark.usefixtures("table")
def test_what_a_rule_takes_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a measurement would settle on less than the rule; oneDNN by name is no candidate of its own."""
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    measurements.reload()
    try:
        assert not backends()["aten:mkldnn"].candidate
        problem = ConvProblem.parse(VOLUME)
        known = measurer.measure_now(problem, ("grad_input",), CPU, settings.current(), force=True)
    finally:
        measurements.reload()
    assert known is not None
    assert "aten:mkldnn" in {way for way, _ in known.ranked()}


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("text", [VOLUME, "mb2ic64ih28oc64kh1sh2", "mb16ic20iw28oc4kw5pw2"])
def test_the_public_function_gives_what_pytorch_gives(text: str) -> None:
    p = ConvProblem.parse(text)
    x, w = torch.randn(p.input_shape, requires_grad=True), torch.randn(p.weight_shape, requires_grad=True)
    assert {s.backend.name for s in (*chosen(text, ("forward",)), *chosen(text, BOTH))} != {"aten"}
    arguments = (None, p.stride, [low for low, _ in p.padding])
    ours, theirs = (getattr(m, f"conv{p.ndim}d") for m in (convgrad, torch.nn.functional))
    g = torch.randn(p.output_shape)
    for mine, expected in zip(
        torch.autograd.grad(ours(x, w, *arguments), (x, w), g),
        torch.autograd.grad(theirs(x, w, *arguments), (x, w), g),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


# ---- the table in force ------------------------------------------------------------------------------


def table_in_force() -> str:
    """The one of the module, not the tests' own (`conftest.py`)."""
    source = Path(rules.__file__).read_text(encoding="utf-8")
    return source.split('TABLE = """')[1].split('"""')[0]


@pytest.mark.parametrize("text", [rules.TABLE, table_in_force()], ids=["of the tests", "in force"])
def test_the_table_is_a_screenful_of_lines_that_say_something(text: str) -> None:
    found = rules_of(text)
    kinds = [(outputs, kind) for outputs in ("forward", *BOTH, "both") for kind in KINDS]
    assert {*found} <= {*kinds, *((outputs, "emulated") for outputs, _ in kinds)}
    every = [rule for some in found.values() for rule in some]
    assert 0 < len(every) <= 48
    probe = ConvProblem.parse(VOLUME)
    for rule in every:
        assert rule.way in {*backends(), rules.SEPARATE} - {"reference"}
        assert rule.gain.endswith("x")
        rule.holds(probe, 1)  # each condition is one
        assert all(rules._holds(c, probe, 1) in (True, False) for c in rule.conditions)
    for (outputs, _), some in found.items():
        assert outputs == "both" or rules.SEPARATE not in {rule.way for rule in some}


@pytest.mark.parametrize(
    ("text", "outputs", "kind"),
    [
        ("g8ic8ih9oc16kh3", ("forward",), ("forward", "depthwise")),
        ("g8ic8ih9oc16kh3", ("grad_input", "grad_weight", "grad_bias"), ("both", "depthwise")),
        ("g2ic8ih9oc16kh3", ("grad_weight", "grad_bias"), ("grad_weight", "grouped")),
        ("ic8ih9oc16kh3 transposed", ("forward", "grad_weight"), ("both", "dense")),
        ("ic1ih9oc1kh3", ("grad_input",), ("grad_input", "dense")),
    ],
)
def test_cases(text: str, outputs: tuple[Output, ...], kind: tuple[str, str]) -> None:
    problem = ConvProblem.parse(text)
    assert case_of(problem, outputs, emulated=False) == kind
    emulated = kind if kind[1] == "depthwise" else (kind[0], "emulated")
    assert case_of(problem, outputs, emulated=True) == emulated


@pytest.mark.parametrize(
    ("text", "outputs"),
    [
        ("mb8g96ic96ih56oc96kh7ph3", BOTH),
        ("mb8g96ic96ih56oc96kh7ph3", ("grad_weight",)),
        ("mb8g768ic768iw2048oc768ow2048kw4pw3", BOTH),
        ("mb8g64ic64ih28oc64kh3ph1 float64", ("forward",)),
    ],
)
def test_what_wins_by_far_on_every_processor(
    text: str, outputs: tuple[Output, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times as fast wherever it was measured: whatever the rules are derived from, they say so."""
    monkeypatch.setattr(rules, "TABLE", table_in_force())
    if backends()["native"].reasons_against(ConvProblem.parse(text), outputs, CPU):
        pytest.skip("the compiled kernels are not here")
    assert {step.backend.name.split(":")[0] for step in chosen(text, outputs)} == {"native"}
