"""The suite finds a backend that is wrong for some problems only, and blames none that is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from convgrad.backends.aten import AtenBackend
from convgrad.check import PROPERTIES, check_problem, default_problems, outputs_of
from convgrad.check.operands import structural
from convgrad.diagnostics import explain_problem
from convgrad.problem import PASSES, ConvProblem, Outputs
from convgrad.testing import check_backend

from .broken import TEXT, Broken, wrong_if

#: What problems have for which a kernel may be wrong.
CONDITIONS: dict[str, Callable[[ConvProblem], bool]] = {
    "n1": lambda p: p.batch == 1,
    "non-square": lambda p: len(set(p.input_size)) > 1,
    "width": lambda p: p.input_size[-1] % 8 != 0,
    "stride2": lambda p: 2 in p.stride,
    "stride3": lambda p: 3 in p.stride,
    "dilated": lambda p: max(p.dilation) > 1,
    "float64": lambda p: p.dtype == torch.float64,
    "bfloat16": lambda p: p.dtype == torch.bfloat16,
    "float16": lambda p: p.dtype == torch.float16,
    "channels_last": lambda p: p.channels_last,
    "multiplier": lambda p: p.depthwise and p.out_channels > p.in_channels,
    "grouped": lambda p: 1 < p.groups < p.in_channels,
    "pointwise": lambda p: p.pointwise,
    "1d": lambda p: p.ndim == 1,
    "3d-groups": lambda p: p.ndim == 3 and p.groups > 1,
    "transposed": lambda p: p.transposed,
    "asymmetric": lambda p: not p.symmetric,
    "even-kernel": lambda p: any(k % 2 == 0 for k in p.kernel_size),
    "single-channel": lambda p: p.in_channels == 1 and p.out_channels == 1,
    "crop": lambda p: any(low < 0 for low, _ in p.padding),
}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_a_kernel_wrong_for_some_problems_only_is_caught(condition: Callable[[ConvProblem], bool]) -> None:
    wrong = next(p for p in default_problems() if condition(p))
    right = next(p for p in default_problems() if not condition(p))
    report = check_backend(Broken(wrong_if(condition)), [right, wrong], properties="exact")
    assert {(r.problem, r.output, r.worst) for r in report.failures} == {(wrong, pass_, 1) for pass_ in PASSES}
    assert {(r.problem, r.output) for r in report.results if r.status == "passed"} == {(right, p) for p in PASSES}


def test_a_backend_that_found_itself_wrong_has_failed() -> None:
    """PyTorch's kernels computed from then on, and everything passed."""

    class Banned(Broken):
        checks_itself = True
        wrong = False

        def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
            return ["its kernel is wrong"] if self.wrong else super().reasons_against(problem, outputs, device)

        def bind(self, problem: ConvProblem, outputs: Outputs) -> Callable[..., Tensor]:
            self.wrong = True
            return super().bind(problem, outputs)

    report = check_backend(Banned(lambda p, pass_, a, b, result: result), [TEXT], outputs="forward")
    assert [(r.property_name, r.message) for r in report.failures] == [
        ("usable", "it found itself wrong: its kernel is wrong")
    ]


def test_what_a_backend_raises_is_its_failure() -> None:
    def breaks(p, pass_, a, b, result):
        raise RuntimeError("no such kernel")

    results = check_problem(Broken(breaks), TEXT, "forward")
    assert [r.property_name for r in results if r.status == "failed"] == ["exact"]
    assert all("it fails as exact does" in r.message for r in results if r.property_name in ("memory", "bound"))
    assert "RuntimeError: no such kernel" in results[0].message


def test_progress_before_each_call() -> None:
    """So that whoever waits knows one slow call from many that are not, as in Triton's interpreter."""
    said: list[str] = []
    calls: list[int] = []

    def count(p: ConvProblem, pass_: object, a: torch.Tensor, b: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        calls.append(len(said))
        return result

    check_problem(Broken(count), TEXT, "forward", properties=["layouts"], progress=said.append)
    assert len(calls) > 10
    assert len({*calls}) == len(calls)


def test_time_and_progress() -> None:
    seen: list[tuple[int, int, str]] = []
    report = check_backend(
        "reference", ["ic2iw5oc2kw3", "ic3iw5oc2kw3"], progress=lambda i, n, p: seen.append((i, n, str(p))), repeats=2
    )
    assert report.ok
    assert report.finished
    assert [(i, n) for i, n, _ in seen] == [(0, 2), (1, 2)]
    assert not check_backend("reference", ["ic2iw5oc2kw3"], seconds=-1.0).finished


def test_outputs_and_properties() -> None:
    assert outputs_of(AtenBackend()) == ("forward", "grad_input", "grad_weight", "grad_bias")
    results = check_problem("reference", TEXT, "forward")
    assert [r.property_name for r in results] == list(PROPERTIES)
    chosen = ("bound", "exact")
    assert [r.property_name for r in check_problem("reference", TEXT, "forward", properties=chosen)] == list(chosen)
    assert {r.property_name for r in check_backend("reference", [TEXT], properties=chosen).results} == set(chosen)
    with pytest.raises(ValueError, match="there is no device cuda:99 here"):
        check_problem("reference", "ic1iw3oc1kw1", "forward", device="cuda:99")
    with pytest.raises(ValueError, match="unknown property 'exac'; properties are exact, again"):
        check_problem("reference", TEXT, "forward", properties=["exac"])
    with pytest.raises(ValueError, match="unknown output 'fwd'; outputs are forward, "):
        check_problem("reference", TEXT, "fwd")  # pyright: ignore[reportArgumentType]


def test_a_default_device_of_the_users_changes_nothing() -> None:
    structural.cache_clear()
    with torch.device("meta"):
        for name in ("im2col", "aten", "reference"):
            assert check_backend(name, ["mb1g4ic4ih5oc4kh3", "mb1g4ic4ih5oc4kh3 bfloat16 channels_last"], repeats=2).ok
        assert explain_problem(ConvProblem.parse("mb1g4ic4ih5oc4kh3"), measure=True).chosen()


def test_a_result_of_another_dtype_is_one_failure_and_not_one_of_every_property() -> None:
    wrong = Broken(lambda p, pass_, a, b, result: result.double())
    first, *others = check_problem(wrong, TEXT, "forward")
    assert (first.property_name, first.status) == ("exact", "failed")
    assert "the result has dtype torch.float64" in first.message
    assert {r.property_name for r in others} == {*PROPERTIES} - {"exact"}
    assert "failed" not in {r.status for r in others}
    assert "it fails as exact does" in {r.message for r in others}
