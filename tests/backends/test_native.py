"""The compiled CPU kernels: exact results of every instruction set, biases, workspaces."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convgrad.backends import _native_library as library
from convgrad.check.child import Child
from convgrad.problem import ConvProblem, Pass
from convgrad.problem.sizes import output_length

from .native_cases import (
    BACKEND,
    CPU,
    any_problem,
    assert_exact,
    everything,
    operands,
    planar,
    pointwise,
    problems,
    reference,
)

pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


@pytest.mark.parametrize(("drawn", "examples"), [(problems(), 80), (planar(), 60), (pointwise(), 40)])
def test_every_result_is_exact(instruction_set: str, drawn: st.SearchStrategy[ConvProblem], examples: int) -> None:
    @settings(max_examples=examples)
    @given(p=drawn, threads=st.sampled_from([1, 3]))
    def check(p: ConvProblem, threads: int) -> None:
        torch.set_num_threads(threads)
        assert_exact(p)

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
        assert_exact(p.replace(memory_format=torch.channels_last))


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


@settings(max_examples=100)
@given(p=any_problem(), transposed=st.booleans())
def test_bias_is_added(p: ConvProblem, transposed: bool) -> None:
    """A transposed convolution's to what the plain problem calls grad_input."""
    p = p.replace(padding_mode="zeros", has_bias=True, origin="transposed" if transposed else "plain")
    x, w, g = operands(p, 1)
    bias = torch.arange(p.shape_of(p.bias_slot)[1]) % 7
    exact = reference(p, x, w, g, torch.float64)[p.bias_pass] + bias.view(-1, *[1] * p.ndim)
    result = BACKEND.bind(p, (p.bias_pass,))(g if transposed else x, w, bias.to(p.dtype))
    assert torch.equal(result, exact.to(p.dtype))


@settings(max_examples=100)
@given(p=any_problem(), threads=st.sampled_from([1, 3]))
def test_the_bias_gradient_of_a_transposed_convolution_sums_the_input(p: ConvProblem, threads: int) -> None:
    p = p.replace(padding_mode="zeros")  # a transposed convolution has no other
    x, w, g = operands(p, 1 if p.dtype.itemsize == 2 else 3)
    expected = reference(p, x, w, g)
    expected["grad_bias"] = x.double().sum((0, *range(2, p.ndim + 2))).to(p.dtype)
    torch.set_num_threads(threads)
    for sweep in BACKEND.sweeps:
        for name, result in zip(sweep, BACKEND.bind(p.replace(origin="transposed"), sweep)(g, x, w), strict=True):
            assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("layout", ["", " channels_last"])
@pytest.mark.parametrize("groups", ["g8ic8oc8", "g2ic8oc6", "g5ic5oc10"])
def test_steps_longer_than_any_tensor(groups: str, layout: str) -> None:
    """To the one position of a result, or of the kernel, they are like any others that reach no second one."""

    def results(stride: int, dilation: int) -> list[tuple[str, Tensor]]:
        p = ConvProblem.parse(f"{groups}mb2ih5iw7kh3kw1sh20sw20ph1pw1{layout}")
        p = p.replace(stride=(stride, stride), dilation=(1, dilation))
        torch.manual_seed(0)
        return everything(p, *operands(p))

    longest = 2**63 - 1
    for (name, far), (_, near) in zip(results(longest, longest), results(20, 20), strict=True):
        assert torch.equal(far, near), name


@pytest.mark.parametrize("strides", ["sd1sh2sw1", "sd2sh1sw1", "sd2sh2sw1", "sd1sh1sw2", "sd3sh2sw3"])
@pytest.mark.parametrize("width", [5, 9, 19])
def test_rows_of_strided_volumes_do_not_run_into_each_other(strides: str, width: int) -> None:
    for layout in ("", " channels_last"):
        assert_exact(ConvProblem.parse(f"mb2g9ic18id7ih9iw{width}oc18kd3kh3kw3{strides}{layout}"))


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_phases_do_not_run_into_each_other(instruction_set: str, dtype: str, kernel: int) -> None:
    """A row of every width: where the first position lies in the padding, the second phase ends behind the first."""
    for width in range(kernel - 1, 70):
        assert_exact(ConvProblem.parse(f"mb2ic2iw{width}oc3kw{kernel}sw2pw1 {dtype}"))
    for size in (9, 17, 33):
        assert_exact(ConvProblem.parse(f"ic2ih{size}oc3kh{kernel}sh2ph1 {dtype}"))


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
@pytest.mark.parametrize("kernels", ["depthwise", "small groups", "pointwise", "strided pointwise"])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_empty_batch_gives_zeros(kernels: str, channels: int, layout: str, threads: int) -> None:
    """The engine asks no backend for these, but a division by zero would end whoever does it."""
    groups, form = {
        "depthwise": (channels, "kh3ph1"),
        "small groups": (channels // 4, "kh3ph1"),
        "pointwise": (1, "kh1"),
        "strided pointwise": (1, "kh1sh2"),
    }[kernels]
    p = ConvProblem.parse(f"g{groups}ic{channels}oc{channels}mb0ih5{form}{layout}")
    torch.set_num_threads(threads)
    for name, result in everything(p, *operands(p)):
        assert not result.any(), name


def test_more_memory_than_there_is_is_an_error() -> None:
    far = 2**45
    p = ConvProblem(1, 4, 4, 4, (1,), (2,), (1,), ((far, 0),), (far,), (1,))  # packed with all of its padding
    x, w, _ = operands(p)
    kernel = BACKEND.bind(p, ("forward",))
    for _ in range(2):
        with pytest.raises(MemoryError, match="no memory"):
            kernel(x, w)
    assert "with its padding" in BACKEND.reasons_against(p, ("forward",), x.device)[0]


def test_no_finalizer_runs_where_a_kernel_is_freed() -> None:
    """A Ctrl-C that arrives in one is lost: it happened to one of a hundred that interrupted measurements."""
    assert not weakref.getweakrefs(BACKEND.bind(ConvProblem.parse("mb2g4ic4ih9oc4kh3ph1"), ("forward",)))


def test_kernels_run_at_once_on_several_threads() -> None:
    """Each thread has scratch memory of its own, which grows and shrinks with what it computes."""
    texts = ("mb2g4ic4ih9oc4kh5ph2", "mb1g40ic40ih60oc40kh3ph1", "mb2g3ic12ih14oc9kh3ph1sh2", "mb1g9ic9ih40oc9kh7ph3")
    given = [(p, operands(p)) for p in map(ConvProblem.parse, texts)]
    kernels = [(BACKEND.bind(p, ("grad_input", "grad_weight")), t, reference(p, *t)) for p, t in given]

    def work(first: int) -> None:
        for i in range(first, first + 60):
            kernel, (x, w, g), expected = kernels[i % len(kernels)]
            grad_input, grad_weight = kernel(g, x, w)
            assert grad_input.equal(expected["grad_input"]), texts[i % len(kernels)]
            assert grad_weight.equal(expected["grad_weight"]), texts[i % len(kernels)]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


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
        ("mb2ic16ih7oc12kh1", "pointwise"),
        ("mb2ic16ih7oc12kh1 channels_last", "pointwise"),
        ("mb2g2ic32ih7oc24kh1 channels_last", "grouped"),
        ("mb2ic48ih7oc33kh1", "pointwise"),
        ("mb2ic48iw7oc33kw1", "pointwise"),
        ("mb2g2ic48id3ih7iw5oc66kd1kh1kw1", "pointwise"),
        ("mb2ic48ih1oc33kh1sh2", "pointwise"),  # a single position, whatever the stride
        ("mb2ic48ih7oc33kh1 channels_last", "pointwise"),
        ("mb2g3ic144id2ih3iw5oc99kd1kh1kw1 channels_last float64", "pointwise"),
        ("mb2ic48ih7oc33kh1 channels_last bfloat16", "pointwise"),
        ("mb2ic64ih7oc33kh3ph1", "grouped"),
        ("mb2ic80ih7oc33kh1sh2", "strided pointwise"),
        ("mb2ic80ih7oc33kh1sh2 channels_last float64", "strided pointwise"),
        ("mb2g2ic64id3ih7iw5oc66kd1kh1kw1sd1sh2sw3 bfloat16", "strided pointwise"),
        ("mb2ic24ih7oc24kh1sh2", "grouped"),  # few channels
        ("mb2ic24ih7oc24kh1sh2 channels_last", "strided pointwise"),
        ("mb2ic80ih7oc33kh1ph1", ""),
        ("mb2ic80ih7oc33kh3ph1", ""),
    ],
)
def test_the_kernels_that_run_have_a_name(text: str, name: str) -> None:
    p = ConvProblem.parse(text)
    reasons = BACKEND.reasons_against(p, ("forward",), CPU)
    if name:
        assert (BACKEND.kernel_name(p, ("forward",)), reasons) == (name, [])
    else:
        assert "here a group has 80 input and 33 output channels" in reasons[0]


@pytest.mark.parametrize(
    ("text", "forward", "grad_weight"),
    [
        ("mb2g4ic16ih7oc24kh1", "pointwise", "grouped"),
        ("mb2g4ic16ih7oc24kh1 channels_last", "grouped", "pointwise"),
        ("mb2ic8ih7oc130kh1", "pointwise", "grouped"),
        ("mb2ic9ih7oc130kh1", "pointwise", "pointwise"),
    ],
)
def test_few_channels_of_pointwise_groups_are_no_lanes(text: str, forward: str, grad_weight: str) -> None:
    p = ConvProblem.parse(text)
    assert BACKEND.kernel_name(p, ("forward",)) == forward
    assert BACKEND.kernel_name(p, ("grad_weight",)) == grad_weight


@pytest.mark.parametrize(
    ("text", "lanes"),
    [("mb1g3ic3ih30oc3kh9ph4", 3), ("mb5g3ic3ih30oc3kh9ph4", 15), ("mb5g3ic3ih30oc12kh3ph1 channels_last", 3)],
)
def test_depthwise_lanes_are_channels_where_half_of_them_are_in_use(
    instruction_set: str, text: str, lanes: int
) -> None:
    vector = {"x86-64-v4": 16, "x86-64-v3": 8}.get(instruction_set, 4)
    assert BACKEND.kernel_name(ConvProblem.parse(text), ("forward",)) == ("grouped" if 2 * lanes < vector else "packed")


def test_sums_of_several_threads_are_the_same_bits_every_time() -> None:
    p = ConvProblem.parse("mb4ic48ih28oc33kh1")
    g, x, w = torch.randn(p.output_shape), torch.randn(p.input_shape), torch.randn(p.weight_shape)
    torch.set_num_threads(2)
    kernel = BACKEND.bind(p, ("grad_input", "grad_weight", "grad_bias"))
    first = kernel(g, x, w)
    for _ in range(10):
        assert all(map(torch.equal, first, kernel(g, x, w)))


@pytest.mark.parametrize(
    "text",
    [
        "mb16g100ic100ih57oc100kh3ph1 channels_last",
        "mb16g100ic100ih57oc100kh5ph2sh2 channels_last",
        "mb8g100ic100ih57oc100oh57kh3ph2dh1 channels_last",
        "mb4g40ic40id9ih40iw41oc40kd3kh3kw3pd1ph1pw1 channels_last",
        "mb33g301ic301ih20oc301kh3ph1",
        "mb33g150ic150ih20oc300kh3ph1",
        "mb1500g5ic5ih31oc5kh5ph2sh2",
        "mb40g80ic80iw900oc80ow900kw5pw2",
    ],
)
def test_tensors_that_no_cache_holds(text: str) -> None:
    """There the kernels ask for memory ahead of their loops."""
    p = ConvProblem.parse(text)
    assert 4 * (math.prod(p.input_shape) + math.prod(p.output_shape)) > 16 << 20
    assert_exact(p, torch.float32)


# ---- the library ------------------------------------------------------------------------------------


def test_without_a_library_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_path", lambda: tmp_path / "none.so")
    monkeypatch.setattr(library, "_try_load", library._try_load.__wrapped__)
    [reason] = BACKEND.reasons_against(ConvProblem.parse("mb1g4ic4iw5oc4kw3"), ("forward",), CPU)
    assert "not installed" in reason


def test_a_forked_child_does_not_hang() -> None:
    """Its parent's threads are not there."""
    p = ConvProblem.parse("mb8g64ic64iw64oc64kw3pw1")
    x, w, _ = operands(p)
    torch.set_num_threads(2)
    y = BACKEND.bind(p, ("forward",))(x, w)
    with Child(lambda request: y.equal(BACKEND.bind(p, ("forward",))(x, w)), fork=True) as child:
        assert child.ask(None)


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
        want = taps[0] * near[0] + taps[1] * near[1] + taps[2] * near[2]
        assert torch.equal(result[1:, :, -4:].double(), want), pass_
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
