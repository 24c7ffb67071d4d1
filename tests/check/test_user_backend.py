"""What a registered function is given, what its result may be, and what it says that it can compute."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import convgrad
from convgrad import BackendError, ConvProblem

from .functions import DEPTHWISE, accepts, counted, depthwise, forward, operands, passed

pytestmark = pytest.mark.usefixtures("brief_search")


def test_a_result_of_another_shape() -> None:
    convgrad.register("mine", forward=lambda x, w, p: x, accepts=lambda p: accepts(p) and p.depthwise, verify=False)
    x, w = operands()
    with pytest.raises(BackendError, match=r"forward of 'mine' returned \(2, 8, 9, 9\).*\(2, 8, 7, 7\) .*was expected"):
        convgrad.conv2d(x, w, groups=8)


def test_an_operand_as_the_result() -> None:
    """An identity may return its input: what the engine and the caller do to the result does not reach the input."""
    convgrad.register("mine", forward=lambda x, w, p: x, accepts=lambda p: p.pointwise, verify=False)
    x = torch.randn(1, 1, 3, 3)
    before = x.clone()
    y = convgrad.conv2d(x, torch.ones(1, 1, 1, 1), torch.ones(1))
    assert torch.equal(x, before)
    assert torch.equal(y, x + 1)


def test_a_result_of_inference_mode() -> None:
    """Autograd goes on from it, as from any other."""
    convgrad.register("mine", forward=torch.inference_mode()(forward), accepts=accepts, verify=False)
    x, w = operands()
    depthwise(x, w).relu().sum().backward()
    assert x.grad is not None
    result = depthwise(x.detach(), w.detach()).add_(1)
    (result * torch.ones(8, 1, 1, dtype=x.dtype, requires_grad=True)).sum().backward()


def test_a_list_of_one_tensor() -> None:
    """What an extension that returns std::vector<at::Tensor> gives."""
    convgrad.register("list", forward=lambda x, w, p: [forward(x, w, p)], accepts=accepts, verify=False)
    x, w = operands()
    assert torch.equal(depthwise(x, w), F.conv2d(x, w, padding=1, groups=8))


def test_the_bias() -> None:
    """Added by the engine, or by the function if it has the parameter."""
    x, w = operands()
    b = torch.randn(8, dtype=torch.float64)
    expected = F.conv2d(x, w, b, padding=1, groups=8)
    counted()
    torch.testing.assert_close(convgrad.conv2d(x, w, b, padding=1, groups=8), expected)

    args = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    backend = convgrad.register("mine", forward=F.conv2d, args=args, accepts=accepts, verify=False)
    assert backend.fuses_bias(DEPTHWISE)
    torch.testing.assert_close(convgrad.conv2d(x, w, b, padding=1, groups=8), expected)


def test_plain_integers() -> None:
    """One dimension of a size, as many kernels have it."""

    def mine(input: Tensor, weight: Tensor, kernel: int, stride: int) -> Tensor:
        assert type(kernel) is type(stride) is int
        return F.conv2d(input, weight, None, stride, kernel // 2, 1, len(weight))

    args = ("input", "weight", "kernel_size[0]", "stride[0]")
    takes = {DEPTHWISE, DEPTHWISE.replace(dtype=torch.float64)}
    backend = convgrad.register("mine", forward=mine, args=args, accepts=lambda p: p in takes, problems=[DEPTHWISE])
    assert passed(backend) == 2
    x, w = operands()
    torch.testing.assert_close(depthwise(x, w), F.conv2d(x, w, padding=1, groups=8))


def test_layouts() -> None:
    """Contiguous operands for who asks for them; the result is in channels_last all the same."""
    seen = []

    def mine(input: Tensor, weight: Tensor, p: ConvProblem) -> Tensor:
        seen.append((input.is_contiguous(), weight.is_contiguous()))
        return forward(input, weight, p).contiguous()

    convgrad.register("mine", forward=mine, accepts=accepts, layouts=("contiguous",), verify=False)
    y = convgrad.conv2d(torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last), torch.randn(8, 8, 3, 3))
    assert seen == [(True, True)]
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda p: p.kernel_size[1] == 3, "its accepts raised IndexError: tuple index out of range"),
        (lambda p: False, "its accepts says no"),
        (lambda p: None, "its accepts returned None, neither True nor False nor a reason"),
    ],
)
def test_accepts_that_raises_reads_nothing_or_returns_nothing(answer: Any, reason: str) -> None:
    backend = convgrad.register("mine", forward=forward, accepts=answer, verify=False)
    assert backend.reasons_against(ConvProblem.parse("ic2iw9oc2kw3"), ("forward",), torch.device("cpu")) == [reason]


def test_dtypes() -> None:
    """Integers and complex numbers were not verified, so they are not offered unless asked for."""
    backend = convgrad.register("mine", forward=forward, accepts=accepts, verify=False)
    reasons = backend.reasons_against(DEPTHWISE.replace(dtype=torch.complex64), ("forward",), torch.device("cpu"))
    assert reasons == ["it was registered for float32, float64, bfloat16, float16, not for complex64"]


def test_one_dtype_layout_or_device_may_stand_alone() -> None:
    options: dict[str, Any] = {"dtypes": torch.float64, "devices": "cpu", "layouts": "contiguous"}
    backend = convgrad.register("alone", forward=forward, accepts=accepts, verify=False, **options)
    assert (backend.devices, backend.layouts) == (("cpu",), ("contiguous",))
    double = DEPTHWISE.replace(dtype=torch.float64)
    assert not backend.reasons_against(double, ("forward",), torch.device("cpu"))
    assert "float64" in backend.reasons_against(DEPTHWISE, ("forward",), torch.device("cpu"))[0]


def test_the_functions_own_convolutions_are_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither computed by convgrad nor reported: the check of a registration, and the call itself."""
    monkeypatch.setattr("convgrad.check.speed.measure", lambda *_: ())
    with convgrad.models.Usage() as usage, convgrad.takeover():
        kernel = counted(verify=True, seconds=0.2)
        assert not usage.rows
        convgrad.conv2d(*(t.detach() for t in operands()), padding=1, groups=8)
    assert kernel.calls == 1
    assert [(row.backend, row.calls) for row in usage.rows] == [("mine", 1)]


def test_a_function_that_ends_in_itself() -> None:
    def again(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        return convgrad.conv2d(x, w, padding=1, groups=8)

    convgrad.register("mine", forward=again, accepts=lambda p: p == DEPTHWISE, verify=False)
    x, w = (t.detach().float() for t in operands())
    with pytest.raises(BackendError, match="forward of 'mine' ends in itself"):
        convgrad.conv2d(x, w, padding=1, groups=8)


def test_a_function_that_never_ends_by_itself() -> None:
    def endless(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        return endless(x, w, p)

    convgrad.register("mine", forward=endless, accepts=lambda p: p == DEPTHWISE, verify=False)
    x, w = (t.detach().float() for t in operands())
    with pytest.raises(RecursionError):
        convgrad.conv2d(x, w, padding=1, groups=8)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_what_it_raises_says_where_it_comes_from() -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("device lost")

    convgrad.register("mine", forward=broken, accepts=accepts, verify=False)
    with pytest.raises(RuntimeError, match="device lost") as caught:
        depthwise(*operands())
    assert caught.value.__notes__ == [f"in forward of 'mine', called for {DEPTHWISE.replace(dtype=torch.float64)}"]


def test_another_version_of_a_function_that_was_typed_in() -> None:
    """Where there is no source, the code tells them apart; remembered choices belong to one of them."""

    def version(body: str) -> str:
        typed: dict[str, Any] = {}
        exec(compile(f"def mine(x, w, p):\n    return {body}", "<stdin>", "exec"), typed)
        return convgrad.register("mine", forward=typed["mine"], accepts=accepts, verify=False).version

    assert version("x") == version("x") != version("x * 2")
