"""A call goes to the compiled kernel that Triton would have found, with the arguments that it would have given."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from stubbed import install  # noqa: E402 - it needs triton; it lies beside this file

from convgrad.backends.triton import TritonBackend, check, correlate, start  # noqa: E402
from convgrad.errors import BackendError  # noqa: E402
from convgrad.problem import OPERANDS, PASSES, ConvProblem, Output  # noqa: E402

PROBLEM = ConvProblem.parse("g8ic8oc8mb2ih4iw8kh1kw3ph0pw1")
CHANNELS_LAST = PROBLEM.replace(memory_format=torch.channels_last)
SWEEP: tuple[Output, ...] = ("grad_input", "grad_weight", "grad_bias")


class Unchecked(TritonBackend):
    """Nothing is computed by the driver that stands in, so there is nothing to check."""

    def _verifier(self, problem: ConvProblem) -> Any:
        return lambda *_: None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """What the driver was told to start; nothing is known of an earlier test's driver."""
    kept = getattr(request.config, "cache", None)
    if kept is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(kept.mkdir("triton")))
    kernels = (correlate.correlate, correlate.add_partials)

    def clear() -> None:
        for kernel in kernels:
            kernel.device_caches.clear()

    clear()
    made = install(monkeypatch)
    yield made
    made.clear()
    clear()
    gc.collect(1)  # a compiled kernel asks its driver to unload it


def slot(problem: ConvProblem, name: str, shift: int = 0) -> Tensor:
    """A tensor of the problem's layout, ``shift`` elements behind an address that is divisible by 16."""
    like = torch.empty(problem.shape_of(name), memory_format=problem.memory_format if name != "weight" else None)  # type: ignore[arg-type]
    memory = torch.zeros(like.numel() + 8, dtype=problem.dtype)
    return torch.as_strided(memory, like.shape, like.stride(), shift)


def call(backend: TritonBackend, problem: ConvProblem, outputs: tuple[Output, ...], shift: int = 0) -> Any:
    slots = OPERANDS[outputs[0]] if len(outputs) == 1 else ("grad_output", "input", "weight")  # type: ignore[index]
    return backend.bind(problem, outputs)(*(slot(problem, name, shift) for name in slots))


def seen(entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Of each start: the function, the grid, the arguments behind the addresses, and the warps."""
    pointers = {"correlate": 7, "add_partials": 4}
    return [(n, grid, arguments[pointers[n] :], how.num_warps) for n, grid, _, arguments, how in entries]


@pytest.mark.parametrize("problem", [PROBLEM, CHANNELS_LAST], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("outputs", [*((p,) for p in PASSES), SWEEP])
def test_the_second_start_is_the_first_one(
    problem: ConvProblem, outputs: tuple[Output, ...], started: list[tuple[Any, ...]]
) -> None:
    kernel = Unchecked().bind(problem, outputs)
    slots = OPERANDS[outputs[0]] if len(outputs) == 1 else ("grad_output", "input", "weight")  # type: ignore[index]
    given = [slot(problem, name) for name in slots]
    kernel(*given)
    first = seen(started)
    started.clear()
    kernel(*given)
    assert seen(started) == first
    assert first


@pytest.mark.parametrize("text", [" bfloat16", " channels_last"])
def test_an_operand_off_alignment_reaches_no_vector_load(text: str, started: list[tuple[Any, ...]]) -> None:
    """With an address that 16 does not divide (an odd offset into a flat buffer) it is another compiled kernel, whose
    loads are no wider than an element.
    """
    problem = ConvProblem.parse("g64ic64oc64mb64ih16iw16kh1kw3ph0pw1" + text)
    kernel = Unchecked().bind(problem, ("forward",))
    bias = torch.zeros(65, dtype=problem.dtype)
    for shift in (0, 1, 0, 1):
        kernel(slot(problem, "input", shift), slot(problem, "weight"), bias[shift : shift + 64])
    sources = [entry[2] for entry in started]
    assert sources[0] is sources[2]
    assert sources[1] is sources[3]
    compiled = [one for cache in correlate.correlate.device_caches.values() for one in cache[0].values()]
    widest: dict[bool, int] = {}
    for one in compiled:
        loads = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", one.asm["ptx"])
        widest[one.src is sources[1]] = max(int(count or 1) * int(bits) for count, bits in loads)
    assert widest[False] >= 64
    assert widest[True] == 8 * problem.dtype.itemsize


def test_triton_finds_the_kernel_once(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    compiled = start.Launch._compiled
    monkeypatch.setattr(
        start.Launch, "_compiled", lambda self, *args: [found.append(len(started)), compiled(self, *args)][1]
    )
    kernel = Unchecked().bind(PROBLEM, ("forward",))
    for shift in (0, 0, 1, 1, 0, 1):
        kernel(slot(PROBLEM, "input", shift), slot(PROBLEM, "weight"))
    assert found == [0, 2]


def test_hooks_of_a_profiler_are_called(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    driver = triton.runtime.driver.active
    plain = driver.launcher_cls

    def launcher(src: Any, metadata: Any) -> Any:
        run = plain(src, metadata)

        def launched(x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            enter = rest[2]
            entered.append(enter and rest[1].get()["name"])
            run(x, y, z, stream, function, *rest)

        return launched

    monkeypatch.setattr(driver, "launcher_cls", launcher)
    kernel = Unchecked().bind(PROBLEM, ("forward",))
    for hook in (None, lambda metadata: None):
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        kernel(slot(PROBLEM, "input"), slot(PROBLEM, "weight"))
    assert entered == [None, "correlate"]


def test_a_kernel_that_spills_is_compiled_with_all_registers(started: list[tuple[Any, ...]]) -> None:
    triton.runtime.driver.active.spills.append(2)
    kernel = Unchecked().bind(PROBLEM, ("forward",))
    for _ in range(2):
        kernel(slot(PROBLEM, "input"), slot(PROBLEM, "weight"))
    assert [entry[4].maxnreg for entry in started] == [255, 255]


def test_the_grid_of_a_sum_follows_from_the_compiled_kernel(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many programs as run at once; the partial sums that are added are as many as were made."""
    problem = ConvProblem.parse("g2ic2oc2mb64ih32kh1ph0 channels_last")
    for programs in (40, 10):
        monkeypatch.setattr(start, "at_once", lambda compiled, device, programs=programs: programs)
        call(Unchecked(), problem, ("grad_weight",))
        (_, grid, _, _), (_, _, added, _) = seen(started)
        assert programs // 2 < grid[0] <= programs
        assert added[0] == grid[0]  # two channels are one line
        started.clear()


def test_programs_at_once() -> None:
    """65,536 registers and 64 warps are what a multiprocessor has."""
    properties = SimpleNamespace(multi_processor_count=10)
    for registers, each in ((32, 16), (128, 4), (129, 3), (168, 3), (255, 2)):
        compiled = SimpleNamespace(n_regs=registers, metadata=SimpleNamespace(num_warps=4))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
            assert start.at_once(compiled, torch.device("cuda", 0)) == 10 * each


def test_a_new_kernel_is_checked_once(started: list[tuple[Any, ...]]) -> None:
    """With other addresses it is another one. Zeros are what the driver computes, and right; anything else is not."""
    checked: list[tuple[Output, ...]] = []

    class Counting(TritonBackend):
        def _verifier(self, problem: ConvProblem) -> Any:
            return lambda kernel, outputs, *_: checked.append(outputs)

    alone: tuple[Output, ...] = ("forward",)
    for outputs in (alone, SWEEP):
        kernel = Counting().bind(PROBLEM, outputs)
        slots = ("input", "weight") if outputs is alone else ("grad_output", "input", "weight")
        for shift in (0, 0, 1, 1):
            kernel(*(slot(PROBLEM, name, shift) for name in slots))
        assert checked == [outputs] * 2
        checked.clear()


def test_a_kernel_is_checked_once_whatever_the_problem(
    started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another batch is the same kernel, another dtype is not."""
    checked: list[ConvProblem] = []
    monkeypatch.setattr(check, "fault", lambda problem, *_: checked.append(problem))
    backend = TritonBackend()
    large = PROBLEM.replace(batch=8192)
    half = large.replace(dtype=torch.bfloat16)
    for problem in (large, PROBLEM.replace(batch=9216), large, half):
        call(backend, problem, ("forward",))
    assert checked == [large, half]
    assert len(started) == 4


def test_a_wrong_first_result_bans_the_backend(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, _empty=torch.empty, **how: _empty(*shape, **how).fill_(1))
    backend = TritonBackend()
    with pytest.raises(BackendError, match="its forward kernel is wrong on cpu"):
        call(backend, PROBLEM, ("forward",))
    assert any("is wrong" in reason for reason in backend.reasons_against(PROBLEM, ("forward",), torch.device("cpu")))
    started.clear()
    with pytest.raises(BackendError, match="is wrong"):
        call(backend, PROBLEM, ("grad_input",))
    assert not started


def test_nothing_is_checked_during_a_capture(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call outside of one is."""
    checked: list[int] = []
    capture = [True]

    class Counting(TritonBackend):
        def _verifier(self, problem: ConvProblem) -> Any:
            return lambda *_: checked.append(len(started))

    monkeypatch.setattr(start, "capturing", lambda device: capture[0])
    kernel = Counting().bind(PROBLEM, ("forward",))
    for capture[0] in (True, True, False, True, False):
        kernel(slot(PROBLEM, "input"), slot(PROBLEM, "weight"))
    assert checked == [3]
    assert len(started) == 5


def test_a_capture_is_looked_for_on_the_right_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current stream is that of the current device: the question comes inside the guard."""
    entered: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            entered.append(-1)

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_index", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(entered) and entered[-1] == 1)
    assert start.capturing(torch.device("cuda", 1))
    assert not start.capturing(torch.device("cuda", 0))
