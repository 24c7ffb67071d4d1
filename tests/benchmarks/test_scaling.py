"""The model of how a step scales, beside what is measured: that it runs, and adds up."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parallel.py"


@pytest.mark.slow
def test_every_step_has_a_row_for_every_number_of_processes() -> None:
    command = [sys.executable, str(SCRIPT), "--processes", "1", "2", "--repetitions", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "GB/s" in lines[0]
    rows = [line.split("  ") for line in lines[2:]]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert len(rows) == 6
    for row in rows:
        kernels, python, link, model, measured = (float(row[i].removesuffix(" ms")) for i in (2, 3, 6, 7, 8))
        assert abs(kernels + python + link - model) < 0.3  # each is rounded
        assert measured > 0
        assert (row[1] == "1") == (row[4] == "0.00 MB")
