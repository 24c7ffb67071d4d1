"""The rules: which backend they take, what has an estimate, and that the tables in force are sound ones."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import convgrad
from convgrad.engine import cache, choose, costs, rules
from convgrad.engine.registry import backends, registered
from convgrad.engine.rules import by_rule, kind_of
from convgrad.problem import PASSES, ConvProblem, Output, Outputs

CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
ONE_BY_ONE: tuple[tuple[Output, ...], ...] = (("forward",), ("grad_input",), ("grad_weight",))
VOLUME = "mb1ic80id8ih16iw16oc8kd3kh3kw3pd1ph1pw1"
TABLE = {"depthwise": {"native": 2.0}, "emulated": {"aten:float32": 9.9}}
GAINS = {
    "pointwise": {"aten:mkldnn": 1.2, "native": 0.9},
    "grouped": {"native": 1.44, "native:winograd": 1.3},
    "dense": {"native": 3.0, "im2col": 1.5, "aten:mkldnn": 1.2},
}
ROWS = [
    ("mb1g8ic8ih9oc8kh3ph1", ("forward",), ["native"]),
    ("mb1g8ic8ih9oc8kh3ph1", BOTH, ["native"]),
    ("mb4g2ic8ih9oc8kh3", ("forward",), ["aten"]),  # too little to gain
    ("mb4ic8ih9oc8kh3", ("forward",), ["native"]),
    ("mb4ic8ih9oc8kh3", BOTH, ["native"]),
    ("mb4ic60ih9oc1088kh1", ("grad_input",), ["aten:mkldnn"]),  # of matrix products less is enough
    ("mb2ic80ih9oc8kh3", ("forward",), ["im2col"]),  # native cannot
    ("mb2ic80ih9oc8kh3", BOTH, ["im2col", "im2col"]),  # it has no call for both
    ("mb1ic64ih64oc64kh3 bfloat16", ("forward",), ["aten:float32"]),
    ("mb1ic96ih16oc384kh16sh16 float16", ("forward",), ["aten"]),  # a weight is in one product
    ("mb1ic96ih16oc384kh16sh16 float16", ("grad_weight",), ["aten:float32"]),
    ("mb1ic96ih16oc384kh16sh16 float16", BOTH, ["aten:float32"]),
]


def gains(problem: ConvProblem, outputs: Outputs) -> dict[str, float]:
    """Estimates of the tests' own."""
    if problem.pointwise:
        return GAINS["pointwise"]
    return GAINS["grouped" if problem.groups > 1 else "dense"]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rules are those above, on a processor without arithmetic for 16 bits, and nothing was measured."""
    monkeypatch.setattr(rules, "TABLE", TABLE)
    monkeypatch.setattr(rules, "gains", gains)
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: "all" if dtype.itemsize == 2 else "")
    cache.invalidate()
    yield
    cache.invalidate()


def chosen(text: str, outputs: tuple[Output, ...]) -> Any:
    problem = ConvProblem.parse(text)
    return choose(problem, outputs, CPU, stored=False)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("text", "outputs", "expected"), ROWS)
def test_the_first_that_gains_enough_and_can(text: str, outputs: tuple[Output, ...], expected: list[str]) -> None:
    assert [step.backend.name for step in chosen(text, outputs)] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mb64ic3id2ih14iw14oc1152kd2kh14kw14sd2sh14sw14", ["aten:patches"] * 3),
        ("mb64ic3ih16oc768kh16sh16", ["aten:patches"] * 3),
        ("mb4ic3ih224oc384kh14sh14", ["aten", "aten:patches", "aten"]),
        ("mb4ic3ih224oc384kh14sh14 float64", ["aten"] * 3),
        ("mb4ic3iw4096oc128kw3sw3", ["aten", "aten:patches", "aten"]),
    ],
)
def test_kernels_that_do_not_overlap(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "TABLE", {})
    assert [chosen(text, outputs)[0].backend.name for outputs in ONE_BY_ONE] == expected
    both = {step.backend.name for step in chosen(text, BOTH)}
    assert both == {*expected[1:]}


@pytest.mark.usefixtures("table")
def test_the_reason_is_the_line_or_the_estimate() -> None:
    [step] = chosen("mb1g8ic8ih9oc8kh3ph1", ("forward",))
    assert step.reason.startswith("by rule: on depthwise problems native is 2.0x as fast as PyTorch")
    [step] = chosen("mb4ic8ih9oc8kh3", ("forward",))
    assert step.reason == "by rule: native is 3.0x as fast as PyTorch, by estimate"
    [step] = chosen("mb4g2ic8ih9oc8kh3", ("forward",))
    assert step.reason == "no rule prefers another backend"


@pytest.mark.usefixtures("table")
def test_elsewhere_nothing_was_measured() -> None:
    for text, outputs, _ in ROWS:
        assert not list(by_rule(ConvProblem.parse(text), outputs, torch.device("cuda")))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("ic128iw256oc512", ["aten:matmul"]),  # packing takes too long
        ("ic512iw256oc512", ["native:amx", "aten:matmul"]),
        ("ic96iw6000oc384", ["native:amx", "native", "aten:matmul"]),
        ("ic640iw6000oc640", ["native:amx", "aten:matmul"]),
        ("ic64iw6000oc640", ["native:amx", "native", "aten:matmul"]),
        ("ic60iw6000oc640", ["native", "aten:matmul"]),
        ("ic64iw6000oc40", ["aten:matmul"]),
    ],
)
def test_linear_layers_where_mkl_is_at_its_best(
    monkeypatch: pytest.MonkeyPatch, layer: str, expected: list[str]
) -> None:
    for name in ("mkl_at_its_best", "avx512_here"):
        monkeypatch.setattr(rules, name, lambda: True)
    wide = {"native:amx": 1.5, "native": 1.2}
    monkeypatch.setattr(
        rules, "gains", lambda p, outputs: wide if min(p.in_channels, p.out_channels) >= 64 else {"native": 1.7}
    )
    problem = ConvProblem.parse(f"mb1ih1{layer}kh1kw1 channels_last")
    assert [way for way, _ in by_rule(problem, ("forward",), CPU)] == expected
    image = ConvProblem.parse(f"mb2ih1{layer}kh1kw1 channels_last")  # for which PyTorch calls no MKL
    assert "aten:matmul" not in [way for way, _ in by_rule(image, ("forward",), CPU)]


@pytest.mark.usefixtures("table")
def test_only_what_the_processor_lacks_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: "grad_weight")
    ways = [chosen("mb1ic96ih16oc96kh3ph1 float16", outputs)[0].backend.name for outputs in (*ONE_BY_ONE, BOTH)]
    assert ways == ["aten", "aten", "aten:float32", "aten:float32"]


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("text", [VOLUME, "mb2ic80ih9oc8kh3"])
def test_the_public_function_gives_what_pytorch_gives(text: str) -> None:
    p = ConvProblem.parse(text)
    x, w = torch.randn(p.input_shape, requires_grad=True), torch.randn(p.weight_shape, requires_grad=True)
    assert {s.backend.name for s in (*chosen(text, ("forward",)), *chosen(text, BOTH))} != {"aten"}
    arguments = (None, p.stride, [low for low, _ in p.padding])
    ours, theirs = (getattr(m, f"conv{p.ndim}d") for m in (convgrad, torch.nn.functional))
    g = torch.randn(p.output_shape)
    torch.testing.assert_close(
        torch.autograd.grad(ours(x, w, *arguments), (x, w), g),
        torch.autograd.grad(theirs(x, w, *arguments), (x, w), g),
        rtol=1e-4,
        atol=1e-4,
    )


# ---- what has an estimate, and what it is made of -----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lacking", "kind"),
    [
        ("g8ic8ih9oc16kh3", "all", "depthwise"),
        ("g2ic8ih9oc16kh3", "", "other"),
        ("g2ic8ih9oc16kh3", "grad_weight", "emulated"),
        ("mb1g8ic8ih4oc8kh31ph15", "", "depthwise"),
        ("mb1ic8ih9oc16kh3", "", "other"),
        ("mb1g8ic8ih4oc8kh3ph2000sh400", "", None),  # hardly anything but padding
        ("mb0ic8ih9oc16kh3", "", None),
        ("mb1ic64ih14oc64kh1", "", None),  # a small matrix product
        ("mb1ic64ih14oc64kh1ph1", "", "other"),  # no matrix product
        ("mb1ic64ih14oc128kh1", "", "other"),
        ("mb8ic64ih14oc16kh1", "", "other"),  # oneDNN's
        ("mb8ic64ih14oc16kh1 float64", "", "other"),
        ("mb4ic64ih14oc16kh1 float64", "", None),
        ("mb1ic64id7oc64kd1", "", None),
        ("mb1ic64id7oc64kd1 channels_last", "", "other"),  # copied first
    ],
)
def test_kinds(text: str, lacking: str, kind: str | None) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    assert kind_of(ConvProblem.parse(text), lacking) == kind


TEXTS = [
    "mb8ic64ih28oc64kh3ph1",
    "mb8ic64ih28oc64kh3ph1 channels_last float64",
    "mb2ic64id8oc32kd3dd1",
    "g4mb2ic64iw300oc64kw9sw2",
    "mb8ic3ih32oc64kh4sh4 bfloat16",
    "mb4ic64ih32oc128kh1sh2",
    "mb2ic32ih9oc16kh2sh2 transposed",
]


@pytest.mark.parametrize("text", TEXTS)
def test_twice_the_batch_is_twice_the_work_of_all_but_weights_and_calls(text: str) -> None:
    one = ConvProblem.parse(text)
    two = one.replace(batch=2 * one.batch)
    for pass_, kernels in product(PASSES, (*costs.BACKENDS, "oneDNN", "columns")):
        amounts = costs.work(one, pass_, kernels)
        assert min(amounts.values()) >= 0
        for what, more in costs.work(two, pass_, kernels).items():
            assert more == pytest.approx(amounts[what] * (1 if what in ("call", "weight") else 2))


def test_amounts_are_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    p = ConvProblem.parse(TEXTS[0])
    monkeypatch.setattr(costs, "threads", lambda: 1)
    alone = costs.work(p, "forward", "native")
    assert alone["convolution"] == p.flops / 1e6
    assert alone["weight"] == prod(p.weight_shape) / 1e6
    monkeypatch.setattr(costs, "threads", lambda: 4)
    assert costs.work(p, "forward", "native") == {k: n / (1 if k == "call" else 4) for k, n in alone.items()}


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("mb1ic64ih28oc64kh3ph1", 9 / 4),
        ("mb1ic64iw28oc64kw3pw1", 3 / 2),
        ("mb1ic64ih28iw28oc64kh1kw3pw1", 3 / 2),
        ("mb1ic64id8ih28iw28oc64kd3kh3kw3pd1ph1pw1", 9 / 4),  # only in slices
        ("mb1ic64ih27oc64kh3ph1", 9 / 4 * (27 / 28) ** 2),  # a tile at the border is computed whole
        ("mb1ic64ih28oc64kh3ph2dh1", 9 / 4),
        ("mb1ic64ih42oc64kh3ph14dh13", 9 / 4 * (3 / 4) ** 2),  # three results of a class are two tiles
    ],
)
def test_winograds_algorithm_saves_products(text: str, saved: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "threads", lambda: 1)
    p = ConvProblem.parse(text)
    assert p.flops / 1e6 / costs.work(p, "forward", "native:winograd")["convolution"] == pytest.approx(saved)


# ---- the tables in force -----------------------------------------------------------------------------


def table_in_force() -> dict[str, dict[str, float]]:
    """The one of the module, not the tests' own (`conftest.py`)."""
    source = Path(rules.__file__).read_text(encoding="utf-8")
    return literal_eval(source.split("TABLE: dict[str, dict[str, float]] = ")[1].split("# end of")[0])


@pytest.mark.parametrize("table", [rules.TABLE, table_in_force()], ids=["of the tests", "in force"])
def test_the_table_says_what_there_is(table: dict[str, dict[str, float]]) -> None:
    assert {*table} == {"depthwise", "emulated"}
    for ways in table.values():
        assert all(registered()[way].candidate for way in ways)  # else a measurement would settle on less than the rule
        assert all(gain > 1 for gain in ways.values())


@pytest.mark.parametrize("text", TEXTS)
def test_every_amount_has_a_price(text: str) -> None:
    p = ConvProblem.parse(text)
    for pass_, kernels in product(PASSES, costs.COSTS):
        assert {*costs.work(p, pass_, kernels)} <= {*costs.COSTS[kernels]}
    assert all(price > 0 for prices in costs.COSTS.values() for price in prices.values())
    found = costs.gains(p, ("forward",))
    assert {*found} == {*costs.BACKENDS} <= {*backends()}


@pytest.mark.parametrize(
    ("text", "passes", "amx", "expected"),
    [
        ("ic64ih28oc64kh3ph1", 1, 2.1, ["native:amx", "native:winograd", "native"]),
        ("ic64ih28oc64kh3ph1", 1, 1.9, ["native:winograd", "native", "native:amx"]),
        ("ic64ih28oc64kh3ph1", 2, 2.1, ["native:winograd", "native", "native:amx"]),
        ("ic64ih28oc128kh3ph1", 2, 1.9, ["native:amx", "native:winograd", "native"]),  # native cannot
        ("ic64ih28oc128kh1", 2, 1.9, ["native:winograd", "native", "native:amx"]),
        ("ic64ih28oc64kh3ph1", 1, 0.0, ["native:winograd", "native"]),  # not measured
    ],
)
def test_amx_comes_first_unless_native_is_as_fast(text: str, passes: int, amx: float, expected: list[str]) -> None:
    found = {"native": 2.0, "native:winograd": 3.0, **({"native:amx": amx} if amx else {})}
    assert [*costs.ranked(ConvProblem.parse(text), passes, found)] == expected


def test_of_several_passes_the_times_are_added() -> None:
    p = ConvProblem.parse(TEXTS[0])
    one, other, both = (costs.gains(p, outputs)["native"] for outputs in (BOTH[:1], BOTH[1:], BOTH))
    assert min(one, other) <= both <= max(one, other)


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
