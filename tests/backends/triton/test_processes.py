"""Tests in a process of their own: Triton's interpreter must be on before a kernel is imported, as must the stand-in
driver that Triton finds, and both stay.
"""

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

FOLDER = Path(__file__).parent
HEADER = Path(sysconfig.get_paths()["include"], "Python.h")
absent = pytest.mark.skipif(compiler() is None or not HEADER.exists(), reason="Triton's launcher cannot be compiled")


@pytest.mark.parametrize("selection", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", ["interpreted", pytest.param("launched tabled", marks=absent)])
def test_they_pass(names: str, selection: str) -> None:
    files = [str(FOLDER / f"{name}.py") for name in names.split()]
    command = [sys.executable, "-m", "pytest", *files, "-m", selection, "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(names == "interpreted"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_no_entry_where_triton_does_not_launch_by_cuda() -> None:
    problem = ConvProblem.parse("g8ic8oc8mb2ih8kh3ph1")
    operands = {"input": torch.zeros(problem.input_shape), "weight": torch.zeros(problem.weight_shape)}
    assert TritonBackend().entry(problem, ("forward",), operands) is None
