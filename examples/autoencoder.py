# %% [markdown]
"""An autoencoder of digits whose layers send errors back through separate feedback weights.

    python examples/autoencoder.py [epochs] [folder]

Three networks from one initialization: with backpropagation, with feedback that stays random (feedback alignment,
Lillicrap et al. 2016), and with feedback that learns the forward weights from noise (weight mirrors, Akrout et al.
2019). Two pictures are saved: the reconstruction error, and the angle between forward and feedback weights.
"""

# %%
from __future__ import annotations

import copy
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import convgrad

BATCH, CODE = 32, 12
RULES = ("backpropagation", "alignment", "mirror")

# %% [markdown]
# The network: two convolutions down, two transposed ones up.


# %%
def autoencoder() -> nn.Sequential:
    """8 x 8 pixels -> 12 channels of 2 x 2 -> 8 x 8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, CODE, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(CODE, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
    )


# %% [markdown]
# ## Training
# One call gives every layer its own feedback weights. Those of a mirror learn from noise before each step; the
# angle between them and the forward weights shows how much they still differ.


# %%
def train(model: nn.Sequential, rule: str, images: Tensor, epochs: int) -> tuple[list[float], dict[str, list[float]]]:
    """The mean squared error of each epoch, and the angles of each layer after it."""
    if rule != "backpropagation":
        convgrad.nn.convert_feedback_(model, rule)
    layers = {name: layer for name, layer in model.named_children() if hasattr(layer, "angle")}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    errors, angles = [], {name: [float(layer.angle())] for name, layer in layers.items()}
    for _ in track(range(epochs), description=f"{rule:>15}"):
        batches = images[torch.randperm(len(images))].split(BATCH)
        losses = []
        for batch in batches:
            for layer in layers.values() if rule == "mirror" else ():
                layer.mirror_(lr=0.02)
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        errors.append(float(torch.stack(losses).mean()))
        for name, layer in layers.items():
            angles[name].append(float(layer.angle()))
    return errors, angles


# %% [markdown]
# ## The comparison


# %%
def main(
    epochs: int = 15, folder: str | Path = "."
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]]]:
    """Train the three networks and save the pictures; errors and angles by rule."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16  # [1797, 1, 8, 8]
    start = autoencoder()
    errors, angles = {}, {}
    for rule in RULES:
        torch.manual_seed(1)
        errors[rule], angles[rule] = train(copy.deepcopy(start), rule, images, epochs)
        print(f"{rule:>15}: error {errors[rule][0]:.4f} -> {errors[rule][-1]:.4f}")

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for rule, values in errors.items():
        axes.plot(range(1, epochs + 1), values, label=rule)
    axes.set(xlabel="epoch", ylabel="reconstruction error", yscale="log")
    axes.legend()
    figure.savefig(Path(folder) / "autoencoder_error.png", dpi=120, bbox_inches="tight")

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for rule, style in (("alignment", "--"), ("mirror", "-")):
        for i, (name, values) in enumerate(angles[rule].items()):
            axes.plot(values, style, color=f"C{i}", label=f"layer {name}, {rule}")
    axes.set(xlabel="epoch", ylabel="angle between w_b and w_f in degrees", ylim=(0, 100))
    axes.legend(fontsize="small", loc="center right")
    figure.savefig(Path(folder) / "autoencoder_angle.png", dpi=120, bbox_inches="tight")
    return errors, angles


# %% tags=["active-py"]
if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15, sys.argv[2] if len(sys.argv) > 2 else ".")

# %% [markdown]
# ## The three networks
# Eight epochs each.

# %% tags=["active-ipynb"]
# from IPython.display import Image
#
# errors, angles = main(epochs=8)
# Image("autoencoder_error.png")

# %% tags=["active-ipynb"]
# Image("autoencoder_angle.png")
