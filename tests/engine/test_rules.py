"""The rules: what a line of the table decides, which kind a problem is, and that the table in force is a sound one."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import convgrad
from convgrad.engine import cache, choose, rules
from convgrad.engine.registry import backends
from convgrad.engine.rules import by_rule, kind_of, special_kinds
from convgrad.problem import ConvProblem, Output

CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
ONE_BY_ONE: tuple[tuple[Output, ...], ...] = (("forward",), ("grad_input",), ("grad_weight",))
VOLUME = "mb1ic80id8ih16iw16oc8kd3kh3kw3pd1ph1pw1"
TABLE = {
    "depthwise": {"native": 2.0},
    "dense": {"native": 3.0, "im2col": 1.5, "aten:mkldnn": 1.2},
    "emulated": {"aten:float32": 9.9},
    "pointwise": {"aten:mkldnn": 1.2},
}
ROWS = [
    ("mb1g8ic8ih9oc8kh3ph1", ("forward",), ["native"]),
    ("mb1g8ic8ih9oc8kh3ph1", BOTH, ["native"]),
    ("mb4g2ic8ih9oc8kh3", ("forward",), ["aten"]),  # no line about it
    ("mb4ic8ih9oc8kh3", ("forward",), ["native"]),
    ("mb4ic8ih9oc8kh3", BOTH, ["native"]),
    ("mb4ic60ih9oc1088kh1", ("grad_input",), ["aten:mkldnn"]),
    ("mb4g2ic544ih2oc544kh1", ("grad_input",), ["aten"]),  # several products are grouped
    ("mb2ic80ih9oc8kh3", ("forward",), ["im2col"]),  # native cannot
    ("mb2ic80ih9oc8kh3", BOTH, ["im2col", "im2col"]),  # it has no call for both
    ("mb4ic8ih29oc32kh3", ("forward",), ["aten"]),  # native can
    ("mb1ic64ih64oc64kh3 bfloat16", ("forward",), ["aten:float32"]),
    ("mb1ic96ih16oc384kh16sh16 float16", ("forward",), ["aten"]),  # a weight is in one product
    ("mb1ic96ih16oc384kh16sh16 float16", ("grad_weight",), ["aten:float32"]),
    ("mb1ic96ih16oc384kh16sh16 float16", BOTH, ["aten:float32"]),
]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rules are those above, on a processor without arithmetic for 16 bits, and nothing was measured."""
    monkeypatch.setattr(rules, "TABLE", TABLE)
    monkeypatch.setattr(rules, "cpu_lacks", lambda dtype: "all" if dtype.itemsize == 2 else "")
    cache.invalidate()
    yield
    cache.invalidate()


def chosen(text: str, outputs: tuple[Output, ...]) -> Any:
    problem = ConvProblem.parse(text)
    return choose(problem, outputs, CPU, stored=False)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("text", "outputs", "expected"), ROWS)
def test_the_first_line_that_fits_and_can(text: str, outputs: tuple[Output, ...], expected: list[str]) -> None:
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
def test_the_reason_is_the_line() -> None:
    [step] = chosen("mb1g8ic8ih9oc8kh3ph1", ("forward",))
    assert step.reason.startswith("by rule: on depthwise problems native is 2.0x as fast as PyTorch")
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
    monkeypatch.setattr(rules, "threads", lambda: 1)
    lines = {"wide product": {"native:amx": 1.5, "native": 1.2}, "pointwise": {"native": 1.7}}
    monkeypatch.setattr(rules, "TABLE", lines)
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


# ---- the kinds of problem ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("g8ic8ih9oc16kh3", "depthwise"),
        ("g2ic8ih9oc16kh3", "grouped"),
        ("mb9ic8ih9oc16kh3 transposed", "dense"),
        ("g2ic8ih9oc16kh1", "grouped"),
        ("mb16ic8ih9oc16kh1ph1", "dense"),
        ("mb16ic8ih9oc16kh1", "pointwise"),
        ("mb1g8ic8ih4oc8kh31ph15", "depthwise"),
        ("mb1g8ic8ih4oc8kh3ph2000sh400", None),  # hardly anything but padding
    ],
)
def test_kinds(text: str, kind: str | None) -> None:
    problem = ConvProblem.parse(text)
    assert kind_of(problem, ("grad_weight",), emulated=False) == kind
    assert kind_of(problem, ("grad_weight",), emulated=True) == (kind if kind in ("depthwise", None) else "emulated")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mb8ic17ih28oc9kh3ph1", None),
        ("mb4ic17ih28oc9kh3ph1", "dense"),  # small: oneDNN takes longer to lay it out anew
        ("mb1ic128ih4oc128kh3ph1", None),  # small, but so would ours
        ("mb8ic17ih28oc8kh3ph1", "dense"),  # half of a vector
        ("mb4g2ic34ih28oc16kh3ph1", "grouped"),
        ("mb8ic8ih28oc17kh3ph1", None),  # the other way round oneDNN reads them as they lie
        ("mb8ic17ih28oc8kh3ph1 channels_last", None),
        ("mb32ic17ih28oc8kh3sh3", None),
        ("mb4ic17ih28oc8kh3sh3", "dense"),  # less than a call of oneDNN
        ("mb4ic17ih28oc8kh5sh5", None),
        ("mb1g2ic96ih4oc96kh3ph1", "grouped"),
        ("mb4g2ic384ih24oc16kh3sh2ph1", "grouped"),
        ("mb40ic17ih28oc9kh1", "pointwise"),
        ("mb32ic64iw100oc64kw3", "dense"),
        ("mb32ic32iw100oc32kw2sw2", "dense"),
        ("mb8g2ic128iw100oc128kw25", "grouped"),  # oneDNN writes columns down
        ("mb4ic17ih28oc9kh3ph1 float64", "dense"),  # which oneDNN lacks
        ("mb4ic17ih28oc9kh3sh3 float64", None),  # patches
        ("mb4ic12id8oc16kd3", None),  # slices of a volume that fill few vectors with pixels
        ("mb4ic12id8oc16kd3 float64", "dense"),
        ("mb4ic11id8oc16kd3", "dense"),
        ("mb4g2ic24id8oc32kd3dd1", "grouped"),
        ("mb4g2ic24id8oc32kd1", "grouped"),
        ("mb4ic12id14oc16kd3", "dense"),
    ],
)
def test_many_channels_a_group(text: str, kind: str | None) -> None:
    problem = ConvProblem.parse(text)
    assert kind_of(problem, ("grad_weight",), emulated=False) == kind
    assert kind_of(problem, ("grad_weight",), emulated=True) == "emulated"


@pytest.mark.parametrize(
    ("text", "outputs", "kind"),
    [
        ("mb4ic3ih64oc64kh4sh2ph1", ("grad_input",), "narrow"),
        ("mb4ic3ih64oc64kh4sh2ph1", ("forward",), None),
        ("mb4ic3ih64oc64kh4sh2ph1", BOTH, "narrow"),
        ("mb4ic64ih32oc3kh4sh2ph1 transposed bfloat16", ("grad_input",), "narrow"),  # the transposed forward
        ("mb4ic64ih32oc8kh3ph1 channels_last", ("forward",), "narrow"),
        ("mb4ic64ih32oc9kh3ph1 channels_last", ("forward",), None),
        ("mb4ic3ih64oc64kh4sh4", ("grad_input",), "patches"),
        ("mb4ic3ih64oc64kh4sh4", ("forward",), None),
        ("mb4ic3ih64oc64kh4sh4", BOTH, None),
        ("mb1ic3ih16oc64kh4sh4", ("grad_input",), "dense"),  # less than a call of oneDNN
        ("mb4ic3ih64oc64kh4sh4 float64", ("grad_input",), None),
        ("mb4ic64ih32oc32kh2sh2 transposed", ("grad_input",), "patches"),  # the transposed forward
        ("mb64ic4ih64oc16kh4sh4", ("grad_input",), "patches"),
        ("mb4ic3id32oc64kd16sd16", ("grad_input",), None),  # too large for the caches
        ("mb4ic16ih64oc64kh3ph1", ("grad_weight",), "narrow"),  # a first layer
        ("mb4ic16ih64oc64kh3ph1", ("forward",), None),
        ("mb4ic17ih64oc64kh3ph1", ("grad_weight",), None),
        ("mb4ic16ih63oc64kh3ph1", ("grad_weight",), None),
        ("mb4ic16ih64oc64kh3ph1 channels_last", ("grad_weight",), None),
        ("mb4ic3ih64oc64kh4sh2ph1 float64", ("grad_input",), "dense"),
        ("mb4g2ic6ih64oc64kh4sh2ph1", ("grad_input",), None),
    ],
)
def test_a_result_of_few_channels(text: str, outputs: tuple[Output, ...], kind: str | None) -> None:
    assert kind_of(ConvProblem.parse(text), outputs, emulated=False) == kind


@pytest.mark.parametrize(
    ("text", "threads", "kind"),
    [
        ("mb1ic8ih9oc16kh3", 2, None),
        ("mb2ic8ih9oc16kh3", 1, "dense"),
        ("mb1ic8ih9oc16kh5", 1, "dense"),
        ("mb1ic1iw20480oc1kw3", 1, None),
        ("mb1ic1iw20481oc1kw3", 1, "dense"),
        ("mb15ic8ih9oc16kh1", 1, None),
        ("mb15ic8ih9oc16kh1", 2, "pointwise"),
        ("mb16ic8ih9oc16kh1", 1, "pointwise"),
        ("mb4ic64ih9oc64kh1", 1, None),
        ("mb4ic64ih9oc64kh1 float64", 2, None),
        ("mb1ic64id7oc64kd1", 2, None),
        ("mb1ic64id7oc64kd1 channels_last", 2, "pointwise"),  # copied first
        ("mb5ic64ih9oc64kh1", 2, "pointwise"),
        ("mb16ic64ih9oc96kh1", 1, "wide product"),  # not small
        ("mb16ic64ih9oc96kh1", 2, "pointwise"),
        ("mb16ic64ih9oc96kh1 float64", 1, "pointwise"),
        ("mb30ic63ih9oc96kh1", 1, "pointwise"),
        ("mb2ic8ih9oc16kh3 float64", 1, None),
        ("mb2ic16ih32oc16kh3 float64", 1, "dense"),
        ("mb1g2ic8ih9oc16kh3", 1, "grouped"),
    ],
)
def test_small_problems_are_pytorchs_where_it_does_not_call_onednn(text: str, threads: int, kind: str | None) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    torch.set_num_threads(threads)
    assert kind_of(ConvProblem.parse(text), ("grad_weight",), emulated=False) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mb8g4ic32ih64oc32kh3ph1 bfloat16 channels_last", None),
        ("mb8g4ic32ih64oc32kh3ph1 bfloat16", None),
        ("mb8g8ic32ih64oc32kh3ph1 bfloat16", "grouped"),  # too few channels to fill its vectors
        ("mb1g4ic32ih8oc32kh3ph1 bfloat16 channels_last", "grouped"),  # small: its call takes longer
        ("mb8ic64ih56oc64kh1 bfloat16 channels_last", None),
        ("mb8ic64ih56oc64kh1 bfloat16", "pointwise"),
        ("mb8ic192ih28oc192kh1 bfloat16", None),  # many channels: their products outweigh the layout
        ("mb16ic8id4oc16kd7pd3", None),
        ("mb16ic4id4oc16kd7pd3", "dense"),
        ("mb16ic8id4oc16kd7pd3 float64", "dense"),  # not oneDNN's
        ("mb16ic8id8oc16kd3pd1", "dense"),
        ("mb32g8ic128ih4oc128kh5ph2", None),
        ("mb8g8ic128iw16oc128kw127pw63", "grouped"),  # a sequence
        ("mb64ic4ih64oc16kh4sh4", None),  # patches, whose pixels ours would gather
        ("mb16ic4ih64oc16kh8sh8", None),
        ("mb1ic4ih64oc16kh8sh8", "dense"),  # small
        ("mb64ic4iw4096oc16kw4sw4", "dense"),
        ("mb8ic4ih64oc16kh4sh4", "dense"),
        # Volumes that PyTorch writes columns of.
        ("mb1ic1id32oc32kd3pd1", "volume"),  # 1 x 32 x 32: PyTorch counts no width
        ("mb1ic64id16oc64kd3pd1", "volume"),
        ("mb2ic64id16oc64kd3pd1", None),  # oneDNN's
        ("mb1ic64id18oc64kd3pd1", None),
        ("mb1ic64id16oc64kd3pd1 float64", "dense"),
        ("mb1ic64id8oc64kd3pd1", "wide volume"),  # fewer positions than 12 a channel
        ("mb1ic96id12oc192kd3pd1 channels_last", "wide volume"),
        ("mb1ic15id14oc192kd3pd1", None),  # few channels to a column
        ("mb1ic96id14oc192kd2sd2", None),  # no input in two columns
        ("mb1ic256id7oc256kd3pd1", "wide volume"),
        ("mb1ic256id5oc256kd3pd1", None),  # few positions
        ("mb1ic64id7oc32od14kd2sd2 transposed", None),
        ("mb1ic64id10oc32od20kd2sd2 transposed", "volume"),
        ("mb2ic64id10oc32od20kd2sd2 transposed", None),
        ("mb1ic128id10oc64od20kd2sd2 transposed", None),
        ("mb1g2ic64id16oc128kd3pd1", None),  # groups are oneDNN's
        ("mb1ic64ih16oc64kh3ph1", None),
    ],
)
def test_where_onednn_needs_half_the_arithmetic_and_where_it_is_not_called(text: str, kind: str | None) -> None:
    assert kind_of(ConvProblem.parse(text), ("grad_weight",), emulated=False) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mb8ic64ih28oc64kh3ph1", "wide dense"),
        ("mb8ic64ih28oc64kh3ph1 channels_last", "wide dense"),
        ("mb4ic128iw200oc128kw3pw1", "wide dense"),
        ("mb1ic32id16oc32kd3pd1", "wide dense"),  # without AMX a volume of ours
        ("mb8ic256ih28oc512kh1sh2", "wide dense"),
        ("g2mb8ic512ih28oc512kh1", "wide dense"),
        ("mb8ic256ih28oc512kh1", "wide product"),
        ("mb8ic64ih28oc64kh3ph1 float64", "dense"),
        ("mb8ic16ih28oc64kh3ph1", None),  # half of a tile
        ("mb1ic512ih7oc512kh3ph1", None),  # each weight is in 49 products
        ("mb1ic64ih8oc64kh3ph1", None),  # small
        ("mb8ic256ih28oc32kh1sh2", "pointwise"),  # few products for what is packed
        ("g512mb8ic512ih28oc512kh7ph3", "depthwise"),
    ],
)
def test_what_is_for_the_tiles_of_amx(text: str, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "threads", lambda: 1)
    p = ConvProblem.parse(text)
    wide = ["wide dense"] if ("wide dense", "native:amx") in special_kinds(p) else []
    assert [*wide, kind_of(p, ("grad_weight",), emulated=False)][0] == kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mb8ic64ih28oc64kh3ph1", True),
        ("mb8ic64ih28oc64kh3ph1 channels_last", True),
        ("mb4ic24ih28oc24kh3ph1 float64", True),
        ("mb8ic64ih28oc64kh3dh2ph2", True),
        ("mb8ic64ih42oc64kh3dh14ph14", False),  # three results of a class are two tiles
        ("mb8ic64ih5oc64kh3", False),  # three results are two tiles
        ("g2mb8ic64ih28oc64kh3ph1", True),
        ("mb1ic32id16oc32kd3pd1", True),
        ("mb4ic64id8ih20iw20oc64kd1kh3kw3ph1pw1", True),
        ("mb2ic256ih14oc256kh3ph1", True),
        ("mb1ic256ih7oc256kh3ph1", False),  # each weight is transformed for 16 tiles
        ("mb8ic64ih28oc16kh3ph1", True),
        ("mb8ic3ih28oc64kh3ph1", False),  # each value is transformed for 3 channels
        ("mb1ic24ih8oc24kh3ph1", False),  # small
        ("mb8ic64ih28oc64kh3ph1sh2", False),
        ("mb8ic64ih28oc64kh5ph2", False),
        ("mb8ic64ih28oc64kh3ph1 bfloat16", False),
        ("mb8ic64iw280oc64kw3pw1", True),
        ("mb8ic64iw280oc64kw3dw3pw3 float64", True),
        ("mb4ic64ih28iw28oc64kh3kw1ph1", True),
        ("mb4ic64ih28iw28oc64kh1kw3pw1 channels_last", True),
        ("mb2ic64id8ih14iw14oc64kd3kh1kw1pd1", True),
        ("mb8ic32iw280oc32kw3pw1", False),  # the products saved are fewer than along two dimensions
        ("mb8ic64iw7oc64kw3pw1", False),  # each weight is transformed for 32 tiles
        ("mb64ic64iw5oc64kw3", False),  # three of four places in tiles are filled
        ("mb8ic64iw280oc64kw5pw2", False),
    ],
)
def test_what_winograds_algorithm_is_for(text: str, expected: bool) -> None:
    assert (("3x3", "native:winograd") in special_kinds(ConvProblem.parse(text))) == expected


def test_amx_comes_first_and_what_is_taken_without_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "TABLE", table_in_force())
    ways = [way for way, _ in by_rule(ConvProblem.parse("mb1ic32id16oc32kd3pd1"), ("forward",), torch.device("cpu"))]
    assert ways[0] == "native:amx"
    assert "native" in ways[1:]


@pytest.mark.parametrize(
    "text", ["ih9iw99kh5kw3ph2pw1", "id4ih7iw9kd7kh3kw3sd2dd1pd6ph1", "ih9oh4kh4sh3ph-2", "iw9kw9pw4"]
)
def test_the_part_of_products_inside_the_image(text: str) -> None:
    p, part = ConvProblem.parse(f"ic1oc1{text}"), 1.0
    for i, n in enumerate(p.input_size):
        start = range(-p.padding[i][0], p.output_size[i] * p.stride[i] - p.padding[i][0], p.stride[i])
        met = [0 <= at + k * p.dilation[i] < n for at in start for k in range(p.kernel_size[i])]
        part *= sum(met) / len(met)
    assert rules._part_inside(p) == pytest.approx(part)


# ---- the table in force ------------------------------------------------------------------------------


def table_in_force() -> dict[str, dict[str, float]]:
    """The one of the module, not the tests' own (`conftest.py`)."""
    source = Path(rules.__file__).read_text(encoding="utf-8")
    return literal_eval(source.split("TABLE: dict[str, dict[str, float]] = ")[1].split("# end of")[0])


KINDS = {"depthwise", "emulated", "pointwise", "dense", "grouped", "narrow", "patches", "volume", "wide volume",
         "wide product", "wide dense", "3x3"}  # fmt: skip


def test_every_kind_has_a_line() -> None:
    assert {*table_in_force()} == KINDS


@pytest.mark.parametrize("table", [rules.TABLE, table_in_force()], ids=["of the tests", "in force"])
def test_the_table_says_what_there_is(table: dict[str, dict[str, float]]) -> None:
    assert table
    assert {*table} <= KINDS
    for ways in table.values():
        assert all(backends()[way].candidate for way in ways)  # else a measurement would settle on less than the rule
        assert all(gain > 1 for gain in ways.values())


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
