"""The compiled CPU kernels: exact results of every instruction set, biases, workspaces."""

from __future__ import annotations

import gc
import itertools
import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convgrad.backends import _native_library as library
from convgrad.problem import ConvProblem, Pass
from convgrad.sizes import output_length

from .native_cases import BACKEND, everything, on_threads, operands, problems, reference

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


@pytest.fixture(params=["x86-64-v4", "x86-64-v3", "baseline"])
def instruction_set(request: pytest.FixtureRequest):
    """Each instruction set that this build and this processor have."""
    before = library.instruction_set()
    try:
        library.select(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    library.select(before)


@settings(max_examples=150)
@given(p=problems(), threads=st.sampled_from([1, 2]))
def test_every_result_is_exact(p: ConvProblem, threads: int) -> None:
    with on_threads(threads):
        tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name
            assert name == "grad_bias" or result.is_contiguous(memory_format=p.memory_format), name


def test_every_instruction_set_is_exact(instruction_set: str) -> None:
    @settings(max_examples=60)
    @given(p=problems())
    def check(p: ConvProblem) -> None:
        tensors = operands(p, 1 if p.dtype.itemsize == 2 else 3)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), (instruction_set, name)

    check()


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 7, 9, 12, 25])
def test_every_border_of_a_row_is_exact(kernel: int) -> None:
    """Rows whose pixels lack kernel columns on the left, on the right, on both sides, and altogether."""
    paddings = {(0, 0), (kernel - 1, 0), (0, kernel + 1), (kernel // 2, kernel // 2), (kernel + 1, kernel)}
    for width, padding, step in itertools.product([1, 2, 3, 6, 8, 13, 37, 200], sorted(paddings), [1, 2]):
        output = output_length(width, kernel, step, *padding, step)
        if output < 1:
            continue
        p = ConvProblem(2, 19, 19, 19, (2, width), (2, kernel), (1, step), ((1, 0), padding), (1, step), (2, output))
        p = p.replace(memory_format=torch.channels_last)
        tensors = operands(p)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), (name, p)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits_is_read_and_rounded(
    instruction_set: str, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """Every pattern of bits, infinities and NaNs too, plus another one: there are ties and overflows among the sums."""
    channels = 37  # fits no vector
    rows = 2**16 // channels + 1
    bits = torch.arange(channels * rows, dtype=torch.int32).to(torch.int16)  # each pattern at least once
    x = torch.stack([bits, bits[torch.randperm(len(bits))]], -1).view(dtype).reshape(1, channels, rows, 2)
    p = ConvProblem(1, channels, channels, channels, (rows, 2), (1, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), (rows, 1))
    p = p.replace(dtype=dtype, memory_format=layout)
    x, ones = x.contiguous(memory_format=layout), torch.ones(p.weight_shape, dtype=dtype)
    y = x.float().sum(-1, keepdim=True).to(dtype)
    torch.testing.assert_close(BACKEND.bind(p, ("forward",))(x, ones), y, rtol=0, atol=0, equal_nan=True)
    g = y.contiguous(memory_format=layout)
    torch.testing.assert_close(
        BACKEND.bind(p, ("grad_input",))(g, ones), g.expand(x.shape), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("pass_", ["forward", "grad_input"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_bias_is_added(pass_: str, layout: torch.memory_format, multiplier: int) -> None:
    p = ConvProblem(2, 11, 11 * multiplier, 11, (9, 8), (3, 3), (2, 1), ((1, 1),) * 2, (1, 1), (5, 8), has_bias=True)
    p = p.replace(memory_format=layout, origin="plain" if pass_ == "forward" else "transposed")
    tensors = operands(p)
    bias = torch.arange(float(p.shape_of(p.bias_slot)[1]))
    a = tensors[0] if pass_ == "forward" else tensors[2]
    result = BACKEND.bind(p, (pass_,))(a, tensors[1], bias)  # pyright: ignore[reportArgumentType]
    assert torch.equal(result, reference(p, *tensors)[pass_] + bias.view(-1, 1, 1))


@settings(max_examples=100)
@given(p=problems(), threads=st.sampled_from([1, 3]))
def test_the_bias_gradient_of_a_transposed_convolution_sums_the_input(p: ConvProblem, threads: int) -> None:
    p = p.replace(padding_mode="zeros")  # a transposed convolution has no other
    x, w, g = operands(p, 1 if p.dtype.itemsize == 2 else 3)
    expected = reference(p, x, w, g)
    expected["grad_bias"] = x.double().sum((0, *range(2, p.ndim + 2))).to(p.dtype)
    with on_threads(threads):
        for sweep in BACKEND.sweeps:
            for name, result in zip(sweep, BACKEND.bind(p.replace(origin="transposed"), sweep)(g, x, w), strict=True):
                assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("strides", ["sd1sh2sw1", "sd2sh1sw1", "sd2sh2sw1", "sd1sh1sw2", "sd3sh2sw3"])
@pytest.mark.parametrize("width", [5, 9, 19])
def test_rows_of_strided_volumes_do_not_run_into_each_other(strides: str, width: int) -> None:
    for layout in ("", " channels_last"):
        p = ConvProblem.parse(f"mb2g9ic18id7ih9iw{width}oc18kd3kh3kw3{strides}{layout}")
        tensors = operands(p)
        expected = reference(p, *tensors)
        for name, result in everything(p, *tensors):
            assert torch.equal(result, expected[name]), name


def test_a_kernel_is_bound_once_and_called_often() -> None:
    p = ConvProblem.parse("mb2g5ic5ih9oc10kh3ph1")
    x, w, g = operands(p)
    pairs: tuple[tuple[Pass, Tensor, Tensor], ...] = (("forward", x, w), ("grad_input", g, w), ("grad_weight", g, x))
    for pass_, a, b in pairs:
        kernel = BACKEND.bind(p, (pass_,))
        for _ in range(2):
            assert torch.equal(kernel(a, b), reference(p, x, w, g)[pass_]), pass_
    asked = BACKEND.sweeps[1]
    bound = BACKEND.bind(p, asked)(g, x, w)
    for name, result in zip(asked, bound, strict=True):
        assert torch.equal(result, reference(p, x, w, g)[name]), name


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
    with on_threads(threads):
        for name, result in everything(p, *tensors):
            zeros = torch.zeros_like(result)
            assert torch.equal(result, expected["grad_bias"] if expected and name == "grad_bias" else zeros), name


def test_more_memory_than_there_is_is_an_error() -> None:
    far = 2**45
    p = ConvProblem(1, 4, 4, 4, (1,), (2,), (1,), ((far, 0),), (far,), (1,))  # packed with all of its padding
    x, w, _ = operands(p)
    kernel = BACKEND.bind(p, ("forward",))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            kernel(x, w)
    assert "with its padding" in BACKEND.reasons_against(p, ("forward",), x.device)[0]


def test_a_plan_is_freed_with_its_kernel_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = library.load()
    assert loaded is not None
    freed: list[int] = []
    monkeypatch.setattr(loaded, "convgrad_plan_free", freed.append)
    p = ConvProblem.parse("mb2g4ic4ih9oc4kh3ph1")
    x, w, g = operands(p)
    for outputs in (("forward",), ("grad_input",), ("grad_weight",), *BACKEND.sweeps):
        kernel = BACKEND.bind(p, outputs)
        a, b = {"forward": (x, w), "grad_input": (g, w)}.get(outputs[0], (g, x))
        kernel(a, b) if len(outputs) == 1 else kernel(g, x, w)
        assert not freed, outputs
        del kernel
        gc.collect()
        assert len(freed) == 1, outputs
        freed.clear()


def test_kernels_run_at_once_on_several_threads() -> None:
    """Each thread has scratch memory of its own, which grows and shrinks with what it computes."""
    texts = ("mb2g4ic4ih9oc4kh5ph2", "mb1g40ic40ih60oc40kh3ph1", "mb2g3ic12ih14oc9kh3ph1sh2", "mb1g9ic9ih40oc9kh7ph3")
    given = [(p, operands(p)) for p in map(ConvProblem.parse, texts)]
    kernels = [(BACKEND.bind(p, ("grad_input", "grad_weight")), t, reference(p, *t)) for p, t in given]
    wrong: list[int] = []

    def work(first: int) -> None:
        for i in range(first, first + 60):
            kernel, (x, w, g), expected = kernels[i % len(kernels)]
            grad_input, grad_weight = kernel(g, x, w)
            if not (grad_input.equal(expected["grad_input"]) and grad_weight.equal(expected["grad_weight"])):
                wrong.append(i % len(kernels))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mb32g32ic32ih112oc32kh3ph1", "planar"),
        ("mb32g32ic32ih24oc32kh3ph1", "planar"),
        ("mb32g32ic32ih20oc32kh3ph1", "planar"),
        ("mb32g32ic32ih19oc32kh3ph1", "packed"),
        ("mb32g32ic32iw98oc32kw4pw3", "packed"),
        ("mb32g32ic32ih112oc32kh3ph1 channels_last", "packed"),
        ("mb2g4ic16ih14oc16kh3ph1", "grouped"),
    ],
)
def test_the_kernels_that_run_have_a_name(text: str, name: str) -> None:
    assert BACKEND.kernel_name(ConvProblem.parse(text), ("forward",)) == name


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
        result = BACKEND.bind(p, (pass_,))(x, w)  # pyright: ignore[reportArgumentType]
        assert torch.equal(result[1:, :, -4:].double(), sum(t * n for t, n in zip(taps, near, strict=True))), pass_
        assert not result[0].any(), pass_
        assert not result[1, :, :-4].any(), pass_
        del result
    sums = torch.stack([(n * end).sum((0, 2, 3)) for n in near], 1)
    assert torch.equal(BACKEND.bind(p, ("grad_weight",))(x, x)[:, 0, 0], sums.to(p.dtype))


def test_another_default_device_changes_nothing() -> None:
    problem = ConvProblem.parse("mb2g4ic4ih9oc4kh5 channels_last")
    x, g = (torch.ones(problem.shape_of(slot)) for slot in ("input", "grad_output"))
    x, g = x.to(memory_format=torch.channels_last), g.to(memory_format=torch.channels_last)
    with torch.device("meta"):
        got = BACKEND.bind(problem, ("grad_weight",))(g, x)
    assert torch.equal(got, torch.full_like(got, 50.0))
