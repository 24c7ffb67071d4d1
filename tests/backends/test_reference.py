"""The definition against two things that share no line with it: a loop over scalars, and ATen in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from convgrad.backends.reference import ReferenceBackend
from convgrad.check.operands import integer_operands
from convgrad.problem import OPERANDS, PASSES, RESULT, ConvProblem, Pass, Slot
from convgrad.testing import problems

REFERENCE = ReferenceBackend()


def scalar_loop(p: ConvProblem, pass_: Pass, slots: dict[str, Any]) -> Tensor:
    """The trilinear form, one product at a time, in Python's own numbers."""
    result = torch.zeros(p.shape_of(RESULT[pass_]), dtype=torch.float64)
    per_group_in, per_group_out = p.in_channels // p.groups, p.out_channels // p.groups
    ranges = (p.batch, p.out_channels, per_group_in, *p.output_size, *p.kernel_size)
    for n, o, c, *rest in product(*(range(r) for r in ranges)):
        out, k = rest[: p.ndim], rest[p.ndim :]
        at = [
            o_ * s + k_ * d - low
            for o_, s, k_, d, (low, _) in zip(out, p.stride, k, p.dilation, p.padding, strict=True)
        ]
        if not all(0 <= a < size for a, size in zip(at, p.input_size, strict=True)):
            continue
        where: dict[Slot, tuple[int, ...]] = {
            "input": (n, o // per_group_out * per_group_in + c, *at),
            "weight": (o, c, *k),
            "grad_output": (n, o, *out),
        }
        a, b = OPERANDS[pass_]
        result[where[RESULT[pass_]]] += slots[a][where[a]].item() * slots[b][where[b]].item()
    return result


@given(problems(dtypes=(torch.float64,), largest=4))
@settings(max_examples=60)
def test_any_small_problem_against_a_loop_over_scalars(p: ConvProblem) -> None:
    p = p.replace(memory_format=torch.contiguous_format)
    slots = integer_operands(p, PASSES, 0)
    products = p.flops // 2
    for pass_ in PASSES:
        a, b = OPERANDS[pass_]
        if products < 5000:
            assert torch.equal(REFERENCE.bind(p, (pass_,))(slots[a], slots[b]), scalar_loop(p, pass_, slots))


@given(problems(dtypes=(torch.float64,)))
@settings(max_examples=300)
def test_against_aten(p: ConvProblem) -> None:
    slots = integer_operands(p, PASSES, 0)
    lows, highs = zip(*p.padding, strict=True)
    x, w = slots["input"].requires_grad_(), slots["weight"].requires_grad_()
    # What ATen has no arguments for is made explicit: one more zero all round, then the crop.
    widest = max(0, *lows, *highs)
    wide = torch.nn.functional.pad(x, [widest] * 2 * p.ndim)
    for dim, (low, high) in enumerate(p.padding):
        size = p.input_size[dim] + low + high
        wide = wide.narrow(dim + 2, widest - low, size)
    y = torch.convolution(wide, w, None, p.stride, [0] * p.ndim, p.dilation, False, [0] * p.ndim, p.groups)
    grad_input, grad_weight = torch.autograd.grad(y, (x, w), slots["grad_output"])
    x, w = x.detach(), w.detach()
    assert torch.equal(REFERENCE.bind(p, ("forward",))(x, w), y.detach())
    assert torch.equal(REFERENCE.bind(p, ("grad_input",))(slots["grad_output"], w), grad_input)
    assert torch.equal(REFERENCE.bind(p, ("grad_weight",))(slots["grad_output"], x), grad_weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pass_", PASSES)
def test_it_sums_in_float64_and_rounds_once(dtype: torch.dtype, pass_: Pass) -> None:
    p = ConvProblem.parse("mb4ic8ih9oc6kh3ph1").replace(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(p.shape_of(s), generator=generator).to(dtype) for s in OPERANDS[pass_])
    got = REFERENCE.bind(p, (pass_,))(a, b)
    assert got.dtype == dtype
    exact = REFERENCE.bind(p.replace(dtype=torch.float64), (pass_,))(a.double(), b.double())
    assert torch.equal(got, exact.to(dtype))


def test_complex_numbers_are_not_conjugated() -> None:
    p = ConvProblem.parse("mb2g2ic4iw7oc6kw3pw1sw2 complex64")
    generator = torch.Generator().manual_seed(2)

    def draw(slot: Slot) -> Tensor:
        parts = torch.randint(-3, 4, (*p.shape_of(slot), 2), generator=generator)
        return torch.view_as_complex(parts.to(torch.float32))

    slots: dict[Slot, Tensor] = {"input": draw("input"), "weight": draw("weight"), "grad_output": draw("grad_output")}
    real = p.replace(dtype=torch.float32)
    for pass_ in PASSES:
        a, b = (slots[s] for s in OPERANDS[pass_])
        rr, ii, ri, ir = (
            REFERENCE.bind(real, (pass_,))(u, v)
            for u, v in ((a.real, b.real), (a.imag, b.imag), (a.real, b.imag), (a.imag, b.real))
        )
        assert torch.equal(REFERENCE.bind(p, (pass_,))(a, b), torch.complex(rr - ii, ri + ir))


def test_integers_wrap_as_their_dtype_does() -> None:
    p = ConvProblem.parse("mb1ic4iw3oc1kw3 int8")
    ones = torch.full((1, 4, 3), 16, dtype=torch.int8)
    got = REFERENCE.bind(p, ("forward",))(ones, torch.full((1, 4, 3), 3, dtype=torch.int8))
    assert got.item() == (12 * 48 + 128) % 256 - 128
