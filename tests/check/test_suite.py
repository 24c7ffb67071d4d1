"""The check finds what is wrong: backends broken on purpose, each in one way only, and none that is right is blamed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import convgrad
from convgrad.backends.im2col import Im2colBackend
from convgrad.backends.reference import ReferenceBackend
from convgrad.check.bounds import error_bound, reduction_length
from convgrad.check.case import Case, Failed, Skipped
from convgrad.check.memory_guards import PeakMemory, Poison, guarded_copy
from convgrad.check.operands import integer_operands, is_exact, structural
from convgrad.check.properties import ASPECTS
from convgrad.check.report import CheckReport, CheckResult
from convgrad.check.suite import check_backend, check_problem, outputs_of
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output, Pass
from convgrad.testing import default_problems

Break = Callable[[ConvProblem, Pass, Tensor, Tensor, Tensor], Tensor]


class Broken(Im2colBackend):
    """im2col, and then ``damage`` done to (problem, pass, a, b, result)."""

    name = "broken"
    sweeps = ()

    def __init__(self, damage: Break) -> None:
        self.damage = damage

    def bind(self, problem, outputs):
        kernel = super().bind(problem, outputs)
        return lambda a, b, *rest: self.damage(problem, outputs[0], a, b, kernel(a, b, *rest))


def off_by_one(result: Tensor) -> Tensor:
    """The smallest thing that can go wrong: one element, by one."""
    result[(0,) * result.dim()] += 1
    return result


def wrong_if(condition: Callable[[ConvProblem], bool]) -> Break:
    return lambda p, pass_, a, b, result: off_by_one(result) if condition(p) else result


SUBSET = list(default_problems())[::3]


@pytest.mark.parametrize(
    "condition",
    [
        lambda p: p.batch == 1,
        lambda p: len(set(p.input_size)) > 1,
        lambda p: p.input_size[-1] % 8 != 0,
        lambda p: 2 in p.stride,
        lambda p: 3 in p.stride,
        lambda p: max(p.dilation) > 1,
        lambda p: p.dtype == torch.float64,
        lambda p: p.dtype == torch.bfloat16,
        lambda p: p.channels_last,
        lambda p: p.depthwise and p.out_channels > p.in_channels,
        lambda p: p.ndim == 3 and p.groups > 1,
        lambda p: p.transposed,
        lambda p: not p.symmetric,
        lambda p: any(k % 2 == 0 for k in p.kernel_size),
        lambda p: p.in_channels == 1 and p.out_channels == 1,
        lambda p: any(low < 0 for low, _ in p.padding),
    ],
    ids=[
        "n1",
        "non-square",
        "width",
        "stride2",
        "stride3",
        "dilated",
        "float64",
        "bfloat16",
        "channels_last",
        "multiplier",
        "3d-groups",
        "transposed",
        "asymmetric",
        "even-kernel",
        "single-channel",
        "crop",
    ],
)
@pytest.mark.parametrize("output", PASSES)
def test_a_kernel_wrong_for_some_problems_only_is_caught(
    condition: Callable[[ConvProblem], bool], output: Output
) -> None:
    matching = [p for p in default_problems() if condition(p)]
    assert matching, "no default problem has this"
    report = check_backend(Broken(wrong_if(condition)), matching[:1], outputs=[output], repeats=2)
    failure = report.first_failure
    assert failure is not None
    assert failure.aspect == "exact"
    assert failure.output == output
    assert failure.worst == 1
    others = [p for p in SUBSET if not condition(p)][:2]
    assert check_backend(Broken(wrong_if(condition)), others, outputs=[output], repeats=2).ok


TEXT = "mb2g2ic4ih7iw9oc6kh3kw3ph1pw1"


def aspects_that_fail(
    backend: ReferenceBackend | Im2colBackend, output: Output = "forward", text: str = TEXT
) -> set[str]:
    return {r.aspect for r in check_problem(backend, text, output) if r.status == "failed"}


def test_the_border_alone() -> None:
    def last_column(p, pass_, a, b, result):
        result[..., -1] *= 2
        return result

    assert "exact" in aspects_that_fail(Broken(last_column))


def test_an_error_that_integers_do_not_show() -> None:
    def rough(p, pass_, a, b, result):
        return result.mul_(2**8).round_().div_(2**8)

    assert aspects_that_fail(Broken(rough)) == {"bound"}


class Forgetful(Im2colBackend):
    """Right once."""

    def __init__(self) -> None:
        self.calls = 0

    def bind(self, problem, outputs):
        kernel = super().bind(problem, outputs)

        def forgetful(*args):
            self.calls += 1
            return kernel(*args) if self.calls == 1 else off_by_one(kernel(*args))

        return forgetful


def test_wrong_on_its_second_call_only() -> None:
    backend = Forgetful()
    results = {r.aspect: r for r in check_problem(backend, TEXT, "forward")}
    assert results["exact"].status == "passed"
    assert results["again"].status == "failed"


class Remembers(ReferenceBackend):
    """Gives the first answer to every question about the same shapes."""

    name = "remembers"

    def __init__(self) -> None:
        self.known: dict[object, Tensor] = {}

    def bind(self, problem, outputs):
        kernel = super().bind(problem, outputs)

        def remembers(*args):
            if (problem, outputs) not in self.known:
                self.known[problem, outputs] = kernel(*args)
            return self.known[problem, outputs].clone()

        return remembers


def test_an_answer_kept_from_an_earlier_call() -> None:
    assert "again" in aspects_that_fail(Remembers())


@pytest.mark.parametrize("operand", [0, 1])
def test_writing_an_operand(operand: int) -> None:
    def writes(p, pass_, a, b, result):
        (a, b)[operand].view(-1)[-1:] += 1
        return result

    assert "memory" in aspects_that_fail(Broken(writes))


def test_writing_beside_an_operand() -> None:
    def oversteps(p, pass_, a, b, result):
        if a.storage_offset():
            a.as_strided((1,), (1,), a.storage_offset() - 1).fill_(5)
        return result

    assert aspects_that_fail(Broken(oversteps)) == {"memory"}


def test_reading_beside_an_operand() -> None:
    def reads(p, pass_, a, b, result):
        if a.storage_offset():
            result += 0 * a.as_strided((1,), (1,), a.storage_offset() - 1)
        return result

    assert aspects_that_fail(Broken(reads)) == {"memory"}


def test_an_element_that_is_never_written() -> None:
    def unwritten(p, pass_, a, b, result):
        fresh = torch.empty(result.shape, dtype=result.dtype)
        fresh.view(-1)[1:] = result.view(-1)[1:]
        return fresh

    assert "memory" in aspects_that_fail(Broken(unwritten))


def test_writing_beside_the_result() -> None:
    def beyond(p, pass_, a, b, result):
        fresh = torch.empty(result.shape, dtype=result.dtype)
        fresh.copy_(result)
        if fresh.storage_offset():
            fresh.as_strided((1,), (1,), fresh.storage_offset() + fresh.numel()).fill_(1)
        return fresh

    assert aspects_that_fail(Broken(beyond)) == {"memory"}


def test_other_bits_in_one_run_of_twenty() -> None:
    class Flickers(Im2colBackend):
        calls = 0

        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)

            def flickers(*args):
                result = kernel(*args)
                self.calls += 1
                real = result[0, 0, 0, 0] != result[0, 0, 0, 0].round()
                return result * (1 + 2**-22) if real and self.calls % 15 == 0 else result

            return flickers

    assert aspects_that_fail(Flickers()) == {"deterministic"}

    class Honest(Flickers):
        deterministic = False

    assert aspects_that_fail(Honest()) == set()


def test_a_nan_that_is_swallowed_or_spread() -> None:
    def swallow(p, pass_, a, b, result):
        return result.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf"))

    def spread(p, pass_, a, b, result):
        return result + 0 * a.sum()

    assert aspects_that_fail(Broken(swallow)) == {"nonfinite"}
    assert "nonfinite" in aspects_that_fail(Broken(spread))


class OfPytorch(Broken):
    """A kernel of PyTorch's, as far as the check can tell."""

    from_pytorch = True


def test_what_pytorch_does_not_promise_of_its_kernels_is_reported_and_no_failure() -> None:
    def nan_for_inf(p, pass_, a, b, result):
        return torch.where(result.isinf(), float("nan"), result)

    (result,) = check_problem(OfPytorch(nan_for_inf), TEXT, "forward", aspects=["nonfinite"])
    assert result.status == "differs"
    assert "inf in input: 12 NaN and 0 infinite where the reference has 0 NaN and 12 infinite" in result.message
    (result,) = check_problem(Broken(nan_for_inf), TEXT, "forward", aspects=["nonfinite"])
    assert result.status == "failed"
    report = check_backend(OfPytorch(nan_for_inf), [TEXT], outputs=["forward"])
    assert report.ok
    assert [r.aspect for r in report.differences] == ["nonfinite"]
    assert "1 differ in what PyTorch does not promise" in str(report)


def test_rounding_of_pytorchs_low_precision_sums_is_reported_and_that_of_any_other_fails() -> None:
    def rough(p, pass_, a, b, result):
        return result.mul_(2).round_().div_(2)

    class Low(OfPytorch):
        def arithmetic(self, problem, pass_, device):
            return "low-precision accumulation" if problem.dtype is torch.bfloat16 else "direct"

    class Ours(Low):
        from_pytorch = False

    text = "mb1ic1iw9oc2kw3"
    for backend, dtype, status in (
        (Low(rough), "bfloat16", "differs"),
        (Low(rough), "float32", "failed"),
        (Ours(rough), "bfloat16", "failed"),
    ):
        (result,) = check_problem(backend, f"{text} {dtype}", "forward", aspects=["bound"])
        assert result.status == status
    assert "exact" in aspects_that_fail(Low(lambda p, pass_, a, b, result: off_by_one(result)), text=f"{text} bfloat16")


def test_passes_that_are_each_plausible_but_not_one_form() -> None:
    def flipped(p, pass_, a, b, result):
        return result.flip(-1).contiguous() if pass_ == "grad_weight" else result

    assert {"exact", "adjoint"} <= aspects_that_fail(Broken(flipped), "grad_weight")


def test_strides_that_are_ignored() -> None:
    class Careless(ReferenceBackend):
        layouts = ("strided",)

        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)
            return lambda a, *rest: kernel(a.as_strided(a.shape, torch.empty(a.shape).stride()), *rest)

    assert "layouts" in aspects_that_fail(Careless())

    class Declares(Careless):
        layouts = ("contiguous",)

    assert aspects_that_fail(Declares()) == set()


def test_a_result_in_another_layout_or_dtype() -> None:
    def transposed(p, pass_, a, b, result):
        return result.transpose(2, 3).contiguous().transpose(2, 3)

    assert "exact" in aspects_that_fail(Broken(transposed))
    assert "exact" in aspects_that_fail(Broken(lambda p, pass_, a, b, result: result.double()))


def test_a_wrong_bias_and_a_wrong_sweep() -> None:
    class Doubles(Im2colBackend):
        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)
            return lambda a, b, bias, *rest: kernel(a, b, None if bias is None else bias * 2, *rest)

    assert aspects_that_fail(Doubles()) == {"bias"}

    class Sweeps(Im2colBackend):
        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)

            def sweep(*args):
                grad_weight, grad_bias = kernel(*args)
                return off_by_one(grad_weight), grad_bias

            return sweep if len(outputs) > 1 else kernel

    assert aspects_that_fail(Sweeps(), "grad_weight") == {"sweeps"}
    assert aspects_that_fail(Sweeps(), "grad_bias") == set()


def test_a_bias_gradient_is_held_to_the_declared_sums() -> None:
    class Coarse(Im2colBackend):
        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)

            def sweep(grad_output, *rest):
                grad_weight, _ = kernel(grad_output, *rest)
                terms = grad_output.transpose(0, 1).flatten(1)
                total = torch.zeros(problem.out_channels, dtype=problem.dtype)
                for i in range(terms.shape[1]):
                    total += terms[:, i]
                return grad_weight, total

            return sweep if len(outputs) > 1 else kernel

    class Declared(Coarse):
        def arithmetic(self, problem, pass_, device):
            return "low-precision accumulation"

    text = "mb4ic2iw40oc4kw3 bf16"
    assert aspects_that_fail(Coarse(), "grad_bias", text) == {"sweeps"}
    assert aspects_that_fail(Declared(), "grad_bias", text) == set()


def test_more_memory_than_declared() -> None:
    text = "mb4ic16ih20oc4kh3ph1"

    class Modest(Im2colBackend):
        def workspace(self, problem, outputs):
            return 0

    class Leaves(Im2colBackend):
        def bind(self, problem, outputs):
            kernel = super().bind(problem, outputs)
            return lambda a, b, bias, workspace: kernel(a, b, bias, None)  # and allocates its own

    for backend in (Modest(), Leaves()):
        failed = [r for r in check_problem(backend, text, "forward") if r.status == "failed"]
        assert [r.aspect for r in failed] == ["workspace"]
        assert failed[0].worst > failed[0].bound
    assert aspects_that_fail(Im2colBackend(), text=text) == set()


def test_what_a_backend_raises_is_its_failure() -> None:
    def breaks(p, pass_, a, b, result):
        raise RuntimeError("no such kernel")

    results = check_problem(Broken(breaks), TEXT, "forward")
    assert all(r.status == "failed" for r in results if r.aspect in ("exact", "memory", "bound"))
    assert "RuntimeError: no such kernel" in results[0].message


def test_a_transform_is_held_to_its_norm_and_not_to_exactness() -> None:
    def noisy(p, pass_, a, b, result):
        noise = torch.linspace(-1, 1, result.numel()).view(result.shape)
        return result + noise * 2**-20 * result.abs().amax()

    class Transform(Broken):
        def arithmetic(self, problem, pass_, device):
            return "transform"

    assert {"exact", "bound"} <= aspects_that_fail(Broken(noisy))
    assert not aspects_that_fail(Transform(noisy)) & {"exact", "bound"}
    assert "exact" in aspects_that_fail(Transform(lambda p, q, a, b, result: off_by_one(result)))


# ---- the parts ---------------------------------------------------------------------------------


def test_the_bound_is_not_wide() -> None:
    p = ConvProblem.parse("mb1ic64iw4oc1kw4 f32")
    length = reduction_length(p, "forward")
    exact, size = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    direct = error_bound("direct", torch.float32, length, exact, size)
    assert float(direct) == pytest.approx((length + 1) * 2**-24, rel=1e-3)
    low = error_bound("low-precision accumulation", torch.bfloat16, length, exact, size)
    assert float(low) == pytest.approx(256 * 2**-8 + 2**-8 * 2, rel=1e-2)
    assert (
        error_bound("direct", torch.float64, length, exact, size)
        < direct
        < error_bound("tf32", torch.float32, length, exact, size)
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "complex64"])
@pytest.mark.parametrize("text", ["mb1ic1iw3oc1kw2", "mb4ic32ih16oc8kh3ph1", "g8mb8ic8ih24oc8kh3"])
def test_integer_operands_are_exact_and_their_results_mostly_not_zero(text: str, dtype: str) -> None:
    p = ConvProblem.parse(f"{text} {dtype}")
    for passes in (*((q,) for q in PASSES), PASSES):
        operands = integer_operands(p, passes, seed=3)
        assert all(is_exact(p, q, operands) for q in passes)
    for q in PASSES:
        operands = integer_operands(p, (q,), seed=3)
        a, b = (operands[slot] for slot in OPERANDS[q])
        result = ReferenceBackend().bind(p, (q,))(a, b)
        read = structural(p, q)
        assert int((result != 0)[read].sum()) * 2 >= int(read.sum())


def test_a_mostly_zero_output_does_not_count() -> None:
    p = ConvProblem.parse(TEXT)
    case = Case(Im2colBackend(), p, "forward", torch.device("cpu"))
    operands = {slot: torch.zeros_like(t) for slot, t in case.integers().items()}
    with pytest.raises(Skipped, match="mostly zero"):
        case.compare(torch.zeros(p.output_shape), operands)
    with pytest.raises(Failed, match="differ"):
        case.compare(torch.ones(p.output_shape), operands)


def test_watching_memory() -> None:
    with PeakMemory() as watch:
        a = torch.zeros(1000)
        for _ in range(3):
            torch.ones(500)
        b = a + 1
    assert watch.peak == 4 * 2000
    assert b.numel() == 1000
    with Poison() as poison:
        fresh = torch.empty(10)
        assert fresh.isnan().all()
        assert torch.empty(4, dtype=torch.int32).eq(2**31 - 1).all()
    assert not poison.overstepped()
    fresh.as_strided((1,), (1,), fresh.storage_offset() + 10).fill_(0)
    assert poison.overstepped()
    guard = guarded_copy(torch.ones(3, 4, 5).transpose(0, 2), shift=1)
    assert guard.tensor.shape == (5, 4, 3)
    assert guard.tensor.data_ptr() % 8 == 4
    assert not guard.overstepped()


# ---- the report --------------------------------------------------------------------------------


def test_a_report_names_the_first_failure_and_how_to_repeat_it() -> None:
    report = check_backend(Broken(wrong_if(lambda p: p.batch == 1)), ["mb2ic2iw5oc2kw3", "mb1ic2iw5oc2kw3 f64"], seed=5)
    assert not report.ok
    assert report.first_failure is not None
    command = 'convgrad check "g1mb1ic2iw5oc2ow3kw3sw1pw0dw0 float64" --backend broken --output forward --seed 5'
    assert report.first_failure.command == command
    assert command in str(report)
    assert "1 of 6 elements differ, the first at (0, 0, 0)" in str(report)
    with pytest.raises(AssertionError, match="convgrad check"):
        report.raise_if_failed()


def test_nothing_checked_is_not_a_success() -> None:
    report = check_backend(Im2colBackend(), [ConvProblem.parse("ic2iw5oc2kw3").replace(dtype=torch.float8_e4m3fn)])
    assert not report.ok
    assert "nothing could be checked" in str(report)
    assert "without scales" in str(report)
    assert not check_backend(Im2colBackend(), ["mb0ic2iw5oc2kw3"]).ok


def test_time_and_progress() -> None:
    seen: list[tuple[int, int, str]] = []
    report = check_backend(
        "reference", ["ic2iw5oc2kw3", "ic3iw5oc2kw3"], progress=lambda i, n, p: seen.append((i, n, str(p))), repeats=2
    )
    assert report.ok
    assert report.finished
    assert [(i, n) for i, n, _ in seen] == [(0, 2), (1, 2)]
    assert not check_backend("reference", ["ic2iw5oc2kw3"], seconds=-1.0).finished


def test_outputs_and_aspects() -> None:
    assert outputs_of(Im2colBackend()) == ("forward", "grad_input", "grad_weight", "grad_bias")
    results = check_problem("reference", TEXT, "forward")
    assert [r.aspect for r in results] == list(ASPECTS)
    chosen = ("bound", "exact")
    assert [r.aspect for r in check_problem("reference", TEXT, "forward", aspects=chosen)] == list(chosen)
    assert {r.aspect for r in check_backend("reference", [TEXT], aspects=chosen).results} == set(chosen)
    assert isinstance(CheckReport("x", tuple(results)).results[0], CheckResult)


@pytest.mark.parametrize("name", ["im2col", "aten", "reference"])
def test_a_default_device_of_the_users_changes_nothing(name: str) -> None:
    structural.cache_clear()
    with torch.device("meta"):
        assert check_backend(name, ["mb1g4ic4ih5oc4kh3", "mb1g4ic4ih5oc4kh3 bfloat16 channels_last"]).ok
        assert convgrad.explain("mb1g4ic4ih5oc4kh3", measure=True).chosen()
