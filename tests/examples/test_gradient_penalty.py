"""Training with a gradient penalty makes the input's gradient smaller, and costs little accuracy."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "gradient_penalty.py"


def test_the_penalty_makes_the_gradient_smaller(tmp_path):
    norms, accuracy = runpy.run_path(str(EXAMPLE))["main"](epochs=3, folder=tmp_path)
    assert norms["with"] < 0.75 * norms["without"]
    assert accuracy["with"][0] > accuracy["without"][0] - 0.05 > 0.8
    assert (tmp_path / "gradient_penalty.png").read_bytes().startswith(b"\x89PNG")
