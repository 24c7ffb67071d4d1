"""Each property finds what it is there for: backends broken on purpose, in one way only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import count, cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from convgrad.backends.aten import AtenBackend
from convgrad.backends.im2col import Im2colBackend
from convgrad.backends.reference import ReferenceBackend
from convgrad.check.properties import Outcome, PropertyCheck
from convgrad.problem import PASSES, ConvProblem, Output, passes_of
from convgrad.testing import check_backend, check_problem

from .broken import CORNER, TEXT, Broken, around, failing_properties, off_by_one, wrong_if


def test_the_border_alone() -> None:
    def last_column(p, pass_, a, b, result):
        result[..., -1] *= 2
        return result

    assert "exact" in failing_properties(Broken(last_column))


def test_an_error_that_integers_do_not_show() -> None:
    def rough(p, pass_, a, b, result):
        return result.mul_(2**8).round_().div_(2**8)

    assert failing_properties(Broken(rough)) == {"bound", "bias"}


def test_wrong_on_its_second_call_only() -> None:
    calls = count()
    forgetful = Broken(wrong_if(lambda p: next(calls) > 0))
    results = {r.property_name: r for r in check_problem(forgetful, TEXT, "forward")}
    assert results["exact"].status == "passed"
    assert results["again"].status == "failed"


def test_an_answer_kept_from_an_earlier_call() -> None:
    known: dict[object, Tensor] = {}

    def remembers(p, pass_, a, b, result):
        return known.setdefault((p, pass_), result).clone()

    assert "again" in failing_properties(Broken(remembers))


@pytest.mark.parametrize("sweep", [False, True])
def test_weights_kept_from_before_a_step_of_the_optimizer(sweep: bool) -> None:
    packed: dict[int, tuple[Tensor, Tensor]] = {}

    def packs(kernel, problem, outputs):
        def packed_first(a, *rest):
            tensor, copy = packed.setdefault(id(a), (a, a.clone()))
            return kernel(copy if tensor is a else a, *rest)

        return packed_first if (len(outputs) > 1) == sweep else kernel

    assert failing_properties(around(AtenBackend, packs), "grad_weight") == {"again"}


def test_results_in_two_buffers_in_turn() -> None:
    turn = cycle([torch.empty(ConvProblem.parse(TEXT).output_shape) for _ in range(2)])
    assert failing_properties(Broken(lambda p, pass_, a, b, result: next(turn).copy_(result))) == {"again"}


def test_another_result_in_inference_mode() -> None:
    wrong = Broken(wrong_if(lambda p: torch.is_inference_mode_enabled()))
    assert failing_properties(wrong) == {"memory"}
    assert failing_properties(wrong, "grad_weight") == set()  # no model computes it there


def test_numbers_too_large_for_16_bits() -> None:
    def half(kernel, problem, outputs):
        return lambda a, b, *rest: kernel(a.half().to(a.dtype), b.half().to(b.dtype), *rest)

    assert "bound" in failing_properties(around(Im2colBackend, half), text=f"{TEXT} bfloat16")


@pytest.mark.parametrize("operand", [0, 1])
def test_writing_an_operand(operand: int) -> None:
    def writes(p, pass_, a, b, result):
        (a, b)[operand].view(-1)[-1:] += 1
        return result

    assert "memory" in failing_properties(Broken(writes))


def test_asking_for_the_gradient_of_an_operand() -> None:
    def asks(p, pass_, a, b, result):
        b.requires_grad_()
        return result

    assert "memory" in failing_properties(Broken(asks))


def test_writing_beside_an_operand() -> None:
    def oversteps(p, pass_, a, b, result):
        if a.storage_offset():
            a.as_strided((1,), (1,), a.storage_offset() - 1).fill_(5)
        return result

    assert failing_properties(Broken(oversteps)) == {"memory"}


def test_reading_beside_an_operand() -> None:
    def reads(p, pass_, a, b, result):
        if a.storage_offset():
            result += 0 * a.as_strided((1,), (1,), a.storage_offset() - 1)
        return result

    assert failing_properties(Broken(reads)) == {"memory"}


def test_an_element_that_is_never_written() -> None:
    def unwritten(p, pass_, a, b, result):
        fresh = torch.empty(result.shape, dtype=result.dtype)
        fresh.view(-1)[1:] = result.view(-1)[1:]
        return fresh

    assert "memory" in failing_properties(Broken(unwritten))


def test_writing_beside_the_result() -> None:
    def beyond(p, pass_, a, b, result):
        fresh = torch.empty(result.shape, dtype=result.dtype)
        fresh.copy_(result)
        if fresh.storage_offset():
            fresh.as_strided((1,), (1,), fresh.storage_offset() + fresh.numel()).fill_(1)
        return fresh

    assert failing_properties(Broken(beyond)) == {"memory"}


def test_other_bits_in_one_run_of_twenty() -> None:
    calls = count(1)

    def flickers(p, pass_, a, b, result):
        real = result[0, 0, 0, 0] != result[0, 0, 0, 0].round()
        return result * (1 + 2**-22) if next(calls) % 15 == 0 and real else result

    backend = Broken(flickers)
    assert failing_properties(backend) == {"deterministic"}
    backend.deterministic = False
    assert failing_properties(backend) == set()


def test_a_nan_that_is_swallowed_or_spread() -> None:
    def swallow(p, pass_, a, b, result):
        return result.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf"))

    def spread(p, pass_, a, b, result):
        return result + 0 * a.sum()

    assert failing_properties(Broken(swallow)) == {"nonfinite"}
    assert "nonfinite" in failing_properties(Broken(spread))


@pytest.mark.parametrize("output", PASSES)
def test_a_nan_that_is_swallowed_in_the_operand_without_a_border(output: Output) -> None:
    which = 0 if output == "grad_weight" else 1

    def swallows(kernel, problem, outputs):
        return lambda *args: kernel(*(t.nan_to_num() if i == which else t for i, t in enumerate(args)))

    assert failing_properties(around(Im2colBackend, swallows), output) == {"nonfinite"}


def test_what_pytorch_does_not_promise_of_its_kernels_is_reported_and_no_failure() -> None:
    def nan_for_inf(p, pass_, a, b, result):
        return torch.where(result.isinf(), float("nan"), result)

    (result,) = check_problem(Broken(nan_for_inf, from_pytorch=True), TEXT, "forward", properties=["nonfinite"])
    assert result.status == "differs"
    assert result.message.startswith("with inf in input, 12 elements differ, the first at (")
    assert "nan instead of inf" in result.message or "nan instead of -inf" in result.message
    (result,) = check_problem(Broken(nan_for_inf), TEXT, "forward", properties=["nonfinite"])
    assert result.status == "failed"
    report = check_backend(Broken(nan_for_inf, from_pytorch=True), [TEXT], outputs=["forward"])
    assert report.ok
    assert [r.property_name for r in report.differences] == ["nonfinite"]
    assert "1 differ in what PyTorch does not promise" in str(report)


def test_a_gradient_with_its_kernel_flipped() -> None:
    def flipped(p, pass_, a, b, result):
        return result.flip(-1).contiguous() if pass_ == "grad_weight" else result

    assert "exact" in failing_properties(Broken(flipped), "grad_weight")


def test_strides_that_are_ignored() -> None:
    def careless(kernel, problem, outputs):
        return lambda a, *rest: kernel(a.as_strided(a.shape, torch.empty(a.shape).stride()), *rest)

    assert "layouts" in failing_properties(around(ReferenceBackend, careless, layouts=("strided",)))
    assert failing_properties(around(ReferenceBackend, careless, layouts=("contiguous",))) == set()


def test_lazy_operations_that_are_ignored() -> None:
    def as_in_memory(t: Tensor) -> Tensor:
        return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())

    def careless(kernel, problem, outputs):
        return lambda a, b, *rest: kernel(as_in_memory(a), as_in_memory(b), *rest)

    lazy = around(ReferenceBackend, careless, layouts=("any",))
    assert failing_properties(lazy) == {"layouts"}
    (result,) = check_problem(lazy, f"{TEXT} complex64", "forward", properties=["layouts"])
    assert "lazily conjugated" in result.message
    assert failing_properties(around(ReferenceBackend, careless, layouts=("strided",))) == set()


@pytest.mark.parametrize(
    "change", [lambda bias: bias * 2, lambda bias: bias.flip(0), lambda bias: bias.bfloat16().float()]
)
def test_a_wrong_bias(change: Callable[[Tensor], Tensor]) -> None:
    def wrong(kernel, problem, outputs):
        return lambda a, b, bias, *rest: kernel(a, b, None if bias is None else change(bias), *rest)

    assert failing_properties(around(Im2colBackend, wrong)) == {"bias"}


def test_a_bias_that_is_changed() -> None:
    """Doubled in place, the one that the result is compared with was doubled too."""

    def wrong(kernel, problem, outputs):
        return lambda a, b, bias, *rest: kernel(a, b, None if bias is None else bias.mul_(2), *rest)

    (result,) = check_problem(around(Im2colBackend, wrong), TEXT, "forward", properties=["bias"])
    assert (result.status, result.message) == ("failed", "it wrote into bias, or just outside of it")


def test_a_wrong_sweep() -> None:
    def wrong(kernel, problem, outputs):
        def sweep(*args):
            grad_input, grad_weight, *rest = kernel(*args)
            return grad_input, off_by_one(grad_weight), *rest

        return sweep if len(outputs) > 1 else kernel

    assert failing_properties(around(AtenBackend, wrong), "grad_weight") == {"sweeps", "again"}
    assert failing_properties(around(AtenBackend, wrong), "grad_bias") == set()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "float32"])
@pytest.mark.parametrize("output", PASSES)
def test_the_reference_needs_no_more_memory_than_it_declares(output: Output, dtype: str) -> None:
    (result,) = check_problem("reference", f"mb4ic16ih20oc4kh3ph1 {dtype}", output, properties=["workspace"])
    assert result.status == "passed", result


def test_more_memory_than_declared() -> None:
    text = "mb4ic16ih20oc4kh3ph1"

    def leaves(kernel, problem, outputs):
        return lambda a, b, bias, workspace: kernel(a, b, bias, None)  # and allocates its own

    modest = around(Im2colBackend, lambda kernel, *_: kernel, workspace=lambda *_: 0)
    for backend in (modest, around(Im2colBackend, leaves)):
        failed = [r for r in check_problem(backend, text, "forward") if r.status == "failed"]
        assert [r.property_name for r in failed] == ["workspace"]
        assert failed[0].worst > failed[0].bound
    assert failing_properties(Im2colBackend(), text=text) == set()


def watched(size: int, first: Callable[[Tensor | None, int], object]) -> Any:
    """PyTorch's kernels; ``first`` is done with the workspace of every call, and how many passes it computes."""

    def watching(kernel, problem, outputs):
        def run(*args):
            first(args[-1], len(passes_of(outputs)))
            return kernel(*args)

        return run

    return around(AtenBackend, watching, workspace=lambda *_: size)


def test_a_sweep_that_takes_more_than_it_declares() -> None:
    wasteful = watched(0, lambda workspace, passes: torch.empty(1 << 20) if passes == 2 else None)
    assert failing_properties(wasteful) == set()
    assert failing_properties(wasteful, "grad_input") == {"workspace"}


@pytest.mark.parametrize(("passes", "output", "name"), [(1, "forward", "memory"), (2, "grad_weight", "sweeps")])
def test_a_write_behind_the_workspace(passes: int, output: Output, name: str) -> None:
    def behind(workspace: Tensor | None, of: int) -> None:
        assert workspace is not None
        assert bool((workspace == 255).all())
        if of == passes:
            ctypes.memset(workspace.data_ptr() + workspace.numel(), 0, 4)

    results = check_problem(watched(64, behind), TEXT, output, properties=["memory", "sweeps"])
    failed = [(r.property_name, r.message.partition(", in the sweep")[0]) for r in results if r.status == "failed"]
    assert failed == [(name, "it wrote outside a tensor that it allocated")]


# ---- what a result is held to ---------------------------------------------------------------------


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
    for arithmetic, failing in (("direct", {"bound"}), ("low-precision accumulation", set())):
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
    with pytest.raises(Outcome, match="mostly zero"):
        case.compare(torch.zeros(p.output_shape), operands)
    with pytest.raises(Outcome, match="differ"):
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
    assert {r.status for r in check_problem(Together(), TEXT, "grad_bias", properties=["exact"])} == {"passed"}
    (result,) = check_problem(Together(), TEXT, "forward")
    assert (result.property_name, result.message) == ("usable", "only both gradients")
