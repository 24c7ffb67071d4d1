"""The compiled library in other processes: without one, and in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convgrad.backends import _native_library as library

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(library.why_absent()), reason=library.why_absent() or "present")


def test_without_a_library_there_is_a_reason(tmp_path: Path) -> None:
    code = (
        "import torch; from convgrad.problem import ConvProblem; from convgrad.backends.native import NativeBackend\n"
        "p = ConvProblem(1, 4, 4, 4, (5,), (3,), (1,), ((1, 1),), (1,), (5,))\n"
        "print(NativeBackend().reasons_against(p, ('forward',), torch.device('cpu')))"
    )
    environment = os.environ | {"CONVGRAD_NATIVE_LIBRARY": str(tmp_path / "none.so"), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "not installed" in done.stdout


def test_a_forked_child_does_not_hang() -> None:
    code = (
        "import os, torch; from convgrad.problem import ConvProblem\n"
        "from convgrad.backends.native import NativeBackend\n"
        "torch.set_num_threads(2)\n"
        "p = ConvProblem(8, 64, 64, 64, (64,), (3,), (1,), ((1, 1),), (1,), (64,))\n"
        "x, w = torch.ones(p.input_shape), torch.ones(p.weight_shape)\n"
        "y = NativeBackend().bind(p, ('forward',))(x, w)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if y.equal(NativeBackend().bind(p, ('forward',))(x, w)) else 3)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
