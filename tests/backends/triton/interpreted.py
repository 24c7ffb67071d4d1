"""Runs under Triton's interpreter, in the process that `test_interpreter` starts; pytest alone does not collect it.

The interpreter runs one program after the other in numpy, some tens of milliseconds each. So problems are tiny: what
they vary is everything that selects another path through a kernel. Its bfloat16 store truncates, which integers
that bfloat16 holds do not notice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import convgrad
from convgrad.backends.reference import ReferenceBackend
from convgrad.backends.triton import TritonBackend, channel_tiles, patch_tiles, tiles
from convgrad.backends.triton.ways import Way
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output
from convgrad.testing import check_problem

assert os.environ.get("TRITON_INTERPRET") == "1"

# Everything that is counted on a GPU is counted here too, but in smaller numbers: more than one share of a sum, and
# kernels that take several chunks of unrolled positions with some left over.
HERE: dict[ModuleType, dict[str, int]] = {
    tiles: {"WARPS": 16, "_UNROLLED_ROWS": 8, "_UNROLLED_CHUNK": 16},
    patch_tiles: {"_LANES": 4},
    channel_tiles: {"_ENOUGH": 16, "_WARPS": 16, "_LANES": 8, "_LINE": 4},
}
ON_A_GPU = {module: {name: getattr(module, name) for name in sizes} for module, sizes in HERE.items()}
for module, sizes in HERE.items():
    for name, size in sizes.items():
        setattr(module, name, size)

# numpy warns where an infinity meets a zero, also in lanes whose value is not taken.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

CPU = torch.device("cpu")
SWEEP: tuple[Output, ...] = ("grad_input", "grad_weight")

#: 1-D, 2-D and 3-D; strides, dilation, multipliers, uneven and negative padding, even kernels, planes of one element,
#: kernels of more than one chunk, many phases; every dtype in both layouts.
EXACT = """
g1ic1oc1mb2iw17ow17kw4pw3
g2mb1ic2iw21oc2kw11pw5
g3mb2ic3iw17oc6ow4kw4sw3pw-1dw1 float64
g2mb1ic2ih5iw11oc2kh3kw3ph1pw1
g3mb1ic3ih5iw11oc3kh3kw3ph1pw1 channels_last
g2mb1ic2ih9iw11oc2oh5ow6kh3kw3sh2sw2ph1pw0
g3mb2ic3ih9iw11oc3oh5ow6kh3kw3sh2sw2ph1pw0 channels_last bfloat16
mb1ic1ih9iw8oc2kh3kw2sh2sw4ph1pw1dh1dw2 float16
g1ic1oc1mb1ih9iw8oh7ow9kh4kw2sh1sw1ph0pw1
g2mb1ic2ih5iw9oc6kh2kw3ph0pw1 channels_last
mb1ic1ih1iw1oc1kh1kw1
g4mb3ic4ih1iw1oc4kh3kw3ph1pw1 channels_last
g2mb1ic2ih9iw1oc2kh3kw1ph1pw0
g2mb1ic2ih7iw5oc2kh3kw2ph1pw0dh1dw0 float16
mb1ic1id4ih5iw6oc1kd3kh2kw3sd1sh2sw1pd1ph0pw1 bfloat16
g2mb1ic2id4ih5iw6oc2kd3kh3kw3sd2sh1sw2pd1ph1pw1 channels_last float16
mb1ic1id3ih4iw5oc1kd3kh3kw3sd2sh2sw2pd1ph1pw1
mb1ic1ih5iw9oc1kh9kw7ph4pw3
mb1ic1ih3iw5oc1kh7kw9ph3pw4 float64
mb1ic1ih4iw3oc1kh9kw7ph4pw3 channels_last
mb1ic1ih10iw9oc1kh5kw4sh4sw3ph2pw1dh1dw0
""".strip().splitlines()

#: Patches of 2, 4 and 8 columns, read in vectors of 1 to 8 values: long rows in pieces, the last of them cut; strides
#: in both directions, padding of one side; rows that are no multiple of a patch's; columns that no patch can have.
PATCHES = """
g1ic1oc1mb2iw164ow164kw4pw3
g2mb1ic2iw72oc2ow72kw5pw2 bfloat16
g1mb2ic1iw80oc2ow40kw3sw2pw1 float16
g1ic1oc1mb1iw36oc1ow36kw3pw2dw1 float64
g2mb2ic2ih5iw8oc2kh3kw3ph1pw1 bfloat16
g1mb1ic1ih6iw12oc1kh3kw3ph1pw1
g1mb2ic1ih8iw8oc1oh4ow4kh3kw3sh2sw2ph1pw1 float16
g1mb1ic1ih8iw16oc1oh4ow8kh3kw3sh2sw2ph0pw0 bfloat16
g1mb2ic1ih5iw8oc1oh5ow2kh2kw4sw4ph1pw0dh0
g2mb1ic2ih4iw6oc4oh4ow6kh3kw3ph1pw1 float64
g1mb1ic1ih7iw8oc1oh7ow8kh3kw3ph2pw2dh1dw1 bfloat16
g1mb1ic1ih6iw12oc1oh6ow4kh3kw3sw3ph1pw0
g1mb1ic1ih5iw8oc1oh3ow8kh3kw9ph0pw4 float16
g1mb1ic1id3ih4iw4oc1kd3kh3kw3pd1ph1pw1
g1mb2ic1id4ih4iw8oc1od4oh2ow4kd3kh3kw3sh2sw2pd1ph1pw1 bfloat16
g1mb1ic1id4ih2iw4oc1od2oh2ow4kd2kh1kw2sd2pd0ph0pw1
""".strip().splitlines()

#: Patches of channels: vectors of 1 to 8, more of them than a line has and fewer, rows and columns left over,
#: strides in both directions, dilation that leaves rows out, negative padding, kernels of one column or depth.
CHANNELS = """
g8mb2ic8ih8iw8oc8kh3kw3ph1pw1 channels_last bfloat16
g6mb2ic6ih7iw7oc6kh3kw3ph1pw1 channels_last
g12mb1ic12ih9iw7oc12oh5ow4kh3kw3sh2sw2ph1pw1 channels_last bfloat16
g5mb1ic5ih13iw9oc5oh5ow3kh3kw3sh3sw4ph2pw1 channels_last float64
g16mb1ic16ih7iw8oc16kh5kw2ph4pw0dh1dw2 channels_last bfloat16
g4mb2ic4ih12iw5oc4oh6ow4kh3kw1sh1sw1ph-2pw-1dh1dw0 channels_last
g4mb1ic4id3ih5iw4oc4od5oh5ow4kd1kh3kw3pd1ph1pw1 channels_last
g2mb2ic2id4ih6iw3oc2kd3kh3kw3pd1ph1pw1 channels_last bfloat16
g4mb1ic4id5ih4iw6oc4od3oh2ow3kd3kh3kw3sd2sh2sw2pd1ph1pw1 channels_last
""".strip().splitlines()

#: Patches as wide as a row: all lengths, all rows or some, strides in both directions, uneven and negative padding,
#: dilation, multipliers, kernels larger than the plane, depths, and lanes that have no patch.
WHOLE = """
g3mb1ic3ih7oc3kh3ph1
g1mb3ic1ih7oc1kh3ph1 bfloat16
g2mb1ic2ih6iw7oc2kh5kw5ph2pw2 float16
g1ic1oc1mb1ih7kh7ph3 float64
g1mb1ic1ih7iw14oc1kh3kw3ph1pw1
g2mb2ic2ih8iw14oc2oh4ow7kh3kw3sh2sw2ph1pw1 bfloat16
g1mb1ic1ih14iw14oc2oh5ow7kh5kw3sh3sw2ph1pw1
g1mb2ic1ih9iw3oc1oh9ow5kh2kw3ph1pw2 float16
g1mb2ic1ih4iw11oc1oh4ow9kh3kw3ph1pw0
g1mb1ic1ih5iw13oc2kh3kw2ph1pw1dh1dw2
g1mb2ic1ih7iw7oc1kh1kw7ph0pw3
g1mb1ic1ih1iw9oc1oh1ow9kh3kw3ph1pw1
g1mb2ic1ih4iw9oc1oh3ow7kh2kw3ph0pw0
g1mb2ic1ih4iw9oc1oh4ow5kh3kw3ph1pw-1
g1mb1ic1id3ih5iw5oc1kd3kh3kw3pd1ph1pw1 bfloat16
g2mb1ic2id3ih7iw7oc2od2oh4ow4kd2kh3kw3sh2sw2pd0ph1pw1
g1mb1ic1ih30iw7oc1kh3kw3ph1pw1
""".strip().splitlines()

#: For the whole conformance suite: alignment, poison, strides of zero, NaN, repeated bits.
CONFORM = [
    "g2mb1ic2iw5oc2ow5kw3pw2",
    "g1mb2ic1ih3iw4oc1oh3ow4kh2kw3ph0pw1 float16",
    "g1mb1ic1ih3iw5oc1kh3kw3ph1pw1",
    "g1mb1ic1ih5oc2oh3kh3sh2ph1 float16",
    "g2mb1ic2ih3iw4oc2kh3kw2ph1pw1 channels_last",
    "g1mb1ic1ih3iw3oc2kh3kw2sh2sw1ph1pw0dh0dw1",
    "g2mb1ic2id2ih2iw3oc2kd2kh2kw2sd1sh2sw1pd1ph0pw1 float64 channels_last",
    "g1mb2ic1iw3oc1ow6kw4sw2pw1 transposed",
]


def integers(problem: ConvProblem, slot: str) -> torch.Tensor:
    tensor = torch.randint(-2, 3, problem.shape_of(slot)).to(problem.dtype)  # type: ignore[arg-type]
    return tensor if slot == "weight" else tensor.contiguous(memory_format=problem.memory_format)


@pytest.mark.parametrize("text", [*EXACT, *PATCHES, *WHOLE, *CHANNELS])
def test_exact(text: str) -> None:
    problem = ConvProblem.parse(text)
    backend, reference = TritonBackend(), ReferenceBackend()
    given = {slot: integers(problem, slot) for slot in ("input", "weight", "grad_output")}
    expected = {p: reference.bind(problem, (p,))(*(given[s] for s in OPERANDS[p])) for p in PASSES}
    for pass_ in PASSES:
        assert not backend.reasons_against(problem, (pass_,), CPU)
        got = backend.bind(problem, (pass_,))(*(given[slot] for slot in OPERANDS[pass_]))
        assert torch.equal(got, expected[pass_]), pass_
    outputs: tuple[Output, ...] = (*SWEEP, "grad_bias")
    if backend.reasons_against(problem, outputs, CPU):
        outputs = SWEEP
    if not backend.reasons_against(problem, outputs, CPU):
        got = backend.bind(problem, outputs)(given["grad_output"], given["input"], given["weight"])
        sums = given["grad_output"].double().sum(dim=(0, *range(2, 2 + problem.ndim))).to(problem.dtype)
        for output, tensor in zip(outputs, got, strict=True):
            assert torch.equal(tensor, sums if output == "grad_bias" else expected[output]), output


@pytest.mark.parametrize("text", ["g2mb2ic2ih7oc2kh3ph1", "g1mb3ic1ih7oc1kh3sh2ph1 bfloat16"])
@pytest.mark.parametrize("apart", [0, 1])
def test_whole_rows_wherever_they_lie(text: str, apart: int) -> None:
    """Rows, planes and images with gaps between them; one channel, whose stride may be anything."""
    problem = ConvProblem.parse(text)
    backend, reference = TritonBackend(), ReferenceBackend()
    given = {slot: integers(problem, slot) for slot in ("input", "weight", "grad_output")}
    placed = dict(given)
    for slot in ("input", "grad_output"):
        t = given[slot]
        rows = t.shape[3] + apart
        plane = t.shape[2] * rows + apart
        strides = (t.shape[1] * plane + apart, plane if t.shape[1] > 1 else 1, rows, 1)
        memory = torch.full((sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True)) + 1,), torch.nan)
        placed[slot] = torch.as_strided(memory.to(t.dtype), t.shape, strides).copy_(t)
    for pass_ in PASSES:
        expected = reference.bind(problem, (pass_,))(*(given[slot] for slot in OPERANDS[pass_]))
        assert torch.equal(backend.bind(problem, (pass_,))(*(placed[slot] for slot in OPERANDS[pass_])), expected), (
            pass_
        )
    got = backend.bind(problem, SWEEP)(placed["grad_output"], placed["input"], placed["weight"])
    for pass_, tensor in zip(("grad_input", "grad_weight"), got, strict=True):
        assert torch.equal(tensor, reference.bind(problem, (pass_,))(*(given[slot] for slot in OPERANDS[pass_]))), pass_


@pytest.mark.parametrize("text", CONFORM)
@pytest.mark.parametrize("output", [*PASSES, "grad_bias"])
def test_conforms(text: str, output: Output) -> None:
    results = check_problem(TritonBackend(), text, output, repeats=2)
    assert not [str(r) for r in results if r.status == "failed"]


def test_channel_lanes_of_a_contiguous_problem() -> None:
    """grad_weight has no layout of its own: operands with their channels together are read as they lie."""
    problem = ConvProblem.parse("g6mb2ic6ih5iw7oc6kh3kw3ph1pw1")
    given = {slot: integers(problem, slot) for slot in ("input", "grad_output")}
    apart = {slot: tensor.movedim(1, -1).contiguous().movedim(-1, 1) for slot, tensor in given.items()}
    got = TritonBackend().bind(problem, ("grad_weight",))(apart["grad_output"], apart["input"])
    expected = ReferenceBackend().bind(problem, ("grad_weight",))(given["grad_output"], given["input"])
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "text",
    [
        "g6mb2ic6iw13oc6ow13kw4pw3",
        "g8mb1ic8iw32oc8ow16kw4sw2pw1 bfloat16 bias",
        "g3mb2ic3iw12oc6kw5sw2pw2dw1 bfloat16 bias",
    ],
)
def test_a_sequence_with_its_channels_together_is_read_as_it_lies(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides (L*C, 1, C), in every pass: nothing is copied, and the result is contiguous as PyTorch's is."""
    from convgrad.backends.triton import launch

    def ready(problem: ConvProblem, tensor: torch.Tensor, lanes: bool) -> torch.Tensor:
        assert lanes
        return tensor

    monkeypatch.setattr(launch, "ready", ready)
    problem = ConvProblem.parse(text)
    backend, reference = TritonBackend(), ReferenceBackend()
    given = {slot: integers(problem, slot) for slot in ("input", "weight", "grad_output")}
    apart = {**given, **{s: given[s].transpose(1, 2).contiguous().transpose(1, 2) for s in ("input", "grad_output")}}
    expected = {p: reference.bind(problem, (p,))(*(given[s] for s in OPERANDS[p])) for p in PASSES}
    for pass_ in PASSES:
        got = backend.bind(problem, (pass_,))(*(apart[slot] for slot in OPERANDS[pass_]))
        assert torch.equal(got, expected[pass_]), pass_
        assert got.is_contiguous()
    if problem.has_bias:
        bias = torch.arange(problem.out_channels).to(problem.dtype)
        got = backend.bind(problem, ("forward",))(apart["input"], apart["weight"], bias)
        assert torch.equal(got, expected["forward"] + bias[:, None])
    if not backend.reasons_against(problem, (*SWEEP, "grad_bias"), CPU):
        got = backend.bind(problem, (*SWEEP, "grad_bias"))(apart["grad_output"], apart["input"], apart["weight"])
        assert torch.equal(got[0], expected["grad_input"])
        assert torch.equal(got[1], expected["grad_weight"])
        assert torch.equal(got[2], given["grad_output"].sum((0, 2)))


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels with 64-bit offsets, on a problem that fits into an interpreter."""
    from convgrad.backends.triton import launch

    monkeypatch.setattr(launch, "needs_wide", lambda *_: True)
    for layout in ("", " channels_last"):
        problem = ConvProblem.parse("g2mb1ic2ih5iw6oc2kh3kw3ph1pw1sh2sw1" + layout)
        given = {slot: integers(problem, slot) for slot in ("input", "weight", "grad_output")}
        for pass_ in PASSES:
            operands = [given[slot] for slot in OPERANDS[pass_]]
            expected = ReferenceBackend().bind(problem, (pass_,))(*operands)
            assert torch.equal(TritonBackend().bind(problem, (pass_,))(*operands), expected)


WAYS = [
    ("forward", Way("channels", strided=True, multiplied=True)),
    ("sweep", Way("channels", strided=True, deep=True)),
    ("forward", Way("patches of channels", 1, 4, strided=True)),
    ("grad_input", Way("patches of channels", 4, 2, sequence=True)),
    ("sweep", Way("patches of channels", 1, 2)),
    ("grad_weight", Way("columns", strided=True)),
    ("forward", Way("patches", 4, 4, deep=True)),
    ("grad_input", Way("patches", 4, 2, strided=True, wide=True)),
    ("grad_weight", Way("patches", 4, 4, pieces=True, multiplied=True)),
    ("sweep", Way("patches", 4, 4)),
    ("grad_weight", Way("patches", 16, 16, whole=2)),
    ("sweep", Way("patches", 8, 4, whole=1, strided=True)),
]


@pytest.mark.parametrize(("what", "way"), WAYS)
def test_the_check_of_first_use(what: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds nothing wrong with these kernels, and one wrong element of what they gave."""
    from convgrad.backends.triton import launch, selfcheck

    for module, sizes in ON_A_GPU.items():
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
    launch._bound.cache_clear()
    given: list[Any] = []
    right = launch.bound

    def bound(*args: Any, **options: bool) -> Callable[..., Any]:
        call = right(*args, **options)
        return lambda *tensors: given.append(call(*tensors)) or given[-1]

    monkeypatch.setattr(launch, "bound", bound)
    assert selfcheck.first_fault(what, torch.float32, way, CPU) is None
    last = given[-1][1] if what in ("sweep", "grad_weight") else given[-1]
    last[(-1,) * last.dim()] += 1
    monkeypatch.setattr(launch, "bound", lambda *_, **__: lambda *_: given[-1])
    fault = selfcheck.first_fault(what, torch.float32, way, CPU)
    assert fault is not None
    assert "1 of" in fault


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
