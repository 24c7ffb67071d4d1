"""A call goes to the compiled kernel that Triton would have found, with the arguments that it would have given."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from stubbed import install  # noqa: E402 - it needs triton; it lies beside this file

from convgrad.backends.triton import (  # noqa: E402
    TritonBackend,
    channel_launch,
    channel_patches,
    channel_sums,
    channel_tiles,
    launch,
    patch_sums,
    patch_tiles,
    patches,
    start,
    tiles,
    tuning,
)
from convgrad.problem import OPERANDS, PASSES, ConvProblem  # noqa: E402

PROBLEM = ConvProblem.parse("g8ic8oc8mb2ih9iw11kh3kw3ph1pw1")
SUMS = ("correlate_sum", "add_shares")
CHANNELS_LAST = PROBLEM.replace(memory_format=torch.channels_last)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """What the driver was asked to start; nothing is known of an earlier test's driver."""
    kept = getattr(request.config, "cache", None)
    if kept is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(kept.mkdir("triton")))

    def forget() -> None:
        launch._bound.cache_clear()
        tuning.tuner.cache_clear()
        tuning.patch_tuner.cache_clear()
        tuning.channel_tuner.cache_clear()
        ours = [getattr(launch.grad_weight_kernels, name) for name in SUMS]
        ours += [channel_patches.correlate_channels, channel_sums.sum_channels]
        for kernel in (launch.kernels.correlate, patches.correlate_patches, patch_sums.sum_patches, *ours):
            kernel.device_caches.clear()

    forget()
    made = install(monkeypatch)
    yield made
    made.clear()
    forget()
    gc.collect()  # a compiled kernel asks its driver to unload it


def slot(problem: ConvProblem, name: str, shift: int = 0) -> Tensor:
    """A tensor of the problem's layout, ``shift`` elements behind an address that is divisible by 16."""
    like = torch.empty(problem.shape_of(name), memory_format=problem.memory_format if name != "weight" else None)  # type: ignore[arg-type]
    memory = torch.zeros(like.numel() + 4)
    return torch.as_strided(memory, like.shape, like.stride(), memory.storage_offset() + shift)


def call(backend: TritonBackend, problem: ConvProblem, what: str, shift: int = 0) -> None:
    given = {name: slot(problem, name, shift) for name in ("input", "weight", "grad_output")}
    if what in PASSES:
        backend.bind(problem, (what,))(*(given[name] for name in OPERANDS[what]))  # type: ignore[arg-type, index]
    else:
        outputs = ("grad_input", "grad_weight", *(("grad_bias",) if what == "sweep+bias" else ()))
        backend.bind(problem, outputs)(given["grad_output"], given["input"], given["weight"])  # type: ignore[arg-type]


def seen(entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Of each start: the function, the grid, the arguments behind the addresses, and the warps."""
    results, sums = ("correlate", "correlate_patches", "correlate_channels"), ("sum_patches", "sum_channels")
    pointers = {**dict.fromkeys(results, 4), **dict.fromkeys((*sums, "correlate_sum"), 6), "add_shares": 4}
    return [(n, grid, arguments[pointers[n] :], how.num_warps) for n, grid, _, arguments, how in entries]


@pytest.mark.parametrize("problem", [PROBLEM, CHANNELS_LAST], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("what", [*PASSES, "sweep+bias"])
def test_the_second_start_is_the_first_one(problem: ConvProblem, what: str, started: list[tuple[Any, ...]]) -> None:
    backend = TritonBackend()
    call(backend, problem, what)
    first = seen(started)
    started.clear()
    call(backend, problem, what)
    assert seen(started) == first
    assert first


def test_triton_is_asked_once(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more for addresses that are not divisible by 16: that is another kernel."""
    asked: list[int] = []
    compiled = start.Launch._compiled
    monkeypatch.setattr(
        start.Launch, "_compiled", lambda self, given: [asked.append(len(started)), compiled(self, given)][1]
    )
    backend = TritonBackend()
    for shift in (0, 0, 1, 1, 0, 1):
        call(backend, PROBLEM, "forward", shift)
    assert asked == [0, 2]
    sources = [entry[2] for entry in started]
    assert sources[0] is sources[1] is sources[4]
    assert sources[2] is sources[3] is sources[5]
    assert sources[0].attrs != sources[2].attrs
    assert all(entry[3][0] % 16 == shift * 4 for entry, shift in zip(started, (0, 0, 1, 1, 0, 1), strict=True))


def test_other_strides_are_another_launch(started: list[tuple[Any, ...]]) -> None:
    backend = TritonBackend()
    weight = torch.zeros(8, 1, 3, 3)
    for rows in (9, 18, 9, 18):
        backend.bind(PROBLEM, ("forward",))(torch.zeros(2, 8, rows, 11)[:, :, :9], weight)
    arguments = [entry[2] for entry in seen(started)]
    assert arguments[0] == arguments[2] != arguments[1] == arguments[3]
    assert arguments[1][8] == 2 * arguments[0][8]  # the stride of the batch


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
    backend = TritonBackend()
    for hook in (None, lambda metadata: None):
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
        call(backend, CHANNELS_LAST.replace(batch=3), "forward")
        call(backend, CHANNELS_LAST.replace(batch=3), "forward")
    assert entered == [None, None, "correlate_channels", "correlate_channels"]


def test_a_kernel_that_spills_is_compiled_with_all_registers(started: list[tuple[Any, ...]]) -> None:
    triton.runtime.driver.active.spills.append(2)
    backend = TritonBackend()
    for _ in range(3):
        call(backend, PROBLEM, "forward")
    assert [entry[4].maxnreg for entry in started] == [None, 255, 255, 255]
    assert len({entry[2:3] for entry in started[1:]}) == 1


#: What a tuner may have found: the kernel's last arguments, in their order.
TUNED = {
    **{"INSIDE_D": 1, "INSIDE_H": 1, "INSIDE_W": 1, "EXACT": 1, "EXACT_W": 1},
    **{"W": 1, "V": 2, "TOGETHER": 1, "LINE": 32, "R": 1, "B": 64},
}


def test_nothing_is_tuned_during_a_capture(started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call outside a capture tunes; its tile is the one that later calls have, captured or not."""
    asked: list[str] = []
    capture = [True]

    class Tuner:
        best_config = SimpleNamespace(kwargs=TUNED, num_warps=2, num_stages=1)

        def __getitem__(self, grid: Any) -> Any:
            tile = self.best_config.kwargs

            def run(**given: Any) -> Any:
                asked.append("tuned")
                return channel_patches.correlate_channels[grid(tile)](**given, **tile, num_warps=2, num_stages=1)

            return run

    ask_for_tuning(monkeypatch)
    monkeypatch.setattr(channel_launch, "channel_tuner", lambda *_: Tuner())
    monkeypatch.setattr(start, "capturing", lambda device: capture[0])
    problem = CHANNELS_LAST.replace(batch=5)
    backend = TritonBackend()
    for capture[0] in (True, True, False, False, True):
        call(backend, problem, "forward")
    assert asked == ["tuned"]
    tiles = [entry[2][-len(TUNED) :] for entry in seen(started)]
    assert tiles[0] == tiles[1] != tiles[2] == tiles[3] == tiles[4] == tuple(TUNED.values())


def ask_for_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set cudnn.benchmark, also where PyTorch's own test utilities, imported by another test, have frozen the flags."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)


@pytest.mark.parametrize("problem", [PROBLEM, CHANNELS_LAST], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("what", ["grad_input", "sweep+bias"])
def test_tuning_keeps_the_fastest(
    problem: ConvProblem, what: str, started: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's own tuner, with a clock that prefers the last candidate; later calls go to that kernel directly."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the tuner's answers are kept there, too
    ask_for_tuning(monkeypatch)
    every = patch_tiles.candidates
    monkeypatch.setattr(tuning, "candidates", lambda g, use: tiles.candidates(g, use)[:2])
    channels = channel_tiles.candidates
    monkeypatch.setattr(patch_tiles, "candidates", lambda g, use, chosen: every(g, use, chosen)[:2])
    monkeypatch.setattr(channel_tiles, "candidates", lambda g, use, chosen: channels(g, use, chosen)[:2])
    backend = TritonBackend()
    call(backend, problem, what)
    tuned = [entry for entry in seen(started) if entry[0] != "add_shares"]
    assert len(tuned) == 3  # two that were measured, and the one that was kept
    assert tuned[0] != tuned[1] == tuned[2]
    started.clear()
    for _ in range(2):
        call(backend, problem, what)
    again = [entry for entry in seen(started) if entry[0] != "add_shares"]
    assert again == [tuned[2]] * 2


def test_when_it_may_tune(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where PyTorch's flags ask for it, and never where results must repeat."""
    assert not tuning.may_tune()
    ask_for_tuning(monkeypatch)
    assert tuning.may_tune()
    torch.use_deterministic_algorithms(True)
    try:
        assert not tuning.may_tune()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_tuner_has_tiles_to_choose_from() -> None:
    g = launch.geometry(PROBLEM, adjoint=False, channel_lanes=False)
    made = tuning.tuner(launch.kernels.correlate, g, "result", False)
    assert len(made.configs) > 1
    assert made.configs[0].kwargs.items() >= launch.fixed(g, "result").constants("result").items()
    assert {"batch", "channels", "height", "width"} <= set(made.keys)
