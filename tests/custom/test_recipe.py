"""Which parameter gets what, from the three ways to say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from convgrad import ConvProblem
from convgrad.custom.recipe import Recipe, by_expressions, by_names, native
from convgrad.problem import Pass

PROBLEM = ConvProblem.parse("g2mb3ic4ih9iw11oc6kh3kw5sh2sw1ph1pw0dh0dw1")
A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


def called_with(recipe: Recipe, problem: ConvProblem = PROBLEM) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return recipe.bind(lambda *args, **kwargs: (args, kwargs), problem)(A, B, C)


def test_native() -> None:
    recipe = native(lambda input, weight, problem: None, "forward")
    assert called_with(recipe) == ((A, B, PROBLEM), {})
    assert not recipe.takes_bias
    assert recipe.reasons_against(PROBLEM) == []


@pytest.mark.parametrize("function", [lambda x, w: None, lambda x, w, p, q: None, torch.ops.aten.conv2d])
def test_native_of_another_signature(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"is called with \(input, weight, problem\).*signature=\"torch\""):
        native(function, "forward")


def test_names() -> None:
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any
    ) -> None:
        raise NotImplementedError

    recipe = by_names(forward, "forward", free=False)
    expected = {
        "input": A,
        "weight": B,
        "bias": C,
        "stride": (2, 1),
        "padding": (1, 0),
        "dilation": (1, 2),
        "groups": 2,
    }
    assert called_with(recipe) == ((), expected)
    assert recipe.takes_bias


def test_names_of_the_gradients() -> None:
    def grad_input(grad_output: Tensor, weight: Tensor, input_size: Any, *, kernel_size: Any) -> None:
        raise NotImplementedError

    recipe = by_names(grad_input, "grad_input", free=True)
    expected = {"grad_output": A, "weight": B, "input_size": (3, 4, 9, 11), "kernel_size": (3, 5)}
    assert called_with(recipe) == ((), expected)

    def grad_weight(
        input: Tensor, grad_output: Tensor, weight_size: Any, /, output_size: Any, scale: float = 1.0
    ) -> None:
        raise NotImplementedError

    recipe = by_names(grad_weight, "grad_weight", free=True)
    expected = {"output_size": (3, 6, *PROBLEM.output_size)}
    assert called_with(recipe) == ((B, A, (6, 2, 3, 5)), expected)


def test_a_missing_parameter_means_its_default() -> None:
    def forward(input: Tensor, weight: Tensor, stride: Any) -> None:
        raise NotImplementedError

    reasons = by_names(forward, "forward", free=False).reasons_against(PROBLEM)
    assert reasons == [
        "it has no parameter padding, this problem's is (1, 0)",
        "it has no parameter dilation, this problem's is (1, 2)",
        "it has no parameter groups, this problem's is 2",
    ]
    assert by_names(forward, "forward", free=True).reasons_against(PROBLEM) == []


@pytest.mark.parametrize("annotation", [int, "int"])
def test_an_int_gets_an_int(annotation: Any) -> None:
    def forward(input: Tensor, weight: Tensor, stride) -> None:
        raise NotImplementedError

    forward.__annotations__["stride"] = annotation
    recipe = by_names(forward, "forward", free=True)
    assert recipe.reasons_against(PROBLEM) == ["its stride is one int, this problem's is (2, 1)"]
    even = ConvProblem.parse("ic2ih9oc2kh3sh2")
    assert called_with(recipe, even)[1]["stride"] == 2


def test_operators_have_names_too() -> None:
    recipe = by_names(torch.ops.aten.conv2d.default, "forward", free=False)
    assert called_with(recipe)[1]["dilation"] == (1, 2)
    recipe = by_names(torch.ops.aten.convolution, "forward", free=False)
    assert called_with(recipe)[1]["transposed"] is False

    @torch.library.custom_op("convgrad_test_recipe::half", mutates_args=())
    def half(input: Tensor, weight: Tensor, groups: int) -> Tensor:
        raise NotImplementedError

    assert called_with(by_names(half, "forward", free=True)) == ((), {"input": A, "weight": B, "groups": 2})


def test_names_that_mean_nothing() -> None:
    with pytest.raises(TypeError, match=r"has the parameters \(x, w\).*needs input and weight"):
        by_names(lambda x, w: None, "forward", free=False)
    with pytest.raises(TypeError, match="has no parameter names: say args="):
        by_names(max, "forward", free=False)


def test_expressions() -> None:
    recipe = by_expressions(("input", "weight", "kernel_size[1]", "stride[0]", "groups", 7, None, 0.5), "forward")
    assert called_with(recipe) == ((A, B, 5, 2, 2, 7, None, 0.5), {})
    assert by_expressions(("weight_size[0]", "input", "grad_output"), "grad_weight").bind(max, PROBLEM)
    one = ConvProblem.parse("ic2iw9oc2kw3")
    assert recipe.reasons_against(one) == ["it wants kernel_size[1], this problem's kernel_size is (3,)"]


@pytest.mark.parametrize(
    ("expression", "pass_"),
    [
        ("__import__('os')", "forward"),
        ("stride[0]+1", "forward"),
        ("stride[-1]", "forward"),
        ("input.shape", "forward"),
        ("problem.stride", "forward"),
        ("grad_output", "forward"),
        ("input", "grad_input"),
        ("input[0]", "forward"),
        ("groups[0]", "forward"),
        ("", "forward"),
    ],
)
def test_expressions_that_are_refused(expression: str, pass_: Pass) -> None:
    with pytest.raises(ValueError, match=f"args of {pass_}: "):
        by_expressions((expression,), pass_)


def test_padding_of_two_sides_cannot_be_told() -> None:
    causal = ConvProblem.parse("mb1g6ic6iw33oc6kw4ow33pw3")
    told = by_expressions(("input", "weight", "padding"), "forward")
    assert told.reasons_against(causal) == ["its padding is one number a dimension, this problem's is ((3, 0),)"]
    assert by_expressions(("input", "weight"), "forward").reasons_against(causal) == []
    assert by_expressions(("input", "weight", "padding", "problem"), "forward").reasons_against(causal) == []


def test_builtins_are_called_by_position() -> None:
    assert by_expressions(("stride[0]", "stride[1]"), "forward").bind(math.hypot, PROBLEM)(A, B, None) == math.sqrt(5)
