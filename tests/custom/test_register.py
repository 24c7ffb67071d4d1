"""What can be registered as a backend, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import ConvProblem

from .functions import WIDE, accepts, forward, grad_weight


def test_decorator_of_a_function() -> None:
    @convgrad.register("mine", accepts=accepts, seconds=0.2)
    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        return forward(input, weight, p)

    assert mine.__name__ == "mine"
    assert convgrad.list_backends()["mine"].passes == ("forward",)


def test_decorator_of_a_class() -> None:
    @convgrad.register("mine", accepts=accepts, dtypes=WIDE, seconds=0.2)
    class Mine:
        forward = staticmethod(forward)
        grad_weight = staticmethod(grad_weight)

    assert isinstance(Mine, type)
    assert convgrad.list_backends()["mine"].passes == ("forward", "grad_weight")


def test_an_operator_of_torch_library() -> None:
    @torch.library.custom_op("convgrad_test::conv", mutates_args=())
    def op(input: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> Tensor:
        return F.conv2d(input, weight, None, stride, padding)

    def dense(p: ConvProblem) -> bool:
        return accepts(p) and p.groups == 1 and p.dilation == (1, 1)

    args = ("input", "weight", "stride", "padding")
    for function in (op, torch.ops.convgrad_test.conv, torch.ops.convgrad_test.conv.default):
        assert convgrad.register("library", forward=function, args=args, accepts=dense, seconds=0.2).verified
    x, w = torch.randn(1, 3, 8, 8, requires_grad=True), torch.randn(4, 3, 3, 3)
    convgrad.conv2d(x, w).sum().backward()


def test_a_builtin() -> None:
    arguments = ("input", "weight", None, "stride", "padding", "dilation", "groups")
    assert convgrad.register("builtin", forward=torch.conv2d, args=arguments, accepts=accepts, seconds=0.2).verified


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "aten"}, ValueError, "'aten' is the name of a backend that comes with the library"),
        ({"name": "my kernel"}, ValueError, "a backend's name consists of"),
        ({"layouts": ("nhwc",)}, ValueError, "layouts are among"),
        ({"layouts": ()}, ValueError, "layouts are among"),
        ({"seconds": 0}, ValueError, "seconds is a positive number"),
        ({"forward": 3}, TypeError, "3 is not a callable object"),
        ({"args": "input"}, ValueError, "args of forward: 'i' is none of"),
        ({"problems": ["nonsense"]}, ValueError, "nonsense"),
        ({"dtypes": "float32"}, TypeError, "dtypes are such as torch.float32, got 'float32'"),
        ({"devices": ["gpu"]}, ValueError, "devices are types such as 'cpu' and 'cuda', got 'gpu'"),
        ({"devices": "cuda:0"}, ValueError, "got 'cuda:0'"),
        ({"layouts": "nchw"}, ValueError, r"layouts are among .* got \('nchw',\)"),
    ],
)
def test_arguments_that_make_no_backend(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    before = convgrad.list_backends()
    with pytest.raises(error, match=message):
        convgrad.register(**{"name": "mine", "forward": forward, "accepts": accepts, **arguments})
    assert convgrad.list_backends() == before


def test_a_class_without_a_kernel_and_an_unknown_arithmetic_are_refused() -> None:
    class Misspelt:
        @staticmethod
        def foward(input: Tensor, weight: Tensor) -> Tensor: ...

    with pytest.raises(TypeError, match="class Misspelt has no static method forward, grad_input, grad_weight"):
        convgrad.register("misspelt")(Misspelt)
    with pytest.raises(ValueError, match=r"arithmetic is one of 'direct', .*, got 'winogard'"):
        convgrad.register("winogard", forward=torch.conv2d, arithmetic="winogard")  # pyright: ignore[reportArgumentType]
    assert not {"misspelt", "winogard"} & {*convgrad.list_backends()}
