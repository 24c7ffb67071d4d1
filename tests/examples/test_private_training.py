"""The clipped gradients are the loop's (the script compares them itself), and private training learns."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

EXAMPLE = Path(__file__).parents[2] / "examples" / "private_training.py"


def test_private_training_learns(tmp_path):
    accuracy = runpy.run_path(str(EXAMPLE))["main"](epochs=3, folder=tmp_path)
    assert accuracy["private"][-1] > 0.7
    assert (tmp_path / "private_training.png").read_bytes().startswith(b"\x89PNG")


def test_the_gradient_of_every_sample_is_clipped():
    example = runpy.run_path(str(EXAMPLE))
    model, image, label = example["network"](), 10 * torch.randn(1, 1, 8, 8), torch.tensor([3])
    clipped = example["clipped_gradients"](model, image, label)
    norm = torch.cat([g.flatten() for g in clipped]).norm()
    torch.testing.assert_close(norm, torch.tensor(example["CLIP"]))
    torch.testing.assert_close(clipped, example["clipped_gradients_by_a_loop"](model, image, label))
