"""Kernels compiled for GPUs that are not here, in a process of their own: no spills, shared memory that fits.

The table is printed: `pytest -s -k aot`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

#: Problems, and their passes: columns as lanes and channels as lanes, both kernels, on all three chips.
QUICK = [
    ("g768ic768oc768mb8iw2048ow2048kw4pw3 bfloat16", "forward,sweep+bias"),
    ("g144ic144oc144mb32ih56kh3ph1 channels_last", "grad_input,grad_weight"),
]
SHAPES = """
g144ic144oc144mb32ih56kh3ph1
g96ic96oc96mb32ih112kh3sh2ph1
g240ic240oc240mb32ih28kh5ph2
g240ic240oc240mb32ih28kh5ph2sh2
g96ic96oc96mb32ih56kh7ph3
g768ic768oc768mb32ih7kh7ph3
g960ic960oc960mb32ih7kh3ph1
g128ic128oc128mb8ih32kh13ph6
g128ic128oc128mb8ih32kh31ph15
g96ic96oc96mb2id16ih56iw56kd3kh3kw3pd1ph1pw1
g54ic54oc54mb8id16ih28iw28kd5kh3kw3pd2ph1pw1sh2sw2
g54ic54oc54mb8id16ih28iw28kd3kh3kw3pd1ph1pw1sd2sh2sw2
g64ic64oc128mb8ih28kh3ph1
g64ic64oc64mb8ih64kh3ph2dh1
g32ic32oc32mb8ih33kh4sh4
""".strip().splitlines()
FULL = [
    *(shape + dtype + layout for shape in SHAPES for dtype in ("", " bfloat16") for layout in ("", " channels_last")),
    *(f"g64ic64oc64mb8ih28kh{k}ph{k // 2}{dtype}{layout}"
      for k in (3, 7) for dtype in (" float64", " float16") for layout in ("", " channels_last")),
    "g768ic768oc768mb8iw2048ow2048kw4pw3",
    "g1536ic1536oc1536mb1iw8192ow8192kw4pw3 bfloat16",
    "g64ic64oc64mb8iw100kw31pw15",
]  # fmt: skip


def compile_all(problems: list[str], cache: Path, *options: str) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "convgrad.backends.triton.aot", *options, *problems]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    """Compiled kernels are kept between runs: only a changed one is compiled again."""
    return Path(request.config.cache.mkdir("triton"))  # type: ignore[union-attr]


@pytest.mark.parametrize(("problem", "passes"), QUICK)
def test_aot(problem: str, passes: str, cache: Path) -> None:
    compile_all([problem], cache, "--passes", passes)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(FULL), 8))
def test_aot_full(first: int, cache: Path) -> None:
    compile_all(FULL[first : first + 8], cache)
