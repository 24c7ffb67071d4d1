"""The deprecated ``signature="torch"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import ConvProblem
from convgrad.custom.names import by_names

from .functions import DEPTHWISE, accepts, passed


def test_it_warns_and_works() -> None:
    def mine(
        input: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, scale: int = 1
    ) -> Tensor:
        return scale * F.conv2d(input, weight, bias, stride, padding, dilation, groups)

    with pytest.warns(DeprecationWarning, match="say what the function is called with"):
        backend = convgrad.register("mine", forward=mine, signature="torch", accepts=accepts, seconds=0.2)
    assert passed(backend)
    assert backend.fuses_bias(DEPTHWISE)
    with pytest.raises(ValueError, match="signature is 'native' or 'torch'"):
        convgrad.register("mine", forward=mine, signature="mine")  # pyright: ignore[reportArgumentType]


def test_what_it_accepts() -> None:
    def forward(input: Tensor, weight: Tensor, stride: int) -> Any:
        return stride

    free = by_names(forward, "forward", lambda p: "no")
    assert free.reason_against(ConvProblem.parse("ic2ih9iw9oc2kh3kw3sh2sw1"), "forward") == (
        "its stride is one int, this problem's is (2, 1)"
    )
    assert free.reason_against(ConvProblem.parse("ic2ih9oc2kh3sh2"), "forward") == "no"
    assert free.function(None, None, (2, 2)) == 2
    strict = by_names(forward, "forward", None)
    assert strict.reason_against(ConvProblem.parse("ic2ih9oc2kh3sh2"), "forward") == ""
    reason = "it has no parameter padding, this problem's is (1, 1)"
    assert strict.reason_against(ConvProblem.parse("ic2ih9oc2kh3ph1"), "forward") == reason
    with pytest.raises(TypeError, match=r"has the parameters \(x, w\)"):
        by_names(lambda x, w: None, "forward", None)


def test_operators_have_names_too() -> None:
    @torch.library.custom_op("convgrad_test_names::half", mutates_args=())
    def half(input: Tensor, weight: Tensor, groups: int) -> Tensor:
        raise NotImplementedError

    assert by_names(half, "forward", None).args == ("input", "weight", "groups")
    assert by_names(torch.ops.aten.convolution, "forward", None).args[6:] == ("transposed", "output_padding", "groups")
