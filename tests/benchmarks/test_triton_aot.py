"""Kernels compiled for GPUs that are not here: no spills, shared memory that fits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "triton_aot.py"


def compile_all(request: pytest.FixtureRequest, *options: str) -> str:
    """Compiled kernels are kept between runs: only a changed one is compiled again."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(request.config.cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_few(request: pytest.FixtureRequest) -> None:
    """Both memory formats, a result, a sum and the sweep, on all three chips."""
    text = "g32ic32oc32mb32ih28iw28kh1kw3ph0pw1 bfloat16"
    said = compile_all(request, "--passes", "forward", "sweep+bias", "--", text, text + " channels_last")
    assert "4 kernels, 0 faults" in said


@pytest.mark.slow
def test_a_band(request: pytest.FixtureRequest) -> None:
    said = compile_all(request, "--passes", "forward", "grad_weight", "--", "g128ic128oc128mb8ih32kh13ph6 bfloat16")
    assert "2 kernels, 0 faults" in said
    assert "banded.correlate_sum" in said


@pytest.mark.slow
def test_the_whole_matrix(request: pytest.FixtureRequest) -> None:
    compile_all(request, "--jobs", "2")
