"""ConvProblem: derived values against their definition, the canonical form, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import convgrad
from convgrad.backends.reference import ReferenceBackend
from convgrad.problem import OPERANDS, OUTPUTS, PASSES, RESULT, ConvProblem, gradient_outputs, output_length
from convgrad.testing import problems

PLAIN = ConvProblem(2, 4, 6, 2, (9, 8), (3, 2), (2, 1), ((1, 1), (0, 1)), (1, 2), (5, 7))


def test_derived_values() -> None:
    p = PLAIN
    assert p.ndim == 2
    assert (p.input_shape, p.weight_shape, p.output_shape) == ((2, 4, 9, 8), (6, 2, 3, 2), (2, 6, 5, 7))
    assert p.flops == 2 * (2 * 6 * 5 * 7) * (2 * 3 * 2)
    assert p.least_bytes == 4 * (2 * 4 * 9 * 8 + 6 * 2 * 3 * 2 + 2 * 6 * 5 * 7)
    assert not p.depthwise
    assert p.replace(in_channels=2, out_channels=4).depthwise
    assert not p.replace(in_channels=2, out_channels=4).replace(groups=1).depthwise
    assert not p.symmetric
    assert not p.pointwise
    assert ConvProblem.parse("ic2iw3oc4kw1").pointwise
    assert not ConvProblem.parse("ic2ih3iw3oc4kh1kw3").pointwise
    assert (p.bias_slot, p.bias_pass) == ("grad_output", "forward")
    assert [p.result_shape(o) for o in OUTPUTS] == [p.output_shape, p.input_shape, p.weight_shape, (6,)]
    t = p.replace(origin="transposed")
    assert t.result_shape("grad_bias") == (4,)
    assert (t.bias_slot, t.bias_pass) == ("input", "grad_input")
    assert p.replace(batch=0).empty
    assert not p.empty


def test_a_users_gradients_are_outputs_of_the_plain_problem() -> None:
    assert gradient_outputs(False) == ("grad_input", "grad_weight", "grad_bias")
    assert gradient_outputs(True) == ("forward", "grad_weight", "grad_bias")
    assert gradient_outputs(True, (False, True, False)) == ("grad_weight",)
    for transposed in (False, True):  # a gradient never is the pass that computed the result
        p = PLAIN.replace(origin="transposed" if transposed else "plain")
        assert p.bias_pass not in gradient_outputs(transposed)
        assert {p.bias_pass, *gradient_outputs(transposed)[:2]} == set(PASSES)


def test_64_bit_offsets() -> None:
    assert not ConvProblem.parse("mb1ic1iw2147483647oc1kw1").needs_int64
    assert ConvProblem.parse("mb1ic1iw2147483648oc1kw1").needs_int64


@given(problems())
@settings(max_examples=80)
def test_canonical_is_idempotent_and_the_same_form(problem: ConvProblem) -> None:
    low, high = problem.padding[0]
    high += problem.stride[0] - 1
    length = problem.input_size[0], problem.kernel_size[0], problem.stride[0], low, high, problem.dilation[0]
    same = output_length(*length) == problem.output_size[0]
    wider = problem.replace(padding=((low, high), *problem.padding[1:])) if same else problem
    assert wider.canonical() == problem.canonical() == problem.canonical().canonical()
    reference = ReferenceBackend()
    generator = torch.Generator().manual_seed(0)
    slots = {
        s: torch.randint(-3, 4, problem.shape_of(s), generator=generator).to(torch.float64)
        for s in ("input", "weight", "grad_output")
    }
    plain = {"dtype": torch.float64, "memory_format": torch.contiguous_format}
    for pass_ in PASSES:
        a, b = (slots[s] for s in OPERANDS[pass_])
        mine = reference.bind(wider.replace(**plain), (pass_,))(a, b)
        assert torch.equal(mine, reference.bind(wider.canonical().replace(**plain), (pass_,))(a, b))
        assert tuple(mine.shape) == problem.shape_of(RESULT[pass_])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_size": (9,)}, "1, 2 or 3 spatial dimensions"),
        ({"groups": 3}, "multiples of groups=3"),
        ({"batch": -1}, "are not negative"),
        ({"in_channels": -2, "groups": 2}, "are not negative"),
        ({"input_size": (-1, 8), "padding": ((5, 5), (0, 0))}, "input_size is not negative"),
        ({"input_size": (0, 8), "padding": ((5, 5), (0, 0))}, "0 only without a batch or channels"),
        ({"origin": "foo"}, "origin is 'plain' or 'transposed', got 'foo'"),
        ({"stride": (0, 1)}, "kernel_size, stride and dilation are positive integers"),
        ({"output_size": (5, 8)}, r"output_size\[1\]=8 does not follow"),
        ({"kernel_size": (30, 2), "output_size": (-5, 7)}, r"output_size\[0\]"),
        ({"batch": 2**60}, "more than any memory has"),
    ],
)
def test_sizes_that_do_not_belong_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PLAIN.replace(**changes)


def test_the_name_takes_no_part_in_comparisons() -> None:
    named = PLAIN.replace(name="layer 1")
    assert named == PLAIN
    assert hash(named) == hash(PLAIN)
    assert 'n"layer 1"' in str(named)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_a_padding_mode_is_a_word_of_the_text(mode: str) -> None:
    text = f"g4mb2ic4ih7oc4oh7kh3sh1ph1dh0 float64 channels_last bias {mode}"
    p = ConvProblem.parse(text)
    assert (p.padding_mode, str(p)) == (mode, text)
    assert p != ConvProblem.parse(text.replace(f" {mode}", ""))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ic1iw3oc1kw3pw3 reflect", "reads more"),
        ("ic1iw3oc1kw3pw4 circular", "reads more"),
        ("ic1iw3oc1kw3pw1 circular transposed", "transposed"),
    ],
)
def test_a_padding_mode_without_enough_to_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvProblem.parse(text)


def test_of_tensors() -> None:
    x, w = torch.ones(2, 4, 9, 9), torch.ones(6, 2, 3, 3)
    calls: list[tuple[dict[str, Any], str]] = [
        ({}, "g2mb2ic4ih9oc6oh7kh3"),
        ({"bias": torch.ones(6), "stride": 2, "padding": 1}, "g2mb2ic4ih9oc6kh3sh2ph1 bias"),
        ({"padding": "same", "dilation": (1, 2)}, "g2mb2ic4ih9iw9oc6oh9ow9kh3kw3ph1pw2dw1"),
        ({"padding": "valid"}, "g2mb2ic4ih9oc6kh3"),
        ({"padding": ((1, 0), (0, -2))}, "g2mb2ic4ih9iw9oc6kh3kw3ph1:0pw0:-2"),
        ({"padding": (1, 0, 0, 2)}, "g2mb2ic4ih9iw9oc6kh3kw3ph1:0pw0:2"),
        ({"padding": -1}, "g2mb2ic4ih9oc6kh3ph-1:-1"),
    ]
    for options, text in calls:
        assert ConvProblem.of(x, w, groups=2, **options) == ConvProblem.parse(text)
    last = ConvProblem.of(x.bfloat16().to(memory_format=torch.channels_last), w.bfloat16(), groups=2)
    assert last == ConvProblem.parse("g2mb2ic4ih9oc6kh3 bfloat16 channels_last")
    transposed = ConvProblem.of(x[0], torch.ones(4, 3, 3, 3), stride=2, transposed=True, output_padding=1)
    assert transposed == ConvProblem.parse("mb1ic4ih9oc3oh20kh3sh2 transposed")
    with pytest.raises(convgrad.ShapeError, match="to have 2 channels, but got 4"):
        ConvProblem.of(x, w)
    causal = ConvProblem.of(x[..., 0], w[..., 0], groups=2, padding="causal")
    assert causal == ConvProblem.parse("g2mb2ic4iw9oc6ow9kw3pw2:0")
    with pytest.raises(convgrad.ShapeError, match="'causal' is for 1-D convolutions"):
        ConvProblem.of(x, w, groups=2, padding="causal")
    with pytest.raises(convgrad.ShapeError, match="'same' is not supported for strided"):
        ConvProblem.of(x, w, groups=2, padding="same", stride=2)


def test_the_constructor_says_how_to_get_a_problem() -> None:
    make: Any = ConvProblem
    x, w = torch.ones(2, 4, 9), torch.ones(6, 4, 3)
    for call in (lambda: make(x, w), lambda: make(x, w, None, stride=2), lambda: make(1, 2), lambda: make(batch=1)):
        with pytest.raises(TypeError, match=r"ConvProblem\.of\(input, weight, bias.*ConvProblem\.parse"):
            call()


def test_a_problem_is_copied_and_pickled() -> None:
    p = ConvProblem.parse("ic2iw8oc3kw3")
    assert pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == p
