"""The examples of kernels in Triton and numba, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, kernel: str, **environment: str) -> str:
    few = f"ignore:'{kernel}' is not verified"  # a slow or busy machine reaches few problems
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", few, str(EXAMPLES / name)],
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_triton_kernel() -> None:
    """By Triton's interpreter."""
    pytest.importorskip("triton")  # there is none for some machines
    printed = run("triton_kernel.py", "causal", TRITON_INTERPRET="1")
    assert printed.startswith(("causal: verified on ", "causal: not verified: "))
    assert "causal" in next(line for line in printed.splitlines() if "forward " in line)


@pytest.mark.slow  # it compiles for half a minute where the machine is busy
def test_a_numba_kernel() -> None:
    printed = run("numba_kernel.py", "numba")
    assert printed.startswith(("numba: verified on ", "numba: not verified: "))
    assert "grad_input+grad_weight of " in printed
