"""What a function is called with, and which arguments are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from convgrad import ConvProblem
from convgrad.check.arguments import check, values
from convgrad.problem import Pass

PROBLEM = ConvProblem.parse("g2mb3ic4ih9iw11oc6kh3kw5sh2sw1ph1pw0dh0dw1")
CAUSAL = ConvProblem.parse("mb1g6ic6iw33oc6kw4ow33pw3")


def anything(*args: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("arg", "value"),
    [
        ("input", None),
        ("bias", None),
        ("problem", PROBLEM),
        ("stride", (2, 1)),
        ("padding", (1, 0)),
        ("dilation[1]", 2),
        ("groups", 2),
        ("kernel_size[1]", 5),
        ("input_size", (3, 4, 9, 11)),
        ("weight_size[0]", 6),
        ("output_size", (3, 6, *PROBLEM.output_size)),
        ("stride[:2]", (2, 1)),
        ("out", None),
        (7, 7),
        (None, None),
        ([1, 2], [1, 2]),
    ],
)
def test_values(arg: Any, value: Any) -> None:
    assert values(check(anything, (arg,), "forward"), PROBLEM) == [value]


@pytest.mark.parametrize(
    ("arg", "pass_"),
    [
        ("__import__('os')", "forward"),
        ("stride[0]+1", "forward"),
        ("stride[-1]", "forward"),
        ("problem.stride", "forward"),
        ("grad_output", "forward"),
        ("input", "grad_input"),
        ("bias", "grad_weight"),
        ("input[0]", "forward"),
        ("groups[0]", "forward"),
        ("", "forward"),
        ("out", "backward"),
        ("output_mask", "grad_weight"),
        ("stride[3]", "forward"),
        ("stride[:4]", "forward"),
        ("input_size[5]", "forward"),
        ("problem[0]", "forward"),
    ],
)
def test_names_that_a_pass_does_not_have(arg: str, pass_: Pass) -> None:
    with pytest.raises(ValueError, match=f"args of {pass_}: "):
        check(anything, (arg,), pass_)


@pytest.mark.parametrize("function", [lambda x, w: None, lambda x, w, p, q: None, lambda *, input: None])
def test_a_function_of_other_parameters(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"is called with \(input, weight, problem\): .*say what each"):
        check(function, ("input", "weight", "problem"), "forward")
    with pytest.raises(
        TypeError, match=r"\(grad_output, input, problem\), as no args= are given: .* grad_output, input,"
    ):
        check(function, None, "grad_weight")


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations at once")
def test_annotations_are_not_evaluated() -> None:
    names: dict[str, Any] = {}
    exec(compile("def mine(input: ForTypeCheckersAlone, weight): ...", "mine", "exec", dont_inherit=True), names)
    assert check(names["mine"], ("input", "weight"), "forward") == ("input", "weight")
    with pytest.raises(TypeError, match="input: 'ForTypeCheckersAlone', weight"):
        check(names["mine"], ("input",), "forward")


def test_a_text_is_not_a_sequence_of_arguments() -> None:
    with pytest.raises(TypeError, match=r"got the text 'stride\[5\]'; of one argument: args=\('stride\[5\]',\)"):
        check(anything, "stride[5]", "forward")


def test_a_mask() -> None:
    args = check(anything, ("output_mask", "output_mask[:2]", "output_mask[1]"), "backward")
    assert values(args, PROBLEM, ("grad_weight",)) == [(False, True, False), (False, True), True]
    assert values(args, PROBLEM) == [(True, True, True), (True, True), True]
    with pytest.raises(ValueError, match='"output_mask" is missing'):
        check(anything, ("grad_output",), "backward")


def test_a_builtin_has_no_parameters_to_look_at() -> None:
    assert check(torch.conv2d, ("input", "weight", None), "forward") == ("input", "weight", None)


def test_padding_of_two_sides_cannot_be_told() -> None:
    for arg in ("padding", "padding[0]"):
        with pytest.raises(LookupError, match=r"one number a dimension, this problem's is \(\(3, 0\),\)"):
            values(("input", "weight", arg), CAUSAL)
    assert values(("input", "weight"), CAUSAL) == [None, None]
    assert values(("padding", "problem"), CAUSAL) == [(3,), CAUSAL]


def test_a_dimension_that_a_problem_does_not_have() -> None:
    with pytest.raises(LookupError, match=r"it takes kernel_size\[1\], this problem's kernel_size is \(4,\)"):
        values(("kernel_size[1]",), CAUSAL)
