"""The example, started as its first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "sharded_unet.py"


@pytest.mark.slow
def test_torchrun_trains_it_with_the_losses_of_one_process():
    seen = []
    for count in (1, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [*command, str(SCRIPT), "--size", "16", "--steps", "16"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen.append([float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)])
    one, four = seen
    assert len(one) == 4
    assert one[-1] < 0.7 * one[0]
    assert four == pytest.approx(one, rel=1e-3)
