"""What a result is held to: its shape and layout, no differing element, or the bound of the declared arithmetic."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from convgrad.backends.aten import AtenBackend
from convgrad.backends.im2col import Im2colBackend
from convgrad.check import check_problem
from convgrad.check.property_check import Failed, PropertyCheck, Skipped
from convgrad.problem import ConvProblem

from .broken import CORNER, TEXT, Broken, around, failing_properties


def test_a_result_in_another_layout() -> None:
    def transposed(p, pass_, a, b, result):
        return result.transpose(2, 3).contiguous().transpose(2, 3)

    assert "exact" in failing_properties(Broken(transposed))


def test_a_bias_gradient_is_held_to_the_declared_sums() -> None:
    def coarse(kernel, problem, outputs):
        def sweep(grad_output, *rest):
            grad_input, grad_weight, _ = kernel(grad_output, *rest)
            terms = grad_output.transpose(0, 1).flatten(1)
            total = torch.zeros(problem.out_channels, dtype=problem.dtype)
            for i in range(terms.shape[1]):
                total += terms[:, i]
            return grad_input, grad_weight, total

        return sweep if "grad_bias" in outputs else kernel

    text = "mb4ic2iw40oc4kw3 bf16"
    for arithmetic, failing in (("direct", {"sweeps"}), ("low-precision accumulation", set())):
        backend = around(AtenBackend, coarse, arithmetic=lambda *_, declared=arithmetic: declared)
        assert failing_properties(backend, "grad_bias", text) == failing


def test_a_bias_may_be_added_to_a_sum_in_16_bits() -> None:
    def twice(kernel, problem, outputs):
        def added(a, b, bias, *rest):
            result = kernel(a, b, None, *rest)
            return result if bias is None else result + bias.view(1, -1, 1, 1)

        return added

    assert failing_properties(around(Im2colBackend, twice), text="mb4ic16ih20oc40kh3ph1 bf16") == set()


def test_a_transform_is_held_to_its_norm_and_not_to_exactness() -> None:
    def noisy(p, pass_, a, b, result):
        noise = torch.linspace(-1, 1, result.numel()).view(result.shape)
        return result + noise * 2**-20 * result.abs().amax()

    transform = partial(Broken, arithmetic=lambda *_: "transform")
    assert {"exact", "bound"} <= failing_properties(Broken(noisy))
    assert not failing_properties(transform(noisy)) & {"exact", "bound"}
    assert "exact" in failing_properties(transform(CORNER))


def test_rounding_of_pytorchs_low_precision_sums_is_reported_and_that_of_any_other_fails() -> None:
    def rough(p, pass_, a, b, result):
        return result.mul_(2).round_().div_(2)

    def arithmetic(problem, pass_, device):
        return "low-precision accumulation" if problem.dtype is torch.bfloat16 else "direct"

    text, low = "mb1ic1iw9oc2kw3", partial(Broken, arithmetic=arithmetic)
    for of_pytorch, dtype, status in (
        (True, "bfloat16", "differs"),
        (True, "float32", "failed"),
        (False, "bfloat16", "failed"),
    ):
        backend = low(rough, from_pytorch=of_pytorch)
        (result,) = check_problem(backend, f"{text} {dtype}", "forward", properties=["bound"])
        assert result.status == status
    assert "exact" in failing_properties(low(CORNER, from_pytorch=True), text=f"{text} bfloat16")


def test_a_mostly_zero_output_does_not_count() -> None:
    p = ConvProblem.parse(TEXT)
    case = PropertyCheck(Im2colBackend(), p, "forward", torch.device("cpu"))
    operands = {slot: torch.zeros_like(t) for slot, t in case.integers().items()}
    with pytest.raises(Skipped, match="mostly zero"):
        case.compare(torch.zeros(p.output_shape), operands)
    with pytest.raises(Failed, match="differ"):
        case.compare(torch.ones(p.output_shape), operands)


def test_an_output_that_is_refused_alone_is_checked_in_sweeps() -> None:
    class Together(AtenBackend):
        def reasons_against(self, problem, outputs, device):
            return ["only both gradients"] if len(outputs) == 1 else super().reasons_against(problem, outputs, device)

        def bind(self, problem, outputs):
            assert len(outputs) > 1
            return super().bind(problem, outputs)

    results = check_problem(Together(), TEXT, "grad_weight")
    assert {r.property_name for r in results if r.status == "skipped"} == {"bias"}
    assert {r.status for r in results} == {"passed", "skipped"}
    assert {r.message for r in check_problem(Together(), TEXT, "grad_bias", properties=["exact"])} == {
        "computed in sweeps only"
    }
    (result,) = check_problem(Together(), TEXT, "forward")
    assert (result.property_name, result.message) == ("usable", "only both gradients")
