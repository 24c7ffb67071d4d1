"""What the backends say of themselves and how they choose tiles, without a GPU."""

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import convgrad
from convgrad.backends.triton import TritonBackend, TritonBandedBackend, bands, tiles
from convgrad.backends.triton.sliding_sum import geometry
from convgrad.diagnostics.explain import explain_problem
from convgrad.problem import PASSES, ConvProblem
from convgrad.testing import problems

CUDA = torch.device("cuda", 0)
DEPTHWISE = ConvProblem.parse("g32mb4ic32ih28oc32kh3ph1")
LARGE = ConvProblem.parse("g384ic384oc384mb32ih32kh31ph15")


@pytest.fixture(params=[True, False], ids=["tf32", "float32"])
def tf32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("convgrad.settings.cudnn_allows_tf32", lambda: request.param)
    return bool(request.param)


def reasons(problem: ConvProblem, *outputs: str, device: torch.device = CUDA, banded: bool = False) -> str:
    backend = TritonBandedBackend() if banded else TritonBackend()
    return "; ".join(backend.reasons_against(problem, outputs or ("forward",), device))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[TritonBackend.__module__], "_installed", lambda: False)
    assert "not installed" in reasons(DEPTHWISE)


def test_reasons() -> None:
    pytest.importorskip("triton")
    both = ("grad_input", "grad_weight")
    assert not reasons(DEPTHWISE)
    assert not reasons(DEPTHWISE, *both, "grad_bias")
    assert not reasons(DEPTHWISE, device=torch.device("xpu"))
    assert "not on cpu" in reasons(DEPTHWISE, device=torch.device("cpu"))
    assert "depthwise" in reasons(ConvProblem.parse("ic32ih28oc32kh3ph1"))
    assert "float64" in reasons(DEPTHWISE.replace(dtype=torch.float64))
    assert "at most 49" in reasons(LARGE)
    assert "at most 49" in reasons(ConvProblem.parse("g8ic8id9ih9iw9oc8kd5kh5kw5pd2ph2pw2"), "grad_weight")
    assert not reasons(ConvProblem.parse("g8ic8id9ih9iw9oc8kd5kh5kw5pd2ph2pw2"))
    wide = ConvProblem.parse("g8ic8ih20oc8kh7ph3")
    assert not reasons(wide, *both)
    assert not reasons(ConvProblem.parse("g8ic8ih20oc8oh10kh7sh2ph3"), *both)
    for beyond in ("ih21kh7ph3", "ih20kh7ph6dh1"):  # patches that end outside, longer rows: no registers for masks
        assert "so many" in reasons(ConvProblem.parse("g8ic8oc8" + beyond), *both)
    assert "both gradients of so many" in reasons(wide.replace(memory_format=torch.channels_last), *both)
    assert not reasons(wide, "grad_input")
    assert not reasons(wide, "grad_weight")
    doubled = ConvProblem.parse("g8ic8ih9oc16kh3ph1")
    assert not reasons(doubled)
    assert "one output channel" in reasons(doubled, *both)
    assert "one output channel" in reasons(doubled.replace(memory_format=torch.channels_last))
    assert "sum of its own" in reasons(ConvProblem.parse("g8ic8ih20oc8kh3ph1sh2"), *both, "grad_bias")


def test_reasons_of_bands(tf32: bool) -> None:
    pytest.importorskip("triton")
    for pass_ in PASSES:
        assert ("allow_tf32" in reasons(LARGE, pass_, banded=True)) is not tf32
        assert not reasons(LARGE.replace(dtype=torch.bfloat16), pass_, banded=True)
        assert TritonBandedBackend().arithmetic(LARGE, pass_, CUDA) == "tf32"
        assert TritonBandedBackend().arithmetic(LARGE.replace(dtype=torch.float16), pass_, CUDA) == "direct"
    half = torch.bfloat16
    assert "mostly zeros" in reasons(
        ConvProblem.parse("g8ic8ih20iw20oc8kh31kw3ph15pw1").replace(dtype=half), banded=True
    )
    for columns in (64, 65):
        long = ConvProblem.parse(f"g8ic8iw200oc8ow200kw{columns}pw{columns - 1}").replace(dtype=half)
        assert not reasons(long, "forward", banded=True)
        assert ("at most 64 columns" in reasons(long, "grad_weight", banded=True)) == (columns > 64)
    strided = ConvProblem.parse("g8ic8ih20oc8kh9ph4sh2").replace(dtype=half)
    assert "without a stride" in reasons(strided, "grad_input", banded=True)
    assert not reasons(strided, banded=True)


@pytest.mark.parametrize(("chip", "usable"), [("cuda sm_75", False), ("v100", False), ("a100", True), ("h100", True)])
def test_a_chip_without_these_tensor_cores(chip: str, usable: bool) -> None:
    pytest.importorskip("triton")
    rows = explain_problem(LARGE.replace(dtype=torch.float16), device=chip).rows
    said = {row.output: "; ".join(row.reasons) for row in rows if row.backend == "triton:banded"}
    assert said.keys() == set(PASSES)
    for sentence in said.values():
        assert ("compute capability 8.0" in sentence) is not usable


def depthwise(problem: ConvProblem) -> ConvProblem:
    """The nearest depthwise problem."""
    multiplier = max(1, problem.out_channels // problem.groups)
    return problem.replace(in_channels=problem.groups, out_channels=problem.groups * multiplier)


@given(problems())
def test_tiles(problem: ConvProblem) -> None:
    """Vectors that rows or channels fall into, powers of two where triton wants them, and every result in one patch."""
    problem = depthwise(problem)
    for use, adjoint in (("result", False), ("result", True), ("sum", False), ("sweep", True)):
        g = geometry(problem, adjoint=adjoint)
        tile = tiles.choose(g, use)
        if tile is None:
            continue
        _, height, width = g.axes
        for n in (tile.vector, tile.loaded, tile.stored, tile.line, tile.lanes):
            assert n & (n - 1) == 0 < n
        assert tile.lanes % tile.line == 0
        assert g.channels % tile.vector == width.source % tile.loaded == width.result % tile.stored == 0
        assert tile.columns % tile.stored == 0
        for axis, results in ((height, tile.rows), (width, tile.columns)):
            assert not g.adjoint or results >= axis.result or results % axis.stride == 0
        step = tile.columns // width.stride if g.adjoint else tile.columns * width.stride
        assert tile.columns >= width.result or step % tile.loaded == 0
        if use != "result":
            held = 4 * tiles.partial_values(problem, use, False)
            for programs in (1, 100, 396, 1024, 5000):
                count = tiles.parts(g, use, tile, programs)
                assert count == 1 or 4 * count * g.channels * g.kernel_elements <= held


@given(problems())
def test_bands(problem: ConvProblem) -> None:
    """Powers of two, no less than a tensor core takes, and partial sums that the declared workspace holds."""
    problem = depthwise(problem)
    for use, adjoint in (("result", False), ("result", True), ("sum", False)):
        g = geometry(problem, adjoint=adjoint)
        band = bands.choose(g, use)
        assert all(n & (n - 1) == 0 < n for n in band)
        assert band.rows * band.images >= 16
        assert band.taps * band.depth >= 16
        assert band.width >= 8
        if use == "sum":
            count = bands.parts(g, band)
            held = TritonBandedBackend().workspace(problem, ("grad_weight",))
            assert count == 1 or 4 * count * g.channels * g.kernel_elements <= held


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_traced_for_a_gpu_that_is_not_here(memory_format: torch.memory_format) -> None:
    """A graph of fake CUDA tensors keeps our operators, and nothing of this backend is run for it."""
    pytest.importorskip("triton")

    def step(input: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[object, ...]:
        result = convgrad.conv2d(input, weight, padding=1, groups=8)
        return result, *convgrad.convolution_backward(grad_output, input, weight, None, 1, 1, groups=8)

    with FakeTensorMode(), convgrad.use_backend("triton"):
        image = torch.empty(2, 8, 14, 14, device="cuda", dtype=torch.bfloat16, memory_format=memory_format)
        weight = torch.empty(8, 1, 3, 3, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(step)(image, weight, torch.empty_like(image))
        found: Any = step(image, weight, torch.empty_like(image))
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.convgrad.convolution.default in called
    assert torch.ops.convgrad.convolution_backward.default in called
    for like, made in zip((image, image, weight), found[:3], strict=True):
        assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)
