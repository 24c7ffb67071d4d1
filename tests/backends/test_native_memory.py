"""What the compiled CPU kernels read: nothing outside the operands, no padding, every infinity and NaN."""

from __future__ import annotations

import ctypes
import platform
import sys
import timeit
from collections.abc import Callable
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convgrad.backends import _native_library as library
from convgrad.backends import native
from convgrad.check.guards import Guarded
from convgrad.problem import ConvProblem, Output

from .native_cases import BACKEND, any_problem, everything, operands, reference

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


FEW = (torch.float32, torch.bfloat16)


@settings(max_examples=60)
@given(p=any_problem(FEW))
def test_nothing_outside_the_operands_is_read(p: ConvProblem) -> None:
    tensors = [Guarded(x).tensor for x in operands(p, 1)]
    for name, result in everything(p, *tensors):
        assert not result.isnan().any(), name


class Plan(ctypes.Structure):
    """The first members of ``KeptPlan``."""

    _fields_ = (("name", ctypes.c_char_p), ("bytes", ctypes.c_int64))


@pytest.mark.parametrize("layout", ["", "channels_last"])
@pytest.mark.parametrize(
    "text", ["ic2048ih1iw65536oc4096oh1ow65536kh1kw1", "g16mb4ic768ih1iw12000oc768oh1ow12001kh1kw128ph0pw64"]
)
def test_sums_of_large_weights_take_no_memory_for_every_thread(text: str, layout: str) -> None:
    """A layer of a language model, and one of wav2vec 2.0: 128 and 32 segments of the rows had sums of their own."""
    p = ConvProblem.parse(f"{text} {layout}")
    torch.set_num_threads(64)
    _, plan = library.make_plan(native._packed(p, ("grad_weight",)))
    assert Plan.from_buffer_copy(plan).bytes < 24 * p.dtype.itemsize * prod(p.weight_shape)


class FloatingPoint(ctypes.Structure):
    """glibc's ``fenv_t`` on x86-64."""

    _fields_ = (("x87", ctypes.c_int32 * 7), ("mxcsr", ctypes.c_uint32))


def met_subnormals() -> bool:
    """Whether an instruction of this thread had a subnormal operand since the last call."""
    c, state, flag = ctypes.CDLL("libm.so.6"), FloatingPoint(), 2
    c.fegetenv(ctypes.byref(state))
    met = state.mxcsr & flag
    state.mxcsr &= ~flag
    c.fesetenv(ctypes.byref(state))
    return bool(met)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="another processor or C library")
@settings(max_examples=60)
@given(p=any_problem((torch.float32,)))
def test_nothing_is_computed_with_what_scratch_memory_held(p: ConvProblem) -> None:
    """Not even for results that are dropped: an instruction with a subnormal operand takes Intel's processors a
    hundred cycles."""
    x, w, g = operands(p, 1)
    before = ConvProblem.parse("mb1ic8oc8ih48kh3ph1")
    subnormals, ones = torch.full(before.input_shape, 1e-40), torch.ones(before.weight_shape)
    torch.set_num_threads(1)
    passes: dict[tuple[Output, ...], tuple[Tensor, ...]] = dict.fromkeys(BACKEND.sweeps, (g, x, w))
    passes |= {("forward",): (x, w), ("grad_input",): (g, w), ("grad_weight",): (g, x)}
    for outputs, tensors in passes.items():
        kernel = BACKEND.bind(p, outputs)
        BACKEND.bind(before, ("forward",))(subnormals, ones)
        met_subnormals()
        kernel(*tensors)
        assert not met_subnormals(), outputs


def with_limits(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """What a product gives whose operands hold infinities and NaNs, from how many terms of each kind a sum has.
    Padding is no position of a tensor and takes part in no term."""

    def count(a: Tensor, b: Tensor) -> Tensor:
        none = torch.zeros((), dtype=torch.float64)
        return product(a.double(), b.double()).round() if a.any() and b.any() else none

    inf, finite = torch.inf, a.isfinite()
    small_up, small_down = (a > 0) & finite, (a < 0) & finite
    up = count(a == inf, b > 0) + count(a == -inf, b < 0) + count(small_up, b == inf) + count(small_down, b == -inf)
    down = count(a == inf, b < 0) + count(a == -inf, b > 0) + count(small_up, b == -inf) + count(small_down, b == inf)
    undefined = count(a.isnan(), torch.ones_like(b)) + count(torch.ones_like(a), b.isnan())
    undefined = undefined + count(a.isinf(), b == 0) + count(a == 0, b.isinf())
    result = product(*(x.double().nan_to_num(0, 0, 0) for x in (a, b)))
    result = result.masked_fill(up > 0, inf).masked_fill(down > 0, -inf)
    return result.masked_fill((undefined > 0) | ((up > 0) & (down > 0)), torch.nan)


@settings(max_examples=40)
@given(p=any_problem(), threads=st.sampled_from([1, 3]), data=st.data())
def test_infinity_and_nan_reach_what_they_are_multiplied_into(
    p: ConvProblem, threads: int, data: st.DataObject
) -> None:
    tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
    for x in tensors:
        places = st.tuples(*(st.integers(0, size - 1) for size in x.shape))
        for place in data.draw(st.lists(places, max_size=2)):
            x[place] = data.draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    x, w, g = tensors
    none = [torch.zeros_like(t) for t in tensors]
    expected = {
        "forward": with_limits(lambda a, b: reference(p, a, b, none[2], torch.float64)["forward"], x, w),
        "grad_input": with_limits(lambda a, b: reference(p, none[0], b, a, torch.float64)["grad_input"], g, w),
        "grad_weight": with_limits(lambda a, b: reference(p, b, none[1], a, torch.float64)["grad_weight"], g, x),
        "grad_bias": g.double().sum((0, *range(2, p.ndim + 2))),
    }
    torch.set_num_threads(threads)
    for name, result in everything(p, *tensors):
        torch.testing.assert_close(result, expected[name].to(p.dtype), rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("layout", ["ih9", "ih9 channels_last", "ih58"])
def test_infinity_does_not_meet_the_padding(channels: int, layout: str) -> None:
    p = ConvProblem.parse(f"mb2g8ic{8 * channels}oc{8 * channels}kh3ph1{layout}")
    x, w, g = (torch.ones_like(t) for t in operands(p))
    w[..., 0, 0] = torch.inf  # reads what lies above and to the left
    y = BACKEND.bind(p, ("forward",))(x, w)
    assert y[..., 0, :].isfinite().all()
    assert y[..., 0].isfinite().all()
    assert y[..., 1:, 1:].isposinf().all()
    assert not BACKEND.bind(p, ("grad_input",))(g, w).isnan().any()
    g[..., 0, 0] = torch.inf
    sums = BACKEND.bind(p, ("grad_weight",))(g, x)
    assert not sums.isnan().any()
    assert sums[..., 0, :].isfinite().all()
    assert sums[..., 0].isfinite().all()
    assert sums[..., 1:, 1:].isposinf().all()


@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("spoilt", ["input", "grad_output"])
def test_one_image_of_nan_makes_no_sum_slow(spoilt: str, layout: str) -> None:
    """As one image whose loss overflows does: it took 600 times as long."""
    p = ConvProblem.parse(f"mb16g2ic32ih28oc32kh3ph1{layout}")
    x, _, g = operands(p)
    torch.set_num_threads(1)
    kernel = BACKEND.bind(p, ("grad_weight",))

    def seconds() -> float:
        return min(timeit.repeat(lambda: kernel(g, x), number=1, repeat=5))

    finite = seconds()
    (x if spoilt == "input" else g)[-1] = torch.nan
    assert kernel(g, x).isnan().all()
    assert seconds() < 100 * finite
