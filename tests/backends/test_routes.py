"""Routes through ATen: that each goes where it says, and what the conformance suite's sample does not hold."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from convgrad.backends import Backend
from convgrad.engine.registry import get_backend
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output, Pass, Slot
from convgrad.testing import check_problem, default_problems, outputs_of, problems

CPU = torch.device("cpu")
HALF = [p for p in default_problems() if p.dtype in (torch.bfloat16, torch.float16)]


class Called(TorchDispatchMode):
    """The names and the tensors of every call of ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.__name__.split(".")[0], [a for a in args if isinstance(a, Tensor) and a.dim() > 1]))
        return func(*args, **(kwargs or {}))


def operands_of(problem: ConvProblem, slots: Iterable[Slot]) -> list[Tensor]:
    return [
        torch.ones(problem.shape_of(s), dtype=problem.dtype).contiguous(memory_format=problem.memory_format)
        for s in slots
    ]


def called(backend: Backend, problem: ConvProblem, outputs: tuple[Output, ...]) -> list[list[Tensor]]:
    slots: Any = OPERANDS[outputs[0]] if len(outputs) == 1 else ("grad_output", "input", "weight")
    operands = operands_of(problem, slots)
    kernel = backend.bind(problem, outputs)
    with Called() as seen:
        kernel(*operands)
    return [tensors for name, tensors in seen.calls if "convolution" in name]


GRADIENTS: tuple[Output, ...] = ("grad_input", "grad_weight")


@pytest.mark.parametrize("outputs", [("forward",), ("grad_input",), ("grad_weight",), GRADIENTS], ids="+".join)
@pytest.mark.parametrize(
    ("route", "text"),
    [
        *(("channels_last", text) for text in ("mb2ic4iw9oc6kw3", "mb2ic4ih7oc6kh3", "mb2ic4id5oc6kd3")),
        *(("float32", f"mb2ic4ih7oc6kh3 {dtype} channels_last") for dtype in ("float16", "bfloat16")),
    ],
)
def test_a_route_calls_aten_once_as_it_says(route: str, text: str, outputs: tuple[Output, ...]) -> None:
    [tensors] = called(get_backend(f"aten:{route}"), ConvProblem.parse(text), outputs)
    assert {t.dtype for t in tensors} == {torch.float32}
    for t in tensors:
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}[t.dim()]
        assert t.is_contiguous(memory_format=layout), (t.shape, t.stride())
        assert not t.is_contiguous()


@pytest.mark.parametrize("output", outputs_of(get_backend("aten:float32")))
def test_float32_conforms_for_16_bits(output: Output) -> None:
    """The sample of the conformance suite is nearly all float32, which this route refuses."""
    results = [r for p in HALF[::6] for r in check_problem("aten:float32", p, output, repeats=2)]
    assert not [r for r in results if r.status == "failed"], "\n".join(map(str, results))
    assert sum(r.status == "passed" for r in results) >= len(HALF[::6])


@given(problems(dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16)))
@settings(max_examples=60)
def test_any_problem_as_the_reference_computes_it(problem: ConvProblem) -> None:
    name = "aten:channels_last" if problem.dtype.itemsize > 2 else "aten:float32"
    if problem.channels_last and name == "aten:channels_last":
        return
    for pass_ in PASSES:
        [result] = check_problem(name, problem, pass_, properties=["exact"])
        assert result.status in ("passed", "skipped"), result


@pytest.mark.parametrize("dtype", ["", " float64", " bfloat16"])
@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("pass_", PASSES)
def test_matmul_copies_nothing(pass_: Pass, layout: str, dtype: str) -> None:
    """Its one product, or one for each image, reads the tensors as they lie."""
    problem = ConvProblem.parse(f"mb3ic4ih5oc6kh1{layout}{dtype}")
    [result] = check_problem("aten:matmul", problem, pass_, properties=["exact"])
    assert result.status == "passed", result
    backend, a, b = get_backend("aten:matmul"), *operands_of(problem, OPERANDS[pass_])
    with Called() as seen:
        backend.bind(problem, (pass_,))(a, b)
    assert not {name for name, _ in seen.calls} & {"clone", "copy_", "_to_copy", "_unsafe_view"}


def test_matmul_in_16_bits_is_refused_for_float32() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    for name in ("aten:matmul", "im2col"):
        [reason] = get_backend(name).reasons_against(ConvProblem.parse("ic2ih4oc2kh1"), ("forward",), CPU)
        assert "in 16 bits" in reason
    doubles = ConvProblem.parse("ic2ih4oc2kh1 float64")
    assert get_backend("im2col").reasons_against(doubles, ("forward",), CPU) == []


def test_float32_sums_in_float32() -> None:
    """ATen's own 16-bit grad_weight may keep partial sums in 16 bits; this one is the exact sum, rounded once."""
    problem = ConvProblem.parse("mb8ic2ih24oc2kh1 float16")
    x, g = (torch.full(problem.shape_of(s), 0.1, dtype=torch.float16) for s in ("input", "grad_output"))
    got = get_backend("aten:float32").bind(problem, ("grad_weight",))(g, x)
    exact = x[0, 0, 0, 0].double() ** 2 * (8 * 24 * 24)
    assert torch.equal(got, exact.to(torch.float16).expand_as(got))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("aten:float32", "ic2ih4oc2kh3", "torch.float16 and torch.bfloat16 in torch.float32, got torch.float32"),
        ("aten:channels_last", "ic2ih4oc2kh3 channels_last", "layout is channels_last as it is"),
        ("aten:channels_last", "ic2ih4oc2kh3 bool", "no convolution for torch.bool"),
        ("aten:matmul", "ic2ih4oc2kh3", "pointwise convolutions without groups, stride and padding"),
        ("aten:matmul", "g2ic2ih4oc2kh1", "pointwise convolutions without groups, stride and padding"),
        ("aten:matmul", "ic2ih4oc2kh1 complex64", "floating-point numbers on a CPU, got torch.complex64"),
        ("aten:patches", "mb2ic3ih8oc4kh4sh2", "stride = kernel"),
        ("aten:patches", "mb2ic3ih8oc4kh4sh4ph2", "without padding"),
        ("aten:patches", "mb2ic4g2ih8oc4kh4sh4", "groups"),
        ("aten:patches", "mb2ic3ih8oc4kh1", "more than one element"),
        ("aten:patches", "mb2ic3ih9oc4kh2sh2dh1", "stride = kernel"),
        ("aten:patches", "mb2ic3ih8oc4kh4sh4 complex64", "got torch.complex64"),
    ],
)
def test_reasons(name: str, text: str, why: str) -> None:
    problem = ConvProblem.parse(text.removesuffix(" bool"))
    problem = problem.replace(dtype=torch.bool) if text.endswith(" bool") else problem
    [reason] = get_backend(name).reasons_against(problem, ("forward",), CPU)
    assert why in reason
