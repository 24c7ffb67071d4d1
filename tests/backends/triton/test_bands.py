"""Bands: what the backend says of itself, its tiles, and `interpreted_bands` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given

from convgrad.backends.triton import bands
from convgrad.backends.triton.geometry import geometry
from convgrad.backends.triton.on_bands import TritonBandedBackend
from convgrad.diagnostics import explain_problem
from convgrad.problem import PASSES, ConvProblem
from convgrad.testing import problems

pytest.importorskip("triton")
CASES = Path(__file__).with_name("interpreted_bands.py")
CUDA = torch.device("cuda", 0)
LARGE = ConvProblem.parse("g384ic384oc384mb32ih32kh31ph15")
HALF = LARGE.replace(dtype=torch.bfloat16)


@pytest.fixture(params=[True, False], ids=["tf32", "float32"])
def tf32(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("convgrad.settings.cudnn_allows_tf32", lambda: request.param)
    return bool(request.param)


def reasons(problem: ConvProblem, *outputs: str) -> str:
    return "; ".join(TritonBandedBackend().reasons_against(problem, outputs or ("forward",), CUDA))  # type: ignore[arg-type]


def test_reasons(tf32: bool) -> None:
    for pass_ in PASSES:
        assert not reasons(LARGE, pass_)
        assert not reasons(HALF, pass_)
    assert "float64" in reasons(LARGE.replace(dtype=torch.float64))
    assert "mostly zeros" in reasons(ConvProblem.parse("g8ic8ih20iw20oc8kh31kw3ph15pw1"))
    assert "depthwise" in reasons(ConvProblem.parse("ic8ih20oc8kh9ph4"))
    assert "one output" in reasons(LARGE, "grad_input", "grad_weight")
    short = ConvProblem.parse("g8ic8iw100oc8ow100kw9pw4")
    assert bool(reasons(short)) is not tf32
    assert not reasons(short.replace(dtype=torch.float16))
    assert not reasons(short, "grad_weight")


@pytest.mark.parametrize(("chip", "usable"), [("cuda sm_75", False), ("v100", False), ("a100", True), ("h100", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_chip_without_these_tensor_cores(chip: str, usable: bool, dtype: torch.dtype) -> None:
    rows = explain_problem(LARGE.replace(dtype=dtype), device=chip).rows
    said = {row.output: "; ".join(row.reasons) for row in rows if row.backend == "triton:banded"}
    assert said.keys() == set(PASSES)
    for sentence in said.values():
        assert ("compute capability 8.0" in sentence) is not usable


def test_tf32_only_where_the_flags_allow_it(tf32: bool) -> None:
    backend = TritonBandedBackend()
    for pass_ in PASSES:
        assert backend.arithmetic(LARGE, pass_, CUDA) == ("tf32" if tf32 else "direct")
        assert backend.arithmetic(HALF, pass_, CUDA) == "direct"


@pytest.mark.usefixtures("tf32")
def test_what_is_expected_of_it() -> None:
    """More than of the kernels without tensor cores, or nothing."""
    backend = TritonBandedBackend()
    assert backend.expected_speedup(HALF, ("forward",), CUDA) > 1.5
    assert backend.expected_speedup(LARGE, ("forward",), CUDA) > 1.5
    odd = LARGE.replace(input_size=(33, 33), output_size=(33, 33))  # a tile for one column more, and narrow loads
    assert backend.expected_speedup(odd, ("forward",), CUDA) == 0
    assert backend.expected_speedup(HALF, ("forward",), torch.device("cpu")) == 0
    narrow = ConvProblem.parse("g96ic96oc96mb64ih56kh7ph3")
    assert backend.expected_speedup(narrow, ("forward",), CUDA) == 0


@given(problems())
def test_tiles(problem: ConvProblem) -> None:
    """Powers of two, no less than a tensor core takes, and shares that the declared workspace holds."""
    multiplier = max(1, problem.out_channels // problem.groups)
    problem = problem.replace(in_channels=problem.groups, out_channels=problem.groups * multiplier)
    for use, adjoint in (("result", False), ("result", True), ("sum", False)):
        g = geometry(problem, adjoint=adjoint, channel_lanes=False)
        for precision in ("ieee", "tf32", "tf32x3"):
            chosen = bands.candidates(g, use, precision)  # type: ignore[arg-type]
            assert chosen[0] == bands.fixed(g, use, precision)  # type: ignore[arg-type]
            for band in chosen:
                assert all(n & (n - 1) == 0 and n > 0 for n in band[:-1])
                assert band.rows * band.images >= 16
                assert band.taps * band.depth >= 16
                assert band.width >= 8
            if use == "sum":
                count = bands.parts(g, chosen[0])
                held = TritonBandedBackend().workspace(problem, ("grad_weight",))
                assert count == 1 or 4 * count * g.channels * g.kernel_elements <= held


def run_cases(selection: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(CASES), "-m", selection, "-p", "no:cacheprovider", "-n", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_interpreted() -> None:
    run_cases("not slow")


@pytest.mark.slow
def test_interpreted_slow() -> None:
    run_cases("slow")
