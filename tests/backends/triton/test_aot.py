"""Kernels compiled for GPUs that are not here, in a process of their own: no spills, shared memory that fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from convgrad.backends.triton import aot
from convgrad.backends.triton.variants import MATRIX, variants

#: Problems and passes: columns as lanes and channels as lanes, all kernels, a stride, a bias, and the band whose rare
#: way had its loop unrolled; on all three chips.
QUICK = [
    ("g768ic768oc768mb8iw2048ow2048kw4pw3 bfloat16 bias", "forward,sweep+bias"),
    ("g144ic144oc144mb32ih56kh3sh2ph1 channels_last", "grad_input,grad_weight"),
    ("g128ic128oc128mb8ih32kh13ph6 bfloat16", "forward banded"),
]


def compile_all(cache: Path, *options: str) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "convgrad.backends.triton.aot", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    """Compiled kernels are kept between runs: only a changed one is compiled again."""
    return Path(request.config.cache.mkdir("triton"))  # type: ignore[union-attr]


@pytest.mark.parametrize(("problem", "passes"), QUICK)
def test_aot(problem: str, passes: str, cache: Path) -> None:
    compile_all(cache, "--passes", passes, problem)


@pytest.mark.slow
def test_the_whole_matrix(cache: Path, tmp_path: Path) -> None:
    compile_all(cache, "--jobs", "2", "--out", str(tmp_path / "table.md"))
    assert len((tmp_path / "table.md").read_text().splitlines()) > len(MATRIX)


def test_a_variant_is_compiled_once() -> None:
    """Another batch is the same kernel; another dtype is not, nor are strides that are no longer divisible by 16, nor
    a batch so small that a patch takes fewer rows.
    """
    text = "g144ic144oc144mb{}ih{}kh3ph1{}"
    same = [text.format(batch, 56, "") for batch in (32, 24, 16)]
    assert len(variants(same, ["forward"])) == 1
    assert sum(map(len, variants(same, ["forward"]).values())) == 3
    assert len(variants([*same, text.format(32, 56, " bfloat16"), text.format(32, 57, "")], ["forward"])) == 3
    assert len(variants([*same, text.format(1, 56, "")], ["forward"])) == 2


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (aot.Resources(255, 16, 0, 0), "spills 16 bytes on sm_90"),
        (aot.Resources(32, 0, 1 << 20, 0), "sm_90 has 232448"),
    ],
)
def test_faults(
    found: aot.Resources, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A spill or too much shared memory is said, and fails the command."""
    monkeypatch.setattr(aot, "_examine", lambda variant, names: {"sm_90": found})
    assert aot.main(["g8ic8oc8mb2ih9kh3ph1", "--passes", "forward", "--targets", "sm_90"]) == 1
    assert said in capsys.readouterr().out
    monkeypatch.setattr(aot, "_examine", lambda variant, names: {"sm_90": aot.Resources(32, 0, 0, 0)})
    assert aot.main(["g8ic8oc8mb2ih9kh3ph1", "--passes", "forward", "--targets", "sm_90"]) == 0


@pytest.mark.parametrize(
    ("option", "wrong"), [("--targets", "sm_80 gfx942"), ("--targets", "sm_1"), ("--passes", "both")]
)
def test_an_unknown_name_is_refused_before_anything_is_compiled(
    option: str, wrong: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        aot.main(["g8ic8oc8mb2ih9kh3ph1", option, wrong])
    assert f"no '{wrong}' among" in capsys.readouterr().err
