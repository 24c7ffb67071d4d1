"""A launch hands Triton its arguments, and the first result of each compiled kernel is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from convgrad.backends.triton import TritonBackend, check, launch, start
from convgrad.errors import BackendError
from convgrad.problem import OPERANDS, ConvProblem, Output

PROBLEM = ConvProblem.parse("g8ic8oc8mb2ih4iw8kh1kw3ph0pw1")


class Kernel:
    """In the place of a compiled kernel: it computes nothing, and keeps how it was started."""

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = arg_names
        self.started: list[tuple[tuple[int, ...], dict[str, Any]]] = []
        #: Bytes, for each start to come.
        self.spills: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(src: Tensor, **given: Any) -> Any:
            self.started.append((grid, given))
            return SimpleNamespace(hash=str(src.dtype), n_spills=self.spills.pop(0) if self.spills else 0)

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel(*launch.correlate.arg_names)
    monkeypatch.setattr(launch, "correlate", found)
    return found


def call(backend: TritonBackend, problem: ConvProblem, pass_: Output = "forward") -> Any:
    operands = [torch.zeros(problem.shape_of(s), dtype=problem.dtype) for s in OPERANDS[pass_]]  # pyright: ignore
    return backend.bind(problem, (pass_,))(*operands)


def test_a_kernel_that_spills_gets_all_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and for good: also one that spills with them."""
    found = Kernel("src", "width", "parts")
    found.spills = [2, 2, 2]
    started = start.Launch(found, {"width": 5}, {"num_warps": 4}, lambda programs: (programs, 2))
    monkeypatch.setattr(start, "at_once", lambda device: 7)
    on_a_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    for _ in range(2):
        assert started.start(src=on_a_gpu, out=on_a_gpu) == (2, "torch.float32")
    plain = {"width": 5, "parts": 2, "num_stages": 1, "num_warps": 4, "enable_fp_fusion": True}
    assert found.started == [((7,), plain), *[((7,), {**plain, "maxnreg": 255})] * 2]


def test_programs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert start.at_once(torch.device("cuda", 77)) == 30
    assert start.at_once(torch.device("xpu", 0)) == start.PROGRAMS


def test_a_kernel_is_checked_once_whatever_the_problem(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another batch is the same kernel, another dtype is not."""
    checked: list[ConvProblem] = []
    monkeypatch.setattr(check, "fault", lambda problem, *_: checked.append(problem))
    backend = TritonBackend()
    half = PROBLEM.replace(dtype=torch.bfloat16)
    for problem in (PROBLEM, PROBLEM.replace(batch=3), PROBLEM, half):
        call(backend, problem)
    assert checked == [PROBLEM, half]
    assert len(kernel.started) == 4


def test_a_wrong_first_result_bans_the_backend(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *shape, _empty=torch.empty, **how: _empty(*shape, **how).fill_(1))
    backend = TritonBackend()
    with pytest.raises(BackendError, match="its forward kernel is wrong on cpu"):
        call(backend, PROBLEM)
    assert any("is wrong" in reason for reason in backend.reasons_against(PROBLEM, ("forward",), torch.device("cpu")))
    kernel.started.clear()
    with pytest.raises(BackendError, match="is wrong"):
        call(backend, PROBLEM, "grad_input")
    assert not kernel.started


def test_nothing_is_checked_during_a_capture(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call outside of one is."""
    checked: list[int] = []
    captures = [True]
    monkeypatch.setattr(check, "fault", lambda *_: checked.append(len(kernel.started)))
    monkeypatch.setattr(start, "capturing", lambda: captures[0])
    backend = TritonBackend()
    for captures[0] in (True, True, False, True, False):
        call(backend, PROBLEM)
    assert checked == [3]
    assert len(kernel.started) == 5
