"""Kernels that are right in a single call on an idle machine, and wrong otherwise."""

from __future__ import annotations

import time

import pytest
import torch

from convgrad.backends.aten import AtenBackend
from convgrad.check import STRESS, check_problem
from convgrad.check.memory_guards import paged_copy
from convgrad.problem import PASSES

from .broken import CORNER, TEXT, Broken, around


def failing(damage) -> set[str]:
    results = check_problem(Broken(damage), TEXT, "forward", properties=STRESS)
    return {r.property_name for r in results if r.status == "failed"}


@pytest.mark.parametrize("name", ["aten", "im2col", "reference"])
@pytest.mark.parametrize("output", PASSES)
def test_right_ones_pass(name: str, output) -> None:
    for text in (TEXT, "mb1g3ic6ih8iw5oc3kh3kw3sh2sw2ph1pw1 float64 channels_last", "mb2ic3iw13oc5kw3 bfloat16"):
        results = check_problem(name, text, output, properties=STRESS)
        assert {r.status for r in results} == {"passed"}, results


@pytest.mark.parametrize("text", ["mb2ic4ih6oc4kh3 int32", "mb1ic64ih12oc3kh3 int8"])
def test_integers(text: str) -> None:
    properties = ["layouts", *STRESS]
    assert {r.status for r in check_problem("reference", text, "forward", properties=properties)} == {"passed"}
    assert {r.status for r in check_problem(Broken(CORNER), text, "forward", properties=properties)} == {"failed"}


def test_samples_are_of_padding_with_zeros() -> None:
    (result,) = check_problem("reference", "ic2ih6oc4kh3ph1 circular", "forward", properties=["samples"])
    assert (result.status, result.message) == ("skipped", "single elements are computed for padding with zeros only")


def test_shared_memory() -> None:
    scratch: dict[torch.Size, torch.Tensor] = {}

    def shared(p, pass_, a, b, result):
        mine = scratch.setdefault(result.shape, torch.empty_like(result))
        mine.copy_(result)
        time.sleep(0.001)  # other threads come in between
        return mine.clone()

    assert failing(shared) == {"threads"}


def test_one_wrong_element_of_many() -> None:
    assert failing(CORNER) == {*STRESS}


def test_a_large_result() -> None:
    """A part of it that is wrong, or was never written."""

    def far(p, pass_, a, b, result):
        result.view(-1)[-20_000:] += 1
        return result

    text = "mb300g16ic16ih9oc16kh3ph1"
    (wrong,) = check_problem(Broken(far), text, "forward", properties=["samples"])
    assert wrong.status == "failed"

    def unwritten(p, pass_, a, b, result):
        memory = torch.empty_like(result)
        memory[:-1] = result[:-1]
        return memory

    (wrong,) = check_problem(Broken(unwritten), text, "forward", properties=["samples"])
    assert "never written" in wrong.message


def test_a_large_result_of_a_sweep() -> None:
    def wrong(kernel, problem, outputs):
        def far(*args):
            grad_input, *rest = kernel(*args)
            grad_input.view(-1)[-20_000:] += 1
            return grad_input, *rest

        return far

    text = "mb300g16ic16ih9oc16kh3ph1"
    for output, status in (("grad_input", "failed"), ("grad_weight", "passed")):
        (result,) = check_problem(around(AtenBackend, wrong, passes=()), text, output, properties=["samples"])
        assert result.status == status, result


def test_pages() -> None:
    """The same values and strides; the neighbors are closed: what that means, test_verify shows in a child."""
    for tensor in (torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last)):
        for at_end in (True, False):
            copy = paged_copy(tensor, at_end=at_end)
            assert torch.equal(copy, tensor)
            assert copy.stride() == tensor.stride()
    behind = paged_copy(torch.zeros(1000), at_end=True)
    assert (behind.data_ptr() + 4000) % 4096 == 0
    assert paged_copy(torch.zeros(1000), at_end=False).data_ptr() % 4096 == 0
