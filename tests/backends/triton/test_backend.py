"""What the backend says of itself, with or without triton, with or without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product
from typing import cast

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import convgrad
from convgrad.backends.triton import TritonBackend, selfcheck
from convgrad.backends.triton.geometry import geometry
from convgrad.backends.triton.tiles import candidates, fixed, parts
from convgrad.backends.triton.ways import Way, tiny, way_of
from convgrad.errors import BackendError
from convgrad.problem import OPERANDS, ConvProblem, Pass
from convgrad.testing import problems

CUDA = torch.device("cuda", 0)
DEPTHWISE = ConvProblem.parse("g32mb4ic32ih28oc32kh3ph1")


def on_gpu(problem: ConvProblem) -> tuple[Tensor, Tensor]:
    """Operands of ``forward`` on a GPU that is not here."""
    with FakeTensorMode():
        input = torch.empty(problem.input_shape, dtype=problem.dtype, device=CUDA, memory_format=problem.memory_format)
        return input, torch.empty(problem.weight_shape, dtype=problem.dtype, device=CUDA)


def reasons(problem: ConvProblem, *outputs: str, device: torch.device = CUDA) -> str:
    return "; ".join(TritonBackend().reasons_against(problem, outputs or ("forward",), device))  # type: ignore[arg-type]


def test_importing_it_needs_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from convgrad.backends.triton import TritonBackend as T; T()"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def test_reasons() -> None:
    pytest.importorskip("triton")
    assert not reasons(DEPTHWISE)
    assert not reasons(DEPTHWISE, "grad_input", "grad_weight", "grad_bias")
    assert not reasons(DEPTHWISE, device=torch.device("xpu"))
    assert "not on cpu" in reasons(DEPTHWISE, device=torch.device("cpu"))
    assert "depthwise" in reasons(ConvProblem.parse("ic32ih28oc32kh3ph1"))
    assert "int32" in reasons(DEPTHWISE.replace(dtype=torch.int32))
    assert "sum" in reasons(DEPTHWISE, "grad_bias")


def test_reasons_against_a_sweep() -> None:
    pytest.importorskip("triton")
    both = ("grad_input", "grad_weight")
    assert "one output channel" in reasons(ConvProblem.parse("g8ic8ih9oc16kh3ph1"), *both)
    assert "at most 49" in reasons(ConvProblem.parse("g8ic8ih20oc8kh9ph4"), *both)
    assert "at most 27" in reasons(ConvProblem.parse("g8ic8ih20oc8kh7ph3 channels_last"), *both)
    assert "sum of its own" in reasons(ConvProblem.parse("g8ic8ih20oc8kh3ph1sh2"), *both, "grad_bias")
    assert "one sweep" in reasons(DEPTHWISE, "forward", "grad_input")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[TritonBackend.__module__], "_installed", lambda: False)
    assert "not installed" in reasons(DEPTHWISE)


@pytest.mark.parametrize("fault", [None, "its forward kernel is wrong"])
def test_trust(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is checked once on each device, and a wrong one bans the backend there."""
    pytest.importorskip("triton")
    from convgrad.backends.triton import launch

    asked: list[str] = []

    def first_fault(what: str, *_: object) -> str | None:
        asked.append(what)
        return fault

    monkeypatch.setattr(selfcheck, "first_fault", first_fault)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    backend = TritonBackend()
    for _ in range(2):
        if fault is None:
            backend._trust(DEPTHWISE, "forward", *on_gpu(DEPTHWISE))
        else:
            with pytest.raises(BackendError, match=fault):
                backend._trust(DEPTHWISE, "forward", *on_gpu(DEPTHWISE))
    assert asked == ["forward"]
    assert backend.reasons_against(DEPTHWISE, ("forward",), CUDA) == ([] if fault is None else [fault])
    assert not backend.reasons_against(DEPTHWISE, ("forward",), torch.device("cuda", 1))


@pytest.mark.parametrize(
    "text",
    [
        "g32mb4ic32ih28oc32kh3ph1 channels_last",
        "g32mb4ic32ih28oc32kh3ph1 bfloat16",
        "g32mb4ic32ih26oc32kh3ph1",
        "g32mb4ic32ih28oc32kh3ph1sh2",
        "g32mb4ic32ih28oc64kh3ph1",
        "g32mb4ic32ih28oc32kh13ph6",
        "g32mb4ic32iw4096oc32kw3pw1",
        "g32mb4ic32id8ih28iw28oc32kd3kh3kw3pd1ph1pw1",
        "g512mb512ic512ih112oc512kh3ph1",
    ],
)
def test_one_kernel_is_not_trusted_for_another(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lanes, vectors, dtypes, directions or offsets are other kernels; another batch or height is not."""
    pytest.importorskip("triton")
    from convgrad.backends.triton import launch

    asked: list[object] = []
    monkeypatch.setattr(selfcheck, "first_fault", lambda what, dtype, way, device: asked.append((what, dtype, way)))
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    backend = TritonBackend()
    for like in ("g32mb4ic32ih28oc32kh3ph1", "g32mb2ic32ih56oc32kh5ph2", text, text):
        problem = ConvProblem.parse(like)
        backend._trust(problem, "forward", *on_gpu(problem))
    assert len(set(asked)) == len(asked) == 2


def every_way(what: str) -> Iterator[tuple[torch.dtype, Way]]:
    for dtype in (torch.float32, torch.bfloat16):
        for strided, multiplied, deep in product((False, True), repeat=3):
            if what == "sweep" and multiplied:
                continue
            known = {"strided": strided, "multiplied": multiplied, "deep": deep}
            if what != "sweep" or (deep and strided):
                yield dtype, Way("channels", **known)
            if not deep and what != "sweep":
                yield dtype, Way("channels", sequence=True, **known)
            if strided or what != "sweep":
                yield dtype, Way("columns", **known)
            if not multiplied:
                yield from ((dtype, way) for way in patches_of_channels(what, 16 // dtype.itemsize, known))
            yield from ((dtype, way) for way in patches_of_columns(what, 16 // dtype.itemsize, known))


def patches_of_channels(what: str, widest: int, known: dict[str, bool]) -> Iterator[Way]:
    vectors = [v for v in (1, 2, 4, 8) if v <= widest]
    for vector, together in product(vectors, vectors):
        if together == 1:
            yield Way("patches of channels", 1, vector, **known)
        if not known["deep"] and (what != "grad_weight" or together == 1):
            yield Way("patches of channels", together, vector, sequence=True, **known)


def patches_of_columns(what: str, widest: int, known: dict[str, bool]) -> Iterator[Way]:
    vectors = [v for v in (1, 2, 4, 8) if v <= widest]
    step = 2 if known["strided"] else 1
    for columns, vector, pieces in product(vectors, vectors, (False, True)):
        adjoint = what in ("grad_input", "sweep")
        most = columns // step if adjoint else columns * step
        if vector <= most and not (known["deep"] and pieces):
            yield Way("patches", columns, vector, pieces, **known)
    for columns, vector, whole in product((4, 8, 16), (4, 8, 16), (1, 2)):
        long = max(columns, vector) > 8
        if columns > 2 * whole and (not long or what == "grad_weight" or (what != "sweep" and widest == 8)):
            yield Way("patches", columns, vector, whole=whole, **known)


@pytest.mark.parametrize("what", ["forward", "grad_input", "grad_weight", "sweep"])
def test_the_tiny_problem_runs_the_kernel_that_is_asked_about(what: str) -> None:
    for dtype, way in every_way(what):
        problem = tiny(what, dtype, way)
        first, second = OPERANDS["grad_weight" if what == "sweep" else cast(Pass, what)]
        a, b = (torch.empty(problem.shape_of(slot), dtype=dtype, device="meta") for slot in (first, second))
        if way.sequence:
            a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
        elif b.dim() == a.dim():
            a, b = (t.contiguous(memory_format=problem.memory_format) for t in (a, b))
        assert way_of(problem, what, a, b) == way, str(problem)


def depthwise(problem: ConvProblem) -> ConvProblem:
    """The nearest depthwise problem."""
    multiplier = max(1, problem.out_channels // problem.groups)
    return problem.replace(in_channels=problem.groups, out_channels=problem.groups * multiplier)


@given(problems())
def test_every_kernel_position_belongs_to_one_phase(problem: ConvProblem) -> None:
    """The phases of grad_input share out the kernel positions, and a result reads where the definition says."""
    g = geometry(depthwise(problem), adjoint=True, channel_lanes=problem.channels_last)
    for axis in g.axes:
        seen: list[int] = []
        for phase in range(axis.phases):
            hit = [k for k in range(axis.kernel) if (phase + axis.low - k * axis.dilation) % axis.stride == 0]
            assert len(hit) <= axis.taps
            steps = {b - a for a, b in pairwise(hit)}
            assert steps <= {axis.tap_stride}
            offsets = [(phase + axis.low - k * axis.dilation) // axis.stride for k in hit]
            assert {b - a for a, b in pairwise(offsets)} <= {axis.tap_step}
            seen += hit
        assert sorted(seen) == list(range(axis.kernel))


@given(problems())
def test_tiles(problem: ConvProblem) -> None:
    """Powers of two where triton wants them, and shares that the declared workspace holds."""
    problem = depthwise(problem)
    for channel_lanes in (False, True):
        for use, adjoint in (("result", False), ("result", True), ("sum", False), ("sweep", True)):
            g = geometry(problem, adjoint=adjoint, channel_lanes=channel_lanes)
            chosen = candidates(g, use)  # type: ignore[arg-type]
            assert chosen[0] == fixed(g, use)  # type: ignore[arg-type]
            for tile in chosen:
                for n in (tile.items, tile.lanes, tile.warps):
                    assert n & (n - 1) == 0
                    assert n >= 1
                assert tile.rows >= 1
                assert 1 <= tile.th <= g.axes[1].taps
                assert 1 <= tile.tw <= g.axes[2].taps
            if use == "sum":
                count = parts(g, chosen[0])
                held = TritonBackend().workspace(problem, ("grad_weight",))
                width = 8 if problem.dtype == torch.float64 else 4
                assert count == 1 or count * g.channels * g.kernel_elements * width <= held


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_traced_for_a_gpu_that_is_not_here(memory_format: torch.memory_format) -> None:
    """A graph of fake CUDA tensors keeps our operators, and nothing of this backend is run for it."""

    def step(input: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[object, ...]:
        result = convgrad.conv2d(input, weight, padding=1, groups=8)
        return result, *convgrad.convolution_backward(grad_output, input, weight, None, 1, 1, groups=8)

    with FakeTensorMode(), convgrad.use_backend("triton"):
        image = torch.empty(2, 8, 14, 14, device="cuda", dtype=torch.bfloat16, memory_format=memory_format)
        weight = torch.empty(8, 1, 3, 3, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(step)(image, weight, torch.empty_like(image))
        result, grad_input, grad_weight, _ = step(image, weight, torch.empty_like(image))  # type: ignore[misc]
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.convgrad.convolution.default in called
    assert torch.ops.convgrad.convolution_backward.default in called
    for like, made in ((image, result), (image, grad_input), (weight, grad_weight)):
        assert (made.shape, made.dtype, made.device) == (like.shape, like.dtype, like.device)


def test_a_captured_call_is_checked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be waited for in a capture: the kernel runs unchecked there, and is checked at the next call."""
    pytest.importorskip("triton")
    from convgrad.backends.triton import launch

    asked: list[str] = []
    capture = [True]
    monkeypatch.setattr(selfcheck, "first_fault", lambda what, *_: asked.append(what))
    monkeypatch.setattr(launch, "capturing", lambda device: capture[0])
    backend = TritonBackend()
    seen: list[tuple[bool, int]] = []
    for capture[0] in (True, False, True, False):
        trusted = backend._trust(DEPTHWISE, "forward", *on_gpu(DEPTHWISE))
        seen.append((trusted, len(asked)))
    assert seen == [(False, 0), (True, 1), (True, 1), (True, 1)]
