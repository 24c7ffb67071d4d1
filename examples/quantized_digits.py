# %% [markdown]
"""One small network on handwritten digits, with float, binary, ternary and shift weights.

    python examples/quantized_digits.py [epochs] [folder]

Every network starts from the same float weights; ``convert_`` gives its layers a scheme, and from then on it is trained
like any other. A picture is saved: the accuracy on the test images after each epoch, and the weights that the
convolutions use.
"""

# %%
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad
from convgrad.nn import Binary, ShiftPS, ShiftQ, Ternary, Xnor

BATCH, TESTS = 32, 360
#: scheme, layers left in float, learning rate; a shift is a logarithm and needs larger steps than a weight
NETWORKS = {
    "float": (None, (), 1e-2),
    "binary": (Binary(), (), 1e-2),
    "binary, inputs too": (Xnor(), ("0.0", "4"), 1e-2),  # the first and the last layer stay in float, as in the paper
    "ternary": (Ternary(), (), 1e-2),
    "shift, DeepShift-Q": (ShiftQ(), (), 1e-2),
    "shift, DeepShift-PS": (ShiftPS(), (), 5e-2),
}

# %% [markdown]
# The data, and the float network from which all others start.


# %%
class Digits(NamedTuple):
    """Standardised images, [n, 1, 8, 8], and their labels."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        raw = load_digits()
        images, labels = torch.tensor(raw.images, dtype=torch.float32)[:, None], torch.tensor(raw.target)
        images = (images - images.mean()) / images.std()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, train = order[:TESTS], order[TESTS:]
        return cls(images[train], labels[train], images[test], labels[test])


def network(activation: type[nn.Module]) -> nn.Sequential:
    def block(c_in: int, c_out: int, stride: int) -> nn.Sequential:
        conv = convgrad.nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(c_out), activation())

    torch.manual_seed(0)
    # 8 x 8 -> 4 x 4 -> 2 x 2
    return nn.Sequential(block(1, 16, 1), block(16, 32, 2), block(32, 64, 2), nn.Flatten(), nn.Linear(64 * 4, 10))


# %% [markdown]
# ## Training
# `convert_` replaces the weights by a scheme's. Only two lines differ from float training: this one, and `clip_`, which
# keeps the float weights behind the signs where a step can still turn them.


# %%
def train(name: str, data: Digits, epochs: int, progress: Progress) -> tuple[nn.Sequential, list[float]]:
    """The trained network, and its accuracy on the test images after each epoch."""
    scheme, in_float, rate = NETWORKS[name]
    # After a ReLU no input is negative, and all signs would be +1.
    model = network(nn.Hardtanh if isinstance(scheme, Xnor) else nn.ReLU)
    if scheme is not None:
        convgrad.nn.convert_(model, scheme, skip=in_float)
    steps = epochs * (len(data.labels) // BATCH)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: convgrad.nn.clip_(model))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    bar, accuracy = progress.add_task(f"{name:>20}", total=steps), []
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(data.labels)).split(BATCH)[: steps // epochs]:
            loss = F.cross_entropy(model(data.images[batch]), data.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress.advance(bar)
        model.eval()
        with torch.no_grad():
            right = model(data.test_images).argmax(1) == data.test_labels
        accuracy.append(100 * float(right.float().mean()))
        progress.update(bar, description=f"{name:>20} {accuracy[-1]:5.1f} %")
    return model, accuracy


# %% [markdown]
# ## What the weights become


# %%
def draw_weights(axes: Axes, layer: nn.Module, **style: str) -> None:
    """Each weight of one output channel: what the convolution uses, against the float weight behind it."""
    if isinstance(layer, convgrad.nn.Conv2dShift):  # it has no float weight
        shadow, used = layer.sign * 2**layer.shift, layer.quantized_weight()
    elif isinstance(layer, convgrad.nn.BinaryConv2d | convgrad.nn.TernaryConv2d | convgrad.nn.Conv2dShiftQ):
        shadow, used = layer.weight, layer.quantized_weight()
    else:
        return
    axes.plot(shadow[0].detach().flatten(), used[0].detach().flatten(), ".", markersize=3, **style)


# %% [markdown]
# ## The comparison


# %%
def main(epochs: int = 10, folder: str | Path = ".", names: Iterable[str] = tuple(NETWORKS)) -> dict[str, list[float]]:
    """Train the networks and save the picture ``quantized_digits.png``; accuracies in percent by name."""
    data, accuracies = Digits.load(), {}
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    with Progress() as progress:
        for i, name in enumerate(names):
            model, accuracies[name] = train(name, data, epochs, progress)
            left.plot(range(1, epochs + 1), accuracies[name], color=f"C{i}", label=name)
            draw_weights(right, model[1][0], color=f"C{i}", label=name)
    left.set(xlabel="epoch", ylabel="test accuracy in percent", ylim=(80, 100))
    right.set(xlabel="float weight", ylabel="weight that the convolution uses")
    for axes in (left, right):
        axes.legend(fontsize="small")
    figure.savefig(Path(folder) / "quantized_digits.png", dpi=120)
    return accuracies


# %% tags=["active-py"]
if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2] if len(sys.argv) > 2 else ".")

# %% [markdown]
# ## All networks

# %% tags=["active-ipynb"]
# from IPython.display import Image
#
# accuracies = main(epochs=6)
# Image("quantized_digits.png")
