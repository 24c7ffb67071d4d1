"""The autoencoder with weights of its own for the way back learns, and these become the forward weights."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "autoencoder.py"


def test_error_and_angle_fall_under_the_mirror_rule(tmp_path):
    errors, angles = runpy.run_path(str(EXAMPLE))["main"](epochs=2, folder=tmp_path)
    assert errors["mirror"][-1] < 0.75 * errors["mirror"][0]
    assert errors["mirror"][-1] < errors["alignment"][-1]
    assert len(angles["mirror"]) == 4
    for values in angles["mirror"].values():
        assert values[0] > 80
        assert values[-1] < 30
    for picture in ("autoencoder_error.png", "autoencoder_angle.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
