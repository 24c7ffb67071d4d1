"""The compiled CPU kernels: the conformance suite, every instruction set, borders, threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convgrad.backends import _native_library as library
from convgrad.backends.native import NativeBackend, use_instruction_set
from convgrad.engine.check import check_backend
from convgrad.problem import ConvProblem, Output, Pass, output_length

ROOT = Path(__file__).parents[2]
BACKEND = NativeBackend()
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


def problems(dtypes: tuple[torch.dtype, ...] = DTYPES) -> st.SearchStrategy[ConvProblem]:
    """Depthwise and small-group problems: borders wider than the image, crops, strides that leave rows unread."""

    # Groups, and input and output channels of each.
    few = st.sampled_from([2, 3, 4, 5, 8, 9, 16, 23, 40, 70])
    depthwise = st.tuples(few, st.just(1), st.sampled_from([1, 1, 1, 2, 3]))
    group = st.sampled_from([1, 2, 2, 3, 4, 4, 5, 8, 8, 11, 16])
    grouped = st.tuples(st.integers(1, 9), group, group)

    @st.composite
    def draw_one(draw: st.DrawFn) -> ConvProblem:
        ndim = draw(st.integers(1, 3))
        groups, inputs, outputs = draw(st.one_of(depthwise, grouped))
        longest = {1: 200, 2: 24, 3: 9}[ndim]
        dims = [draw(dimension(longest, {1: 12, 2: 8, 3: 4}[ndim])) for _ in range(ndim)]
        size, kernel, stride, padding, dilation, output = zip(*dims, strict=True)
        return ConvProblem(
            draw(st.integers(1, 5)),
            groups * inputs,
            groups * outputs,
            groups,
            size,
            kernel,
            stride,
            padding,
            dilation,
            output,
            dtype=draw(st.sampled_from(dtypes)),
            memory_format=FORMATS[ndim] if draw(st.booleans()) else torch.contiguous_format,
        )

    @st.composite
    def dimension(draw: st.DrawFn, longest: int, widest: int) -> tuple[object, ...]:
        kernel, stride, dilation = draw(st.integers(1, widest)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
        low, high = draw(st.integers(-2, 6)), draw(st.integers(-2, 6))
        least = max(1, dilation * (kernel - 1) + 1 - low - high)
        size = draw(st.integers(least, max(least, longest)))
        return size, kernel, stride, (low, high), dilation, output_length(size, kernel, stride, low, high, dilation)

    return draw_one()


def operands(p: ConvProblem, most: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Small integers, whose sums every dtype's accumulator holds exactly."""

    def fill(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-most, most + 1, shape).to(p.dtype).contiguous(memory_format=p.memory_format)

    return fill(p.input_shape), fill(p.weight_shape), fill(p.output_shape)


def reference(
    p: ConvProblem, input: Tensor, weight: Tensor, grad_output: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Everything in float64 by PyTorch, with the padding made explicit, and rounded."""
    x, w = input.double().requires_grad_(), weight.double().requires_grad_()
    pads = list(itertools.chain.from_iterable(reversed(p.padding)))
    padded = torch.nn.functional.pad(x, [max(v, 0) for v in pads])
    padded = torch.nn.functional.pad(padded, [min(v, 0) for v in pads])  # PyTorch crops before it pads
    y = torch.convolution(padded, w, None, p.stride, [0] * p.ndim, p.dilation, False, [0] * p.ndim, p.groups)
    grads = torch.autograd.grad(y, (x, w), grad_output.double())
    exact = {"forward": y.detach(), "grad_input": grads[0], "grad_weight": grads[1]}
    exact["grad_bias"] = grad_output.double().sum((0, *range(2, p.ndim + 2)))
    return {name: value.to(dtype or p.dtype) for name, value in exact.items()}


def everything(p: ConvProblem, input: Tensor, weight: Tensor, grad_output: Tensor) -> list[tuple[str, Tensor]]:
    """Every result, from single passes and from every sweep."""
    results: list[tuple[str, Tensor]] = [
        ("forward", BACKEND.run(p, "forward", input, weight)),
        ("grad_input", BACKEND.run(p, "grad_input", grad_output, weight)),
        ("grad_weight", BACKEND.run(p, "grad_weight", grad_output, input)),
    ]
    for sweep in BACKEND.sweeps:
        results += zip(sweep, BACKEND.sweep(p, sweep, grad_output, input, weight), strict=True)
    return results


@pytest.fixture(params=["x86-64-v4", "x86-64-v3", "baseline"])
def instruction_set(request: pytest.FixtureRequest):
    """Each instruction set that this build and this processor have."""
    before = library.instruction_set()
    try:
        use_instruction_set(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    use_instruction_set(before)


def test_conformance_native() -> None:
    report = check_backend(BACKEND, repeats=3)
    assert report.ok, str(report)


@settings(max_examples=150)
@given(p=problems(), threads=st.sampled_from([1, 2]))
def test_every_result_is_exact(p: ConvProblem, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name
            assert name == "grad_bias" or result.is_contiguous(memory_format=p.memory_format), name
    finally:
        torch.set_num_threads(before)


def test_every_instruction_set_is_exact(instruction_set: str) -> None:
    @settings(max_examples=60)
    @given(p=problems())
    def check(p: ConvProblem) -> None:
        tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), (instruction_set, name)

    check()


@pytest.mark.parametrize("pass_", ["forward", "grad_input"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_bias_is_added(pass_: str, layout: torch.memory_format, multiplier: int) -> None:
    p = ConvProblem(2, 11, 11 * multiplier, 11, (9, 8), (3, 3), (2, 1), ((1, 1),) * 2, (1, 1), (5, 8), has_bias=True)
    p = p.replace(memory_format=layout, origin="plain" if pass_ == "forward" else "transposed")
    tensors = operands(p)
    bias = torch.arange(float(p.shape_of(p.bias_slot)[1]))
    a = tensors[0] if pass_ == "forward" else tensors[2]
    result = BACKEND.run(p, pass_, a, tensors[1], bias)  # pyright: ignore[reportArgumentType]
    assert torch.equal(result, reference(p, *tensors)[pass_] + bias.view(-1, 1, 1))


@settings(max_examples=100)
@given(p=problems(), threads=st.sampled_from([1, 3]))
def test_the_bias_gradient_of_a_transposed_convolution_sums_the_input(p: ConvProblem, threads: int) -> None:
    x, w, g = operands(p, 1 if p.dtype.itemsize == 2 else 3)
    expected = reference(p, x, w, g)
    expected["grad_bias"] = x.double().sum((0, *range(2, p.ndim + 2))).to(p.dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for sweep in BACKEND.sweeps:
            for name, result in zip(sweep, BACKEND.sweep(p.replace(origin="transposed"), sweep, g, x, w), strict=True):
                assert torch.equal(result, expected[name]), name
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("strides", ["sd1sh2sw1", "sd2sh1sw1", "sd2sh2sw1", "sd1sh1sw2", "sd3sh2sw3"])
@pytest.mark.parametrize("width", [5, 9, 19])
def test_rows_of_strided_volumes_do_not_run_into_each_other(strides: str, width: int) -> None:
    for layout in ("", " channels_last"):
        p = ConvProblem.parse(f"mb2g9ic18id7ih9iw{width}oc18kd3kh3kw3{strides}{layout}")
        tensors = operands(p)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name


def test_reasons_name_what_is_missing() -> None:
    p = ConvProblem(1, 4, 4, 4, (5,), (3,), (1,), ((1, 1),), (1,), (5,))
    outputs: tuple[Output, ...] = ("forward",)
    assert BACKEND.reasons_against(p, outputs, CPU) == []
    assert "on cuda" in BACKEND.reasons_against(p, outputs, torch.device("cuda"))[0]
    assert BACKEND.reasons_against(p.replace(groups=2), outputs, CPU) == []
    dense = p.replace(groups=1, in_channels=17)
    assert "17 input and 4 output channels" in BACKEND.reasons_against(dense, outputs, CPU)[0]
    assert "int64" in BACKEND.reasons_against(p.replace(dtype=torch.int64), outputs, CPU)[0]


def test_pytorch_keeps_what_it_does_as_fast() -> None:
    image = ConvProblem(32, 96, 96, 96, (56, 56), (3, 3), (1, 1), ((1, 1),) * 2, (1, 1), (56, 56))
    last = image.replace(memory_format=torch.channels_last)
    assert BACKEND.expected_speedup(last, ("forward",), CPU) < 1 < BACKEND.expected_speedup(image, ("forward",), CPU)
    assert BACKEND.expected_speedup(last, ("grad_input", "grad_weight"), CPU) > 1
    volume = ConvProblem.parse("mb2g8ic8id9ih9iw9oc8kd3kh3kw3 channels_last")
    dilated = ConvProblem.parse("mb2g8ic8id9ih9iw9oc8kd3kh3kw3dd1dh1dw1 channels_last")
    assert (
        BACKEND.expected_speedup(volume, ("forward",), CPU) < 1 < BACKEND.expected_speedup(dilated, ("forward",), CPU)
    )
    assert BACKEND.expected_speedup(image.replace(dtype=torch.float64), ("forward",), CPU) > 1


def test_pytorch_keeps_groups_of_8_and_strides_in_channels_last() -> None:
    def taken(text: str, *outputs: Output) -> bool:
        return BACKEND.expected_speedup(ConvProblem.parse(text), outputs, CPU) > 1

    both: tuple[Output, ...] = ("grad_input", "grad_weight")
    resnext = "mb16g32ic128ih56oc128kh3ph1"
    assert all(taken(resnext + layout, *both) for layout in ("", " channels_last"))
    assert all(taken(resnext, output) for output in ("forward", "grad_input", "grad_weight"))
    assert not taken("mb16g32ic512ih14oc512kh3ph1", *both)
    assert taken("mb16g64ic256ih28oc256kh3sh2ph1", *both)
    assert not taken("mb16g64ic256ih28oc256kh3sh2ph1 channels_last", *both)
    assert not taken("mb16g128ic512ih14oc512kh3ph1 channels_last", "grad_weight")
    assert not taken("mb16ic4ih28oc4kh3ph1", "forward")


def test_small_images_are_taken_where_four_threads_share_them() -> None:
    small = ConvProblem.parse("mb32g768ic768ih7oc768kh3ph1")
    wide = ConvProblem.parse("mb32g768ic768ih7oc768kh7ph3")
    asked: tuple[tuple[ConvProblem, Output], ...] = (
        (small, "forward"),
        (small, "grad_weight"),
        (wide, "forward"),
        (wide, "grad_weight"),
    )
    taken = {}
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            taken[threads] = [BACKEND.expected_speedup(p, (output,), CPU) > 1 for p, output in asked]
    finally:
        torch.set_num_threads(before)
    assert taken == {1: [True, False, False, True], 2: [True, False, False, True], 4: [True] * 4}


def test_channels_last_is_taken_for_wide_kernels_and_small_images() -> None:
    def taken(text: str) -> list[bool]:
        p = ConvProblem.parse(text + " channels_last")
        return [BACKEND.expected_speedup(p, (output,), CPU) > 1 for output in ("forward", "grad_input")]

    assert taken("mb32g96ic96ih56oc96kh7ph3") == [True, True]
    assert taken("mb32g576ic576ih14oc576kh3ph1") == [True, True]
    assert taken("mb32g144ic144ih56oc144kh3ph1") == [False, False]
    assert taken("mb32g480ic480ih14oc480kh5sh2ph2") == [False, False]
    assert taken("mb1g96ic96ih7oc96kh7ph3") == [False, False]


def test_a_bound_function_gives_what_a_call_gives() -> None:
    p = ConvProblem.parse("mb2g5ic5ih9oc10kh3ph1")
    x, w, g = operands(p)
    pairs: tuple[tuple[Pass, Tensor, Tensor], ...] = (("forward", x, w), ("grad_input", g, w), ("grad_weight", g, x))
    for pass_, a, b in pairs:
        assert torch.equal(BACKEND.bind(p, pass_)(a, b), BACKEND.run(p, pass_, a, b)), pass_
    asked = BACKEND.sweeps[1]
    bound = BACKEND.bind_sweep(p, asked)(g, x, w)
    for name, result in zip(asked, bound, strict=True):
        assert torch.equal(result, reference(p, x, w, g)[name]), name
    with pytest.raises(ValueError, match="workspace"):
        BACKEND.bind(p, "forward")(x, w, None, torch.empty(1, dtype=torch.uint8))


@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("channels", [4, 40])
@pytest.mark.parametrize("groups", ["depthwise", "small"])
@pytest.mark.parametrize("empty", ["mb0ih5ph1", "mb2ih0ph3"])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_empty_batch_or_image_gives_zeros(empty: str, groups: str, channels: int, layout: str, threads: int) -> None:
    """The engine asks no backend for these, but a division by zero would end whoever does it."""
    size = 1 if groups == "depthwise" else 4
    p = ConvProblem.parse(f"g{channels // size}ic{channels}oc{channels}kh3{empty}{layout}")
    tensors = operands(p)
    expected = reference(p, *tensors) if p.batch else {}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, result in everything(p, *tensors):
            zeros = torch.zeros_like(result)
            assert torch.equal(result, expected["grad_bias"] if expected and name == "grad_bias" else zeros), name
    finally:
        torch.set_num_threads(before)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    p = ConvProblem(1, 4, 4, 4, (5,), (3,), (1,), ((1, 1),), (1,), (5,))
    x, w, _ = operands(p)
    with pytest.raises(ValueError, match="workspace must have"):
        BACKEND.run(p, "forward", x, w, workspace=torch.empty(8, dtype=torch.uint8))


def test_without_a_library_there_is_a_reason(tmp_path: Path) -> None:
    code = (
        "import torch; from convgrad.problem import ConvProblem; from convgrad.backends.native import NativeBackend\n"
        "p = ConvProblem(1, 4, 4, 4, (5,), (3,), (1,), ((1, 1),), (1,), (5,))\n"
        "print(NativeBackend().reasons_against(p, ('forward',), torch.device('cpu')))"
    )
    environment = os.environ | {"CONVGRAD_NATIVE_LIBRARY": str(tmp_path / "none.so"), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "not installed" in done.stdout


@settings(max_examples=60)
@given(p=problems((torch.float32, torch.bfloat16)))
def test_nothing_outside_the_operands_is_read(p: ConvProblem) -> None:
    def in_poison(x: Tensor) -> Tensor:
        buffer = torch.full((x.numel() + 128,), torch.nan, dtype=x.dtype)
        inner = buffer[64 : 64 + x.numel()].as_strided(x.shape, x.stride())
        return inner.copy_(x)

    tensors = tuple(in_poison(x) for x in operands(p, 1))
    poisoned = torch.full((BACKEND.workspace(p, ("grad_input", "grad_weight")),), 255, dtype=torch.uint8)  # NaN
    results = everything(p, *tensors)
    results += [("swept", r) for r in BACKEND.sweep(p, ("grad_input", "grad_weight"), *swap(tensors), poisoned)]
    for name, result in results:
        assert not result.isnan().any(), name


def swap(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    input, weight, grad_output = tensors
    return grad_output, input, weight


def with_limits(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """What a product gives whose operands hold infinities and NaNs, from how many terms of each kind a sum has.
    Padding is no position of a tensor and takes part in no term."""

    def count(a: Tensor, b: Tensor) -> Tensor:
        return product(a.double(), b.double()).round()

    inf, finite = torch.inf, a.isfinite()
    small_up, small_down = (a > 0) & finite, (a < 0) & finite
    up = count(a == inf, b > 0) + count(a == -inf, b < 0) + count(small_up, b == inf) + count(small_down, b == -inf)
    down = count(a == inf, b < 0) + count(a == -inf, b > 0) + count(small_up, b == -inf) + count(small_down, b == inf)
    undefined = count(a.isnan(), torch.ones_like(b)) + count(torch.ones_like(a), b.isnan())
    undefined += count(a.isinf(), b == 0) + count(a == 0, b.isinf())
    result = product(*(x.double().nan_to_num(0, 0, 0) for x in (a, b)))
    result = result.masked_fill(up > 0, inf).masked_fill(down > 0, -inf)
    return result.masked_fill((undefined > 0) | ((up > 0) & (down > 0)), torch.nan)


@settings(max_examples=100)
@given(p=problems(), threads=st.sampled_from([1, 3]), data=st.data())
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
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, result in everything(p, *tensors):
            torch.testing.assert_close(result, expected[name].to(p.dtype), rtol=0, atol=0, equal_nan=True, msg=name)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("layout", ["", " channels_last"])
def test_infinity_does_not_meet_the_padding(channels: int, layout: str) -> None:
    p = ConvProblem.parse(f"mb2g8ic{8 * channels}ih9oc{8 * channels}kh3ph1{layout}")
    x, w, g = (torch.ones_like(t) for t in operands(p))
    w[..., 0, 0] = torch.inf  # reads what lies above and to the left
    y = BACKEND.run(p, "forward", x, w)
    assert y[..., 0, :].isfinite().all()
    assert y[..., 0].isfinite().all()
    assert y[..., 1:, 1:].isposinf().all()
    assert not BACKEND.run(p, "grad_input", g, w).isnan().any()
    g[..., 0, 0] = torch.inf
    sums = BACKEND.run(p, "grad_weight", g, x)
    assert not sums.isnan().any()
    assert sums[..., 0, :].isfinite().all()
    assert sums[..., 0].isfinite().all()
    assert sums[..., 1:, 1:].isposinf().all()


def test_a_forked_child_does_not_hang() -> None:
    code = (
        "import os, torch; from convgrad.problem import ConvProblem\n"
        "from convgrad.backends.native import NativeBackend\n"
        "torch.set_num_threads(2)\n"
        "p = ConvProblem(8, 64, 64, 64, (64,), (3,), (1,), ((1, 1),), (1,), (64,))\n"
        "x, w = torch.ones(p.input_shape), torch.ones(p.weight_shape)\n"
        "y = NativeBackend().run(p, 'forward', x, w)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if y.equal(NativeBackend().run(p, 'forward', x, w)) else 3)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_more_elements_than_32_bits_count(layout: torch.memory_format) -> None:
    p = ConvProblem(2, 4, 4, 4, (16500, 16500), (1, 3), (1, 1), ((0, 0), (1, 1)), (1, 1), (16500, 16500))
    p = p.replace(dtype=torch.bfloat16, memory_format=layout)
    assert p.needs_int64
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 14 * 2**30:
        pytest.skip("needs 14 GB of free memory")
    x = torch.zeros(p.input_shape, dtype=p.dtype).contiguous(memory_format=layout)  # zero but for the last rows
    x[1, 3, -3:], x[1, 2, -1, -5:] = 1, 2
    w = torch.tensor([1.0, 2.0, 3.0], dtype=p.dtype).repeat(4, 1, 1, 1)
    end = x[1:, :, -4:].double()
    near = [torch.nn.functional.pad(end, (1, 1))[..., k : k + 16500] for k in range(3)]
    for pass_, taps in (("forward", (1, 2, 3)), ("grad_input", (3, 2, 1))):
        result = BACKEND.run(p, pass_, x, w)  # pyright: ignore[reportArgumentType]
        assert torch.equal(result[1:, :, -4:].double(), sum(t * n for t, n in zip(taps, near, strict=True))), pass_
        assert not result[0].any(), pass_
        assert not result[1, :, :-4].any(), pass_
        del result
    sums = torch.stack([(n * end).sum((0, 2, 3)) for n in near], 1)
    assert torch.equal(BACKEND.run(p, "grad_weight", x, x)[:, 0, 0], sums.to(p.dtype))
