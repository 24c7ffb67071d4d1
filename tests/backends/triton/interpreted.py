"""Runs under Triton's interpreter, in a process that `test_processes` starts; pytest alone does not collect it.

The interpreter runs one program after the other in numpy, some tens of milliseconds each. So problems are tiny: what
they vary is everything that selects another path through a kernel. Its bfloat16 store truncates, which integers
that bfloat16 holds do not notice; it multiplies matrices in float32, whatever precision is asked for.
"""

import dataclasses
import mmap
import os

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.nn import functional as F
from triton.runtime import interpreter

import convgrad
from convgrad.backends.reference import ReferenceBackend
from convgrad.backends.triton import TritonBackend, TritonBandedBackend, bands, first_check, launch, tiles
from convgrad.backends.triton.sliding_sum import geometry
from convgrad.check.operands import integer_operands, real_operands
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output
from convgrad.testing import check_problem

assert os.environ.get("TRITON_INTERPRET") == "1"

# A third of the interpreter's time would go into a check of overflows, of which it drops the result unless it debugs.
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)

# What fills a GPU is less here, but more than one program and one part of a sum.
tiles._LANES, tiles._LINE, tiles._ENOUGH, tiles.MOST_PROGRAMS = 8, 4, 16, 16
launch.MOST_PROGRAMS, launch.PROGRAMS, bands._PROGRAMS = 16, 4, 8

# numpy warns where an infinity meets a zero, also in lanes whose value is not taken.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CPU = torch.device("cpu")
BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
REFERENCE = ReferenceBackend()


def slow(*values: object) -> list[object]:
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]


#: 1-D, 2-D and 3-D in both memory formats; strides in both directions, dilation, multipliers, uneven and negative
#: padding, even kernels, planes of one element; vectors of 1 to 8 columns or of 2 channels, rows and columns left over.
EXACT = [
    "g1ic1oc1mb2iw32ow32kw4pw3",
    "g2mb1ic2ih9iw11oc2oh5ow6kh3kw3sh2sw2ph1pw0",
    "g1mb2ic1ih8iw8oc1oh4ow4kh3kw3sh2sw2ph1pw1 float16",
    "g1mb1ic1id4ih2iw4oc1od2oh2ow4kd2kh1kw2sd2pd0ph0pw1",
    "mb1ic1ih1iw1oc1kh1kw1",
    "g8mb2ic8ih4iw3oc8kh3kw3ph1pw1 channels_last bfloat16",
    "g5mb1ic5ih7iw5oc5oh3ow3kh3kw3sh2sw2ph0pw1 channels_last",
    *slow(
        "g2mb1ic2iw21oc2kw11pw5",
        "g4mb1ic4id3ih3iw4oc4kd2kh3kw2pd0ph1pw1 channels_last float16",
        "g3mb2ic3iw17oc6ow4kw4sw3pw-1dw1",
        "g2mb2ic2ih5iw8oc2kh3kw3ph1pw1 bfloat16",
        "g2mb1ic2iw72oc2ow72kw5pw2 bfloat16",
        "g1mb2ic1iw80oc2ow40kw3sw2pw1 float16",
        "g3mb2ic3ih9iw11oc3oh5ow6kh3kw3sh2sw2ph1pw0 channels_last bfloat16",
        "mb1ic1ih9iw8oc2kh3kw2sh2sw4ph1pw1dh1dw2 float16",
        "g1ic1oc1mb1ih9iw8oh7ow9kh4kw2sh1sw1ph0pw1",
        "g4mb3ic4ih1iw1oc4kh3kw3ph1pw1 channels_last",
        "g2mb1ic2ih9iw1oc2kh3kw1ph1pw0",
        "g2mb1ic2id4ih5iw6oc2kd3kh3kw3sd2sh1sw2pd1ph1pw1 channels_last float16",
        "mb1ic1id3ih4iw5oc1kd3kh3kw3sd2sh2sw2pd1ph1pw1",
        "g1mb2ic1ih5iw8oc1oh5ow2kh2kw4sw4ph1pw0dh0",
        "g1mb1ic1ih6iw12oc1oh6ow4kh3kw3sw3ph1pw0",
        "g1mb1ic1ih7iw8oc1oh7ow8kh3kw3ph2pw2dh1dw1 bfloat16",
        "g3mb1ic3ih7oc3kh7ph3",
        "g2mb2ic2ih8iw12oc2oh8ow12kh7kw7ph3pw3",
        "g1mb1ic1ih16oc1oh8kh7sh2ph3 bfloat16",
        "g2mb2ic2ih6iw7oc4oh6ow7kh5kw5ph2pw2 float16",
        "g6mb2ic6ih7iw7oc6kh3kw3ph1pw1 channels_last",
        "g12mb1ic12ih9iw7oc12oh5ow4kh3kw3sh2sw2ph1pw1 channels_last bfloat16",
        "g16mb1ic16ih7iw8oc16kh5kw2ph4pw0dh1dw2 channels_last bfloat16",
        "g4mb2ic4ih12iw5oc4oh6ow4kh3kw1sh1sw1ph-2pw-1dh1dw0 channels_last",
        "g4mb1ic4id5ih4iw6oc4od3oh2ow3kd3kh3kw3sd2sh2sw2pd1ph1pw1 channels_last",
    ),
]

#: Bands: several tiles along every dimension, strides, dilation, multipliers, uneven and negative paddings.
BANDS = [
    "g2mb3ic2ih5iw17oc2kh4kw11ph2pw5",
    "g2mb2ic2ih6iw20oc4oh3ow9kh3kw9sh2sw2ph1pw3 channels_last",
    "g1ic1oc1mb2iw40ow41kw10pw5 bfloat16",
    *slow(
        "g2mb2ic2ih9iw70oc4oh9ow66kh5kw9ph2pw3 float16",
        "g1ic1oc1mb1ih40iw12oc1oh40ow12kh31kw9ph15pw4 bfloat16",
        "g2mb2ic2ih16iw30oc4kh3kw9dh1dw2ph2pw6 bfloat16 channels_last",
        "g2mb1ic2id4ih5iw9oc4kd3kh2kw9sd2sh2sw1pd1ph1pw3",
        "mb2ic1ih32iw32oc1kh31kw31ph15pw15",
        "g2mb20ic2ih7iw7oc2kh13kw13ph6pw6",
        "g2mb2ic2ih11iw20oc2oh7ow12kh3kw9ph-1pw-1",
        "g2mb1ic2id7ih8iw12oc2kd2kh3kw9sd3sh2sw2dd1dh2dw1pd1ph2pw6",
    ),
]

#: For the whole conformance suite: alignment, poison, strides of zero, NaN, repeated bits.
CONFORM = [
    "g2mb1ic2ih2iw3oc2oh2ow3kh1kw3ph0pw1 channels_last",
    *slow(
        "g1mb2ic1ih3iw4oc1oh3ow4kh2kw3ph0pw1 float16",
        "g2mb1ic2ih3iw4oc2kh3kw2ph1pw1 channels_last",
        "g2mb1ic2iw5oc2ow5kw3pw2",
        "g1mb1ic1ih3iw5oc1kh3kw3ph1pw1",
        "g1mb1ic1ih5oc2oh3kh3sh2ph1 float16",
        "g1mb1ic1ih3iw3oc1kh3kw2sh2sw1ph1pw0dh0dw1",
        "g2mb1ic2id2ih2iw3oc2kd2kh2kw2sd1sh2sw1pd1ph0pw1 channels_last",
        "g1mb2ic1iw3oc1ow6kw4sw2pw1 transposed",
    ),
]
CONFORM_BANDS = [
    "g2mb2ic2ih9iw12oc2kh7kw9ph3pw4",
    "g2mb1ic2ih8iw20oc4kh3kw10sh2sw3ph1pw2dh0dw1 channels_last",
    "g2mb2ic2iw16oc2ow16kw9pw4 float16",
]


def assert_exact(backend: TritonBackend, problem: ConvProblem) -> None:
    """Every pass and sweep that the backend takes, alone and in a workspace, with the check of first use beside."""
    given = integer_operands(problem, PASSES, 0)
    sums = given["grad_output"].double().sum(dim=(0, *range(2, 2 + problem.ndim))).to(problem.dtype)
    expected = {"grad_bias": sums}
    for pass_ in PASSES:
        operands = [given[slot] for slot in OPERANDS[pass_]]
        expected[pass_] = REFERENCE.bind(problem, (pass_,))(*operands)
        if backend.reasons_against(problem, (pass_,), CPU):
            continue
        got = backend.bind(problem, (pass_,))(*operands)
        assert torch.equal(got, expected[pass_]), pass_
        assert first_check.fault(problem, (pass_,), {**given, pass_: got}, "direct") is None
    for outputs in reversed(backend.sweeps):  # the larger one first
        if backend.reasons_against(problem, outputs, CPU):
            continue
        size = backend.workspace(problem, outputs)
        scratch = torch.full((size,), 255, dtype=torch.uint8) if size else None
        slots = (given["grad_output"], given["input"], given["weight"])
        got = backend.bind(problem, outputs)(*slots, scratch)
        for output, tensor in zip(outputs, got, strict=True):
            assert torch.equal(tensor, expected[output]), output
        assert first_check.fault(problem, outputs, {**given, **dict(zip(outputs, got, strict=True))}, "direct") is None
        break


@pytest.mark.parametrize("text", EXACT)
def test_exact(text: str) -> None:
    problem = ConvProblem.parse(text)
    assert not TritonBackend().reasons_against(problem, ("forward",), CPU)
    assert_exact(TritonBackend(), problem)


@pytest.mark.parametrize("text", BANDS)
def test_bands_are_exact(text: str) -> None:
    problem = ConvProblem.parse(text)
    assert not TritonBandedBackend().reasons_against(problem, ("forward",), CPU)
    assert_exact(TritonBandedBackend(), problem)


@pytest.mark.parametrize("text", CONFORM)
@pytest.mark.parametrize("output", ["forward", *slow("grad_input", "grad_weight", "grad_bias")])
def test_conforms(text: str, output: Output) -> None:
    results = check_problem(TritonBackend(), text, output, repeats=2)
    assert not [str(r) for r in results if r.status == "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("text", CONFORM_BANDS)
@pytest.mark.parametrize("output", PASSES)
def test_bands_conform(text: str, output: Output) -> None:
    results = check_problem(TritonBandedBackend(), text, output, repeats=2)
    assert not [str(r) for r in results if r.status == "failed"]


_BANDED = TritonBandedBackend(), "g2mb1ic2ih4iw12oc2kh3kw9ph1pw3"


@pytest.mark.parametrize(
    ("backend", "text", "pass_"),
    [
        (*_BANDED, "grad_weight"),
        (TritonBackend(), "g1mb1ic1iw5oc1ow5kw3pw2", "grad_weight"),
        *slow(
            (*_BANDED, "forward"),
            (*_BANDED, "grad_input"),
            (TritonBackend(), "g2mb1ic2ih5iw4oc2oh3ow2kh3kw3sh2sw2ph1pw1", "grad_weight"),
            (TritonBackend(), "g2mb1ic2ih3iw4oc2kh3kw3ph1pw1 channels_last", "grad_weight"),
        ),
    ],
)
def test_what_is_not_finite_stays_with_its_readers(backend: TritonBackend, text: str, pass_: Output) -> None:
    """A band's zeros meet every value of a row, and in a sweep the padding's zeros those of the input."""
    (result,) = check_problem(backend, text, pass_, properties=["nonfinite"])
    assert result.status == "passed", str(result)


@pytest.mark.parametrize("bad", [float("inf"), *slow(float("nan"))])
@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("g3mb1ic3ih3iw4oc3kh3kw3ph1pw1sh2sw1 channels_last", TritonBackend()),
        ("g2mb1ic2ih3iw11oc2kh3kw9ph1pw4", TritonBandedBackend()),
        *slow(
            ("g2mb1ic2ih3iw6oc4kh3kw3ph1pw1 bias", TritonBackend()),
            ("g2mb1ic2id2ih3iw3oc2kd2kh3kw3pd1ph1pw1", TritonBackend()),
        ),
    ],
)
def test_padding_beside_a_weight_that_is_not_finite(text: str, backend: TritonBackend, bad: float) -> None:
    """Only results that read it through the source notice; zeros of the padding are not multiplied with it."""
    problem = ConvProblem.parse(text)
    for pass_ in ("forward", "grad_input"):
        if backend.reasons_against(problem, (pass_,), CPU):
            continue
        given = integer_operands(problem, PASSES, 0)
        first = given[OPERANDS[pass_][0]]
        clean = REFERENCE.bind(problem, (pass_,))(first, given["weight"])
        only = torch.zeros_like(given["weight"])
        only[0].view(-1)[0] = 1
        readers = REFERENCE.bind(problem, (pass_,))(torch.ones_like(first), only) != 0
        given["weight"][0].view(-1)[0] = bad
        bias = torch.ones(clean.shape[1]) if problem.has_bias and pass_ == "forward" else None
        got = backend.bind(problem, (pass_,))(first, given["weight"], bias)
        assert 0 < readers.sum() < readers.numel()
        assert not got[readers].isfinite().any() or first.eq(0).any()
        assert torch.equal(got[~readers], clean[~readers] + (bias is not None))


def test_the_sweep_beside_an_infinite_weight() -> None:
    problem = ConvProblem.parse("g2mb1ic2ih3iw4oc2kh3kw3ph1pw1")
    given = integer_operands(problem, PASSES, 0)
    given["grad_output"] = given["grad_output"].abs() + 1
    given["weight"][0, 0, 0, 0] = float("inf")
    grad_input, grad_weight = TritonBackend().bind(problem, BOTH)(given["grad_output"], given["input"], given["weight"])
    readers = torch.zeros(problem.input_shape, dtype=torch.bool)
    readers[:, 0, : 3 - 1, : 4 - 1] = True  # the others read the padding above or to the left
    assert torch.equal(~grad_input.isfinite(), readers)
    assert grad_weight.isfinite().all()


def test_the_check_of_first_use_finds_one_wrong_element() -> None:
    """In the first and the last image of the channels that it looks at."""
    problem = ConvProblem.parse("g3mb3ic3ih4oc3kh3ph1 bfloat16 channels_last")
    operands = real_operands(problem, PASSES, 0)
    for pass_ in PASSES:
        given = [operands[slot] for slot in OPERANDS[pass_]]
        right = TritonBackend().bind(problem, (pass_,))(*given)
        assert first_check.fault(problem, (pass_,), {**operands, pass_: right}, "direct") is None
        for at in (0, -1):
            wrong = right.clone()
            wrong[(at, 0, at, at) if pass_ == "grad_weight" else (at,) * wrong.dim()] += 0.25 * right.abs().max()
            fault = first_check.fault(problem, (pass_,), {**operands, pass_: wrong}, "direct")
            assert "1 of" in fault
            assert pass_ in fault


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("g2mb1ic2ih4iw5oc2kh3kw2ph1pw1sh2sw1", TritonBackend()),
        ("g2mb1ic2ih4iw5oc2kh3kw2ph1pw1sh2sw1 channels_last", TritonBackend()),
        ("g2mb2ic2ih4iw10oc4oh2ow10kh3kw9ph1pw4sh2sw1", TritonBandedBackend()),
    ],
)
def test_offsets_of_64_bits(text: str, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels with 64-bit offsets, on a problem that fits into an interpreter."""
    narrow = launch.geometry
    monkeypatch.setattr(launch, "geometry", lambda p, adjoint: narrow(p, adjoint=adjoint)._replace(wide=True))
    assert_exact(backend, ConvProblem.parse(text))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_compiled_graph(dynamic: bool) -> None:
    """torch.compile keeps our operators whole, forward and backward, and they find the backend when they run."""
    weight, bias = torch.randn(2, 1, 3), torch.randn(2)

    def step(input: torch.Tensor) -> torch.Tensor:
        return convgrad.conv1d(input, weight, bias, padding=1, groups=2).sin()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (5, 8):
        operands = [torch.randn(2, 2, length, requires_grad=True)]
        operands.append(operands[0].detach().clone().requires_grad_())
        with convgrad.use_backend("triton"), convgrad.trace() as ran:
            result = compiled(operands[0])
            result.sum().backward()
        assert {call.backend for call in ran} == {"triton"}
        expected = torch.nn.functional.conv1d(operands[1], weight, bias, padding=1, groups=2).sin()
        expected.sum().backward()
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(operands[0].grad, operands[1].grad)
    torch._dynamo.reset()


@pytest.mark.parametrize("tensor", ["source", "result"])
def test_offsets_of_more_than_32_bits(tensor: str) -> None:
    """A sequence in one row of channels_last: its length times its channels is the size of a row.

    One program is run, and of its tiles the first and the last, in memory of which nothing else is touched.
    """
    channels, length = 4096, (1 << 19) + 64
    problem = ConvProblem.parse(f"g{channels}mb1ic{channels}ih1iw{length}oc{channels}oh1ow{length}kh1kw3ph0pw1")
    problem = problem.replace(dtype=torch.float16, memory_format=torch.channels_last)
    assert problem.needs_int64
    g = geometry(problem, adjoint=tensor == "source")
    tile = tiles.choose(g, "result")
    made = launch.launch_of(g, "result", False, (-1, -1, -1))
    count = -(-length // tile.columns) // (tile.lanes // tile.line)  # tiles of a line
    size = 2 * length * channels
    memory = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float16) for _ in range(2)]
    src, out = (m.view(1, 1, length, channels).permute(0, 3, 1, 2) for m in memory)
    src[0, 0, 0, -6:] = torch.arange(1.0, 7)
    weight = torch.zeros(channels, 1, 1, 3, dtype=torch.float16)
    weight[0] = torch.tensor([1.0, 10, 100])
    tensors = {"src": src, "centre": src, "weight": weight, "bias": weight, "out": out, "partials": out}
    arguments = made.arguments(count - 1, {**tensors, "bias_partials": out})
    launch.correlate[(1,)](**arguments, **made._options)
    expected = torch.conv1d(src[0, :1, 0, -8:], weight[:1, :, 0].flip(2) if g.adjoint else weight[:1, :, 0], padding=1)
    assert out[0, 0, 0, -tile.columns :].tolist() == expected[0, -tile.columns :].tolist()


@pytest.mark.parametrize("use", ["result", "sum"])
def test_offsets_of_a_weight_of_more_than_32_bits(use: tiles.Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the last channel is run, in memory of which nothing else is touched."""
    channels, taps = 1 << 26, 33
    problem = ConvProblem.parse(f"g{channels}mb1ic{channels}iw1oc{channels}kw{taps}pw{taps // 2} float16")
    assert problem.needs_int64
    made = launch.launch_of(geometry(problem, adjoint=False), use, False, (-1, -1, -1), in_parts=False)
    src, centre, weight = (torch.frombuffer(mmap.mmap(-1, 2 * channels * n), dtype=torch.float16) for n in (1, 1, taps))
    src[-1], weight[-(taps // 2) - 1] = 3, 2
    tensors = {"src": src, "centre": centre, "weight": weight, "bias": weight, "out": centre, "partials": weight}
    if use == "sum":
        centre[-1], weight[-(taps // 2) - 1] = 2, 0
    last = interpreter.TensorHandle(np.array([channels - 1], dtype=np.int32), tl.int32)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", lambda axis: last)
    launch.correlate[(1,)](**made.arguments(1, {**tensors, "bias_partials": centre}), **made._options)
    assert (centre if use == "result" else weight)[-1 if use == "result" else -(taps // 2) - 1] == 6


SILU = [
    "g5mb1ic5ih1iw12oc5ow12kh1kw4pw3 channels_last",
    "g3mb2ic3ih1iw16oc3ow16kh1kw4pw3",
    "g2mb1ic2ih1iw7oc2ow7kh1kw3pw2 float16 channels_last",
]


@pytest.mark.parametrize(
    ("text", "biased"),
    [
        (SILU[0], True), (SILU[1], False), (SILU[2], True),
        *slow((SILU[0], False), (SILU[1], True), (SILU[2], False)),
    ],
)  # fmt: skip
def test_silu(text: str, biased: bool) -> None:
    """Of a result, and its derivative times a gradient, beside weights that are not finite, too."""
    problem = ConvProblem.parse(text)
    given = real_operands(problem, PASSES, 0)
    x, w, g = given["input"], given["weight"], given["grad_output"]
    bias = torch.linspace(-1, 1, problem.out_channels).to(problem.dtype) if biased else None
    run = TritonBackend().bind_silu(problem)
    exact = REFERENCE.bind(problem.replace(dtype=torch.float64), ("forward",))(x.double(), w.double())
    exact = exact if bias is None else exact + bias.double().view(-1, 1, 1)
    for centre, expected in ((None, F.silu(exact)), (g, torch.ops.aten.silu_backward(g.double(), exact))):
        got = run(x, w, bias, centre)
        assert got.is_contiguous(memory_format=problem.memory_format)
        torch.testing.assert_close(got, expected.to(problem.dtype))
        tensors = {"input": x, "weight": w, "bias": bias, "grad_output": centre, "forward": got}
        assert first_check.fault(problem, ("forward",), tensors, "direct", silu=True) is None
        wrong = first_check.fault(problem, ("forward",), {**tensors, "forward": got + 0.25}, "direct", silu=True)
        assert "are further off" in wrong
    w[0].view(-1)[0] = float("inf")  # which meets no padding
    there = TritonBackend().bind(problem, ("forward",))(x, w, bias)
    assert not there.isfinite().all()
    for centre, expected in ((None, F.silu(there)), (g, torch.ops.aten.silu_backward(g, there))):
        assert torch.equal(run(x, w, bias, centre).isfinite(), expected.isfinite())


@pytest.mark.parametrize(("layout", "state"), [("NCL", False), ("NLC", True), *slow(("NCL", True), ("NLC", False))])
def test_causal_conv1d_with_silu(layout: str, state: bool) -> None:
    """In one kernel, whose backward computes the result before SiLU again; and derivatives of that."""
    shape, carried, c = ((2, 2, 6), (2, 2, 2), 2) if layout == "NCL" else ((1, 6, 3), (1, 2, 3), 3)
    tensors = [torch.randn(s).requires_grad_() for s in (shape, (c, 3), (c,), *([carried] if state else []))]

    def call(activation: str | None) -> torch.Tensor:
        x, w, b, *rest = tensors
        s = rest[0] if rest else None
        return convgrad.causal_conv1d(x, w, b, layout=layout, initial_state=s, activation=activation)

    with convgrad.use_backend("triton"), convgrad.trace() as ran:
        fused = call("silu")
        gradients = torch.autograd.grad(fused.square().sum(), tensors, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in gradients), tensors)
        call("silu").sum().backward()
    assert next(r.reason for r in ran) == "requested by name, with SiLU"
    assert "requested by name, with the derivative of SiLU" in [r.reason for r in ran]
    apart = F.silu(call(None))
    expected = torch.autograd.grad(apart.square().sum(), tensors, create_graph=True)
    torch.testing.assert_close(fused, apart)
    assert fused.stride() == apart.stride()
    torch.testing.assert_close(gradients, expected)
    second = torch.autograd.grad(sum(g.square().sum() for g in expected), tensors)
    torch.testing.assert_close(again, second, rtol=1e-4, atol=1e-4)
    for tensor, one in zip(tensors, torch.autograd.grad(F.silu(call(None)).sum(), tensors), strict=True):
        torch.testing.assert_close(tensor.grad, one)


def test_causal_conv1d_with_silu_under_autocast() -> None:
    """In one kernel of the dtype of autocast, rounded once where the two are rounded twice."""
    x, w, b = tensors = [torch.randn(s).requires_grad_() for s in ((2, 3, 6), (3, 3), (3,))]
    with torch.autocast("cpu", torch.bfloat16), convgrad.use_backend("triton"), convgrad.trace() as ran:
        fused = convgrad.causal_conv1d(x, w, b, activation="silu")
        gradients = torch.autograd.grad(fused.sum(), tensors)
    assert {r.convolution.dtype for r in ran} == {torch.bfloat16} == {fused.dtype}
    assert next(r.reason for r in ran) == "requested by name, with SiLU"
    rounded = [t.detach().bfloat16().float().requires_grad_() for t in tensors]
    apart = F.silu(convgrad.causal_conv1d(*rounded))
    torch.testing.assert_close(fused.float(), apart, rtol=1 / 128, atol=1e-3)
    for got, want, t in zip(gradients, torch.autograd.grad(apart.sum(), rounded), tensors, strict=True):
        assert got.dtype == t.dtype
        torch.testing.assert_close(got, want, rtol=1 / 32, atol=1 / 32)
