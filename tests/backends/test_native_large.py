"""The compiled CPU kernels on tensors that no cache holds: there they ask for memory ahead of their loops."""

from __future__ import annotations

import math

import pytest
import torch

from convgrad.backends import _native_library as library
from convgrad.backends.native import NativeBackend
from convgrad.problem import ConvProblem

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


@pytest.mark.parametrize(
    "text",
    [
        "mb16g100ic100ih57oc100kh3ph1 channels_last",
        "mb16g100ic100ih57oc100kh5ph2sh2 channels_last",
        "mb8g100ic100ih57oc100oh57kh3ph2dh1 channels_last",
        "mb4g40ic40id9ih40iw41oc40kd3kh3kw3pd1ph1pw1 channels_last",
        "mb33g301ic301ih20oc301kh3ph1",
        "mb33g150ic150ih20oc300kh3ph1",
        "mb1500g5ic5ih31oc5kh5ph2sh2",
        "mb40g80ic80iw900oc80ow900kw5pw2",
    ],
)
def test_exact(text: str) -> None:
    problem = ConvProblem.parse(text)
    bytes_ = 4 * sum(math.prod(problem.shape_of(slot)) for slot in ("input", "grad_output"))
    assert bytes_ > 16 << 20
    generator = torch.Generator().manual_seed(0)

    def integers(slot: str) -> torch.Tensor:
        shape = problem.shape_of(slot)
        x = torch.randint(-2, 3, shape, generator=generator, dtype=torch.float32)
        return x.to(memory_format=problem.memory_format) if slot != "weight" else x

    input, weight, grad_output = (integers(slot) for slot in ("input", "weight", "grad_output"))
    backend = NativeBackend()
    forward = backend.bind(problem, ("forward",))(input, weight)
    grad_input, grad_weight, grad_bias = backend.bind(problem, ("grad_input", "grad_weight", "grad_bias"))(
        grad_output, input, weight
    )
    alone = backend.bind(problem, ("grad_input",))(grad_output, weight)
    like = (problem.stride, tuple(low for low, _ in problem.padding), problem.dilation)
    expected = torch.ops.aten.convolution(
        input, weight, None, like[0], like[1], like[2], False, [0] * problem.ndim, problem.groups
    )
    expected_gradients = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        [weight.shape[0]],
        *like,
        False,
        [0] * problem.ndim,
        problem.groups,
        [True, True, True],
    )
    found = (grad_input, grad_weight, grad_bias)
    assert torch.equal(forward, expected)
    assert torch.equal(alone, grad_input)
    assert all(torch.equal(a, b) for a, b in zip(found, expected_gradients, strict=True))
