"""Counts of kernels that are really compiled, in a process that has no interpreter; the model's arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from convgrad.backends.triton import counting
from convgrad.backends.triton.listing import Counts, disassembler

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu_counts

WHAT = "forward,sweep"
SMALL = 'g144ic144oc144mb32ih56kh3ph1n"small" bfloat16'


@pytest.mark.skipif(disassembler() is None, reason="nvdisasm is not here")
def test_counted(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A 3x3 forward multiplies nine times for a result, a sweep eighteen times; both stay below the memory's time."""
    kept = request.config.cache.mkdir("triton")  # type: ignore[union-attr]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kept)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "convgrad.backends.triton.counting", "--what", WHAT, "--out", str(tmp_path / "t")]
    done = subprocess.run([*command, SMALL], env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    text = (tmp_path / "t").read_text()
    assert "2 launches; in 0 of them" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| small bfloat16 |")]
    assert [row[2].strip() for row in rows] == ["correlate_patches", "sum_patches"]
    for row, multiplied in zip(rows, (9, 18), strict=True):
        multiply, memory, other, every, issue, lines = map(float, row[4:])
        assert multiplied <= multiply <= 1.05 * multiplied
        assert every == pytest.approx(multiply + memory + other, rel=0.02)
        assert 0.1 < lines < issue < 1


def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(counting, "disassembler", lambda: None)
    assert counting.main([SMALL]) == 2
    assert "nvdisasm is not here" in capsys.readouterr().out


def test_the_worst_come_first() -> None:
    each = Counts(multiplying=9, memory=1, other=8)
    found = [
        counting.Count("g8ic8oc8ih9kh3ph1", "forward", "kernel", 32, each, issue, lines)
        for issue, lines in ((0.5, 0.4), (1.5, 0.2), (0.3, 2.5))
    ]
    lines = counting.table(found).splitlines()
    assert lines[0].startswith("3 launches; in 2 of them")
    shown = [line.rsplit("|", 3)[1].strip() for line in lines if "kernel | 32" in line]
    assert shown == ["0.30", "1.50", "0.50", "1.50", "0.30"]
    assert "| 9 | 1 | 8 | 18 |" in lines[4]


def test_every_problem_of_the_benchmark() -> None:
    texts = gpu_counts.texts([])
    assert len(texts) == len(gpu_counts.PROBLEMS) * 4
    assert len(gpu_counts.texts(["mamba N8"])) == 4
    assert sum(text.endswith(counting.TOGETHER) for text in texts) == 4
