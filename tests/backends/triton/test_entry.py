"""Launches without Triton's launcher: `launched` in a process of its own, whose Triton finds the stand-in driver."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.standin_cuda import compiler

from convgrad.backends.triton import TritonBackend
from convgrad.problem import ConvProblem

CASES = Path(__file__).with_name("launched.py")
TABLED = Path(__file__).with_name("tabled.py")
HEADER = Path(sysconfig.get_paths()["include"], "Python.h")


@pytest.mark.skipif(compiler() is None or not HEADER.exists(), reason="Triton's launcher cannot be compiled here")
@pytest.mark.parametrize("selection", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_launched(selection: str) -> None:
    run(CASES, selection)


@pytest.mark.skipif(compiler() is None or not HEADER.exists(), reason="Triton's launcher cannot be compiled here")
def test_the_table_of_calls_launches() -> None:
    run(TABLED, "not slow")


def run(cases: Path, selection: str) -> None:
    command = [sys.executable, "-m", "pytest", str(cases), "-m", selection, "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_no_entry_where_triton_does_not_launch_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem.parse("g8ic8oc8mb2ih8kh3ph1")
    operands = {"input": torch.zeros(problem.input_shape), "weight": torch.zeros(problem.weight_shape)}
    assert TritonBackend().entry(problem, ("forward",), operands) is None
