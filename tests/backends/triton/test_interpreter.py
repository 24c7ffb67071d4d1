"""`interpreted` in a process of its own: the interpreter must be on before a kernel is imported, and stays on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CASES = Path(__file__).with_name("interpreted.py")


def test_interpreted() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    workers = str(min(4, os.cpu_count() or 1))
    options = ["-p", "no:cacheprovider", "-n", workers, "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", str(CASES), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
