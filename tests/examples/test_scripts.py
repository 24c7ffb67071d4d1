"""Each script learns what it says, and draws its figure."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("matplotlib", "rich", "sklearn")), reason="not all is installed"
)

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def drawn(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_autoencoder_error_and_angle_fall_under_the_mirror_rule(tmp_path) -> None:
    errors, angles = load("autoencoder").main(epochs=2, folder=tmp_path)
    assert errors["mirror"][-1] < 0.75 * errors["mirror"][0]
    assert errors["mirror"][-1] < errors["alignment"][-1]
    assert len(angles["mirror"]) == 4
    for values in angles["mirror"].values():
        assert values[0] > 80
        assert values[-1] < 30
    assert drawn(tmp_path / "autoencoder_error.png")
    assert drawn(tmp_path / "autoencoder_angle.png")


def test_gradient_penalty_makes_the_gradient_smaller_and_costs_little_accuracy(tmp_path) -> None:
    norms, accuracy = load("gradient_penalty").main(epochs=3, folder=tmp_path)
    assert norms["with"] < 0.75 * norms["without"]
    assert accuracy["with"][0] > accuracy["without"][0] - 0.05 > 0.8
    assert drawn(tmp_path / "gradient_penalty.png")


def test_private_training_learns(tmp_path) -> None:
    """It compares the clipped gradients with the loop's itself."""
    accuracy = load("private_training").main(epochs=3, folder=tmp_path)
    assert accuracy["private"][-1] > 0.7
    assert drawn(tmp_path / "private_training.png")


def test_private_training_clips_the_gradient_of_every_sample() -> None:
    example = load("private_training")
    model, image, label = example.network(), 10 * torch.randn(1, 1, 8, 8), torch.tensor([3])
    clipped = example.clipped_gradients(model, image, label)
    norm = torch.cat([g.flatten() for g in clipped]).norm()
    torch.testing.assert_close(norm, torch.tensor(example.CLIP))
    torch.testing.assert_close(clipped, example.clipped_gradients_by_a_loop(model, image, label))


def test_quantized_digits_within_three_points_of_the_float_network(tmp_path) -> None:
    names = ("float", "binary", "shift, DeepShift-Q", "shift, DeepShift-PS")
    accuracies = load("quantized_digits").main(epochs=4, folder=tmp_path, names=names)
    final = {name: values[-1] for name, values in accuracies.items()}
    assert final["float"] > 97
    assert all(final[name] >= final["float"] - 3 for name in names), final
    assert drawn(tmp_path / "quantized_digits.png")


def test_mamba_learns_and_streams(tmp_path) -> None:
    losses, difference = load("mamba").main(["--steps", "15", "--figure", str(tmp_path / "mamba.png")])
    assert losses[-1] < 0.8 * losses[0]
    assert difference < 1e-4
    assert drawn(tmp_path / "mamba.png")


def test_mamba_sees_a_stream_that_forgets(monkeypatch) -> None:
    """The comparison can fail: an update that leaves the state as it was."""
    example = load("mamba")
    update = example.convgrad.causal_conv1d_update

    def forgets(x, state, *rest, **options):
        return update(x, state.clone(), *rest, **options)

    net = example.Network()
    upper = torch.randint(example.LEVELS, (2, example.HALF))
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(example.convgrad, "causal_conv1d_update", forgets)
        completed, streamed = example.completed(net, upper)
        with torch.no_grad():
            whole, _ = net(example.shifted(completed), net.start(len(completed)))
        assert (float((whole - streamed).abs().max()) > 1e-4) is broken


@pytest.mark.slow
def test_torchrun_trains_the_sharded_unet_with_the_losses_of_one_process():
    seen = []
    for count in (1, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [*command, str(EXAMPLES / "sharded_unet.py"), "--size", "16", "--steps", "16"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        seen.append([float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)])
    one, four = seen
    assert len(one) == 4
    assert one[-1] < 0.7 * one[0]
    assert four == pytest.approx(one, rel=1e-3)
