"""Binary and shift networks lose at most 3 points against the float network."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "quantized_digits.py"


def test_within_three_points_of_the_float_network(tmp_path):
    names = ("float", "binary", "shift, DeepShift-Q", "shift, DeepShift-PS")
    accuracies = runpy.run_path(str(EXAMPLE))["main"](epochs=4, folder=tmp_path, names=names)
    final = {name: values[-1] for name, values in accuracies.items()}
    assert final["float"] > 97
    assert all(final[name] >= final["float"] - 3 for name in names), final
    assert (tmp_path / "quantized_digits.png").read_bytes().startswith(b"\x89PNG")
