"""One function for both gradients, under an output mask: when it runs, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import BackendError, CheckError, ConvProblem
from convgrad.check.arguments import Method
from convgrad.diagnostics import explain_problem, trace

from .functions import DEPTHWISE, WIDE, Counted, accepts, depthwise, forward, grad_input, grad_weight, operands


class Joint:
    """PyTorch's own gradients, two or all three of them; it notes the masks."""

    def __init__(self, bias: bool) -> None:
        self.bias = bias
        self.masks: list[tuple[bool, ...]] = []

    def __call__(
        self, grad_output: Tensor, input: Tensor, weight: Tensor, p: ConvProblem, output_mask: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        assert grad_output.shape == p.output_shape
        assert input.shape == p.input_shape
        assert weight.shape == p.weight_shape
        self.masks.append(tuple(output_mask))
        return (
            grad_input(grad_output, weight, p) if output_mask[0] else None,
            grad_weight(grad_output, input, p) if output_mask[1] else None,
            *([grad_output.sum((0, 2, 3)) if output_mask[2] else None] if self.bias else []),
        )


def registered(bias: bool = False, **options: Any) -> Joint:
    joint = Joint(bias)
    convgrad.register("mine", backward=joint, **{"accepts": accepts, "dtypes": WIDE, "verify": False, **options})
    return joint


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("needs", [(True, True, True), (True, True, False), (True, False, True), (False, True, False)])
def test_the_gradients_that_are_needed_come_from_one_call(bias: bool, needs: tuple[bool, ...]) -> None:
    joint = registered(bias)
    tensors = (*operands(), torch.randn(8, dtype=torch.float64))
    given = [t.detach().requires_grad_(needed) for t, needed in zip(tensors, needs, strict=True)]
    wanted = [t for t in given if t.requires_grad]
    y = convgrad.conv2d(*given, padding=1, groups=8)
    expected = torch.autograd.grad(F.conv2d(*given, padding=1, groups=8).square().sum(), wanted)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), wanted), expected)
    # one gradient alone leaves the bias to the engine
    assert joint.masks == [needs if needs[0] and needs[1] else (*needs[:2], False)]


def test_every_order() -> None:
    registered()
    assert torch.autograd.gradcheck(depthwise, operands(), fast_mode=True)
    assert torch.autograd.gradgradcheck(depthwise, operands(), fast_mode=True)


@pytest.mark.parametrize(
    ("separate", "expected"),
    [
        ((), {"grad_input": "joint", "grad_weight": "joint"}),
        (("grad_input",), {"grad_input": "grad_input", "grad_weight": "joint"}),
        (("forward", "grad_input", "grad_weight"), {"grad_input": "grad_input", "grad_weight": "grad_weight"}),
    ],
)
def test_beside_functions_of_one_gradient(separate: tuple[Method, ...], expected: dict[str, str]) -> None:
    """Both are computed by the joint function; one of them by its own, where it has one."""
    all_of: dict[str, Any] = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}
    functions = {name: Counted(all_of[name]) for name in separate}
    joint = registered(**functions)
    x, w = operands()
    depthwise(x, w).sum().backward()
    assert joint.masks == [(True, True, False)]
    assert {name: f.calls for name, f in functions.items()} == {n: int(n == "forward") for n in separate}
    for name, tensor in (("grad_input", x), ("grad_weight", w)):
        joint.masks.clear()
        for f in functions.values():
            f.calls = 0
        torch.autograd.grad(depthwise(x, w).sum(), tensor)
        by = "joint" if joint.masks else next(n for n, f in functions.items() if f.calls and n != "forward")
        assert by == expected[name]


def test_the_one_that_was_registered_last_runs() -> None:
    joint = registered()
    alone = Counted(grad_weight)
    convgrad.register("later", grad_weight=alone, accepts=accepts, dtypes=WIDE, verify=False)
    chosen = explain_problem(DEPTHWISE).chosen()
    assert (chosen["grad_input"], chosen["grad_weight"]) == ("mine", "later")
    depthwise(*operands()).sum().backward()
    assert (joint.masks, alone.calls) == ([(True, False, False)], 1)
    convgrad.unregister("later")
    assert [r.reasons for r in explain_problem(DEPTHWISE).rows if r.chosen and r.output == "grad_weight"] == [
        ("registered by the user, not verified, in one call with grad_input and grad_bias",)
    ]


def test_by_name_and_as_the_forward_of_a_transposed_convolution() -> None:
    joint = registered(prefer=False)
    with convgrad.use_backend("mine"), trace() as seen:
        depthwise(*operands()).sum().backward()
    assert [r.outputs for r in seen if r.backend == "mine"] == ["grad_input+grad_weight"]
    joint.masks.clear()
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    with convgrad.use_backend("mine"):
        got = convgrad.conv_transpose2d(x, w, stride=2)
    torch.testing.assert_close(got, F.conv_transpose2d(x, w, stride=2))
    assert joint.masks == [(True, False, False)]


@pytest.mark.parametrize(
    ("mask", "seen"),
    [("output_mask[:2]", (True, True)), ("output_mask[1]", True), ("output_mask", (True,) * 2 + (False,))],
)
def test_the_mask_as_the_kernel_has_it(mask: str, seen: Any) -> None:
    masks = []

    def joint(grad_output: Tensor, input: Tensor, weight: Tensor, p: ConvProblem, mask: Any) -> list[Tensor]:
        masks.append(mask)
        return [grad_input(grad_output, weight, p), grad_weight(grad_output, input, p)]

    args = ("grad_output", "input", "weight", "problem", mask)
    convgrad.register("mine", backward=joint, args=args, accepts=accepts, dtypes=WIDE, verify=False)
    depthwise(*operands()).sum().backward()
    assert masks == [seen]


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (True, True, False), (True, True, True)])
def test_every_mask_is_checked(mask: tuple[bool, ...]) -> None:
    """Right for all masks but one: each gradient alone, both, and both with that of the bias."""

    class Wrong(Joint):
        def __call__(self, *args: Any) -> Any:
            results = super().__call__(*args)
            return tuple(None if t is None else -t for t in results) if tuple(args[-1]) == mask else results

    with pytest.raises(CheckError, match=r"its grad_(input|weight|bias) "):
        convgrad.register("mine", backward=Wrong(True), accepts=accepts, dtypes=WIDE, seconds=60)
    assert "mine" not in convgrad.list_backends()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(3), "backward of 'mine' returned Tensor, not"),
        ((torch.ones(3),), "returned 1 results, not"),
        ((None, None), "grad_input by backward of 'mine' returned NoneType"),
        ((torch.ones(2, 8, 9, 9), torch.ones(8, 1, 3, 4)), r"grad_weight by .* returned \(8, 1, 3, 4\)"),
    ],
)
def test_what_it_returns(result: Any, message: str) -> None:
    convgrad.register("mine", backward=lambda g, x, w, p, mask: result, accepts=accepts, verify=False)
    x, w = (t.detach().float().requires_grad_() for t in operands())
    with pytest.raises(BackendError, match=message):
        depthwise(x, w).sum().backward()
