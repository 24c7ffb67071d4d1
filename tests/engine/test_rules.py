"""The rules: how a line of the table is read, what it decides, and that the table in force is a sound one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import convgrad
from convgrad import settings
from convgrad.engine import cache, choose, rules
from convgrad.engine.registry import backends
from convgrad.engine.rules import by_rule, kind_of, rules_of
from convgrad.problem import ConvProblem, Output

CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
VOLUME = "mb1ic32id8ih16iw16oc32kd3kh3kw3pd1ph1pw1"
TABLE = """
# a comment
depthwise  taps >= 9, taps < 25, not channels_last  native              2.0x
depthwise  smaller >= 2                             im2col              1.2x
dense      kB < 100                                 native              3.0x
dense      kB < 100                                 im2col              3.0x
dense      channels_last                            im2col              1.5x
dense      taps >= 27                               aten:mkldnn         1.2x
emulated   always                                   aten:float32        9.9x
pointwise  smaller < 200                            native              1.2x
pointwise  always                                   aten:mkldnn         1.2x
"""
ROWS = [
    ("mb1g8ic8ih9oc8kh3ph1", ("forward",), ["native"]),
    ("mb1g8ic8ih9oc8kh3ph1", BOTH, ["native"]),
    ("mb1g8ic8ih9oc8kh2", ("forward",), ["aten"]),  # 4 taps
    ("mb1g8ic8ih9oc8kh5", ("forward",), ["aten"]),  # 25
    ("mb1g8ic8ih9oc8kh3 channels_last", ("forward",), ["aten"]),
    ("mb4g2ic8ih9oc8kh3", ("forward",), ["aten"]),  # no line about it
    ("mb4ic8ih9oc8kh3", ("forward",), ["native"]),
    ("mb1ic8ih9oc8kh3", ("forward",), ["aten"]),  # so few operations that PyTorch's own call is faster
    ("mb4ic272ih2oc1088kh1", ("grad_input",), ["aten:mkldnn"]),
    ("mb4ic8ih1oc128kh1", ("forward",), ["native"]),  # squeeze and excitation: as few operations, and yet
    ("mb4g2ic544ih2oc544kh1", ("grad_input",), ["aten"]),  # several products are grouped
    ("mb1ic8ih9oc32kh3", ("forward",), ["im2col"]),  # native cannot
    ("mb1ic8ih9oc32kh3", BOTH, ["im2col", "im2col"]),  # it has no call for both
    ("mb1ic64ih64oc64kh3 channels_last", ("forward",), ["im2col"]),
    ("mb1ic64ih64oc64kh3", BOTH, ["aten"]),
    ("mb1ic64ih64oc64kh3 bfloat16", ("forward",), ["aten:float32"]),
    (VOLUME, BOTH, ["aten:mkldnn", "aten:mkldnn"]),
]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rules are those above, on a processor without arithmetic for 16 bits, and nothing was measured."""
    monkeypatch.setattr(rules, "TABLE", TABLE)
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: dtype.itemsize == 2)
    cache.invalidate()
    yield
    cache.invalidate()


def chosen(text: str, outputs: tuple[Output, ...]) -> Any:
    problem = ConvProblem.parse(text)
    return choose(problem, outputs, CPU, settings.current(), None, stored=False)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("text", "outputs", "expected"), ROWS)
def test_the_first_line_that_fits_and_can(text: str, outputs: tuple[Output, ...], expected: list[str]) -> None:
    assert [step.backend.name for step in chosen(text, outputs)] == expected


@pytest.mark.parametrize(("lacks", "expected"), [(True, "native"), (False, "aten")])
def test_the_processors_own_products_of_16_bits_are_pytorchs(
    lacks: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: lacks)
    problem = ConvProblem.parse("mb2ic48ih7oc33kh1 channels_last bfloat16")
    assert next((way for way, _ in rules.by_rule(problem, CPU)), "aten") == expected


@pytest.mark.usefixtures("table")
def test_the_reason_is_the_line() -> None:
    [step] = chosen("mb1g8ic8ih9oc8kh3ph1", ("forward",))
    assert step.reason.startswith(
        "by rule: depthwise problems, taps >= 9, taps < 25, not channels_last: 2.0x as fast as PyTorch"
    )
    [step] = chosen("mb1g8ic8ih9oc8kh5", ("forward",))
    assert step.reason == "no rule prefers another backend"


@pytest.mark.usefixtures("table")
def test_elsewhere_nothing_was_measured() -> None:
    for text, _, _ in ROWS:
        assert not list(by_rule(ConvProblem.parse(text), torch.device("cuda")))
    mostly_padding = ConvProblem.parse("mb1g8ic8ih4oc8kh3ph2000sh400")
    assert not list(by_rule(mostly_padding, CPU))


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("text", [VOLUME, "mb1ic8ih9oc32kh3"])
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
    assert {*found} <= {"depthwise", "emulated", "pointwise", "dense", "grouped"}
    every = [rule for some in found.values() for rule in some]
    assert 0 < len(every) <= 16
    probe = ConvProblem.parse(VOLUME)
    for rule in every:
        assert backends()[rule.way].candidate  # else a measurement would settle on less than the rule
        assert rule.gain.endswith("x")
        assert rule.holds(probe) in (True, False)
        assert all(rules._holds(c, probe) in (True, False) for c in rule.conditions)  # each is one


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("g8ic8ih9oc16kh3", "depthwise"),
        ("g2ic8ih9oc16kh3", "grouped"),
        ("mb9ic8ih9oc16kh3 transposed", "dense"),
        ("ic1ih9oc1kh3", None),  # so few operations that PyTorch's own call is faster
        ("g2ic8ih9oc16kh1", "grouped"),
        ("mb9ic8ih9oc16kh1ph1", "dense"),
    ],
)
def test_kinds(text: str, kind: str | None) -> None:
    problem = ConvProblem.parse(text)
    assert kind_of(problem, emulated=False) == kind
    assert kind_of(problem, emulated=True) == ("depthwise" if kind == "depthwise" else "emulated")


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
