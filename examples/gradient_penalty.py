# %% [markdown]
"""A penalty on the gradient of the input, through a depthwise network: its training differentiates twice.

    python examples/gradient_penalty.py [epochs] [folder]

Double backpropagation (Drucker and LeCun, "Improving generalization performance using double backpropagation", 1992):
the loss is the cross entropy plus a multiple of the squared norm of its gradient with respect to the image. A network
trained like this changes its answer less when its images change. The gradients of one step are compared with stock
PyTorch's, and the picture shows the accuracy on noisy digits with and without the penalty.
"""

# %%
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad

BATCH, TESTS, LEVELS = 64, 360, (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
PENALTIES = {"without": 0.0, "with": 0.1}

# %% [markdown]
# The layers are convgrad's or PyTorch's: the constructor is the same.


# %%
def network(conv: Callable[..., nn.Module]) -> nn.Sequential:
    """8 x 8 pixels -> 10 classes by depthwise separable layers; its activations have second derivatives."""
    torch.manual_seed(0)
    return nn.Sequential(
        conv(1, 16, 1),
        conv(16, 16, 5, padding=2, groups=16),
        conv(16, 32, 1),
        nn.Tanh(),
        conv(32, 32, 5, stride=2, padding=2, groups=32),  # [N, 32, 4, 4]
        conv(32, 32, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


# %% [markdown]
# ## The penalty
# The gradient of the loss with respect to the images is itself differentiated, so its graph is kept.


# %%
def losses(model: nn.Module, images: Tensor, labels: Tensor, create_graph: bool = True) -> tuple[Tensor, Tensor]:
    """The cross entropy, and the mean squared norm of each sample's input gradient."""
    images = images.detach().requires_grad_()
    entropy = F.cross_entropy(model(images), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(entropy, images, create_graph=create_graph)
    return entropy / len(images), gradient.square().sum() / len(images)


# %% [markdown]
# ## Training


# %%
def train(name: str, train_set: tuple[Tensor, Tensor], epochs: int) -> nn.Sequential:
    """A network trained with or without the penalty."""
    model = network(convgrad.nn.Conv2d)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in track(range(epochs), description=f"{name:>7} penalty"):
        for batch in torch.randperm(len(train_set[0])).split(BATCH):
            entropy, penalty = losses(model, *(t[batch] for t in train_set))
            optimizer.zero_grad()
            (entropy + PENALTIES[name] * penalty).backward()
            optimizer.step()
    return model


# %% [markdown]
# ## The comparison


# %%
def main(epochs: int = 10, folder: str | Path = ".") -> tuple[dict[str, float], dict[str, list[float]]]:
    """Compare with PyTorch, train both ways and save the picture; squared norms and accuracies at LEVELS of noise."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None][order] / 8 - 1  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)[order]
    test_set, train_set = (images[:TESTS], labels[:TESTS]), (images[TESTS:], labels[TESTS:])

    grads = []
    for conv in (convgrad.nn.Conv2d, nn.Conv2d):
        model = network(conv)
        sum(losses(model, images[:BATCH], labels[:BATCH])).backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)
    print("the gradients of loss and penalty are stock PyTorch's")

    norms, accuracy = {}, {}
    for name in PENALTIES:
        torch.manual_seed(1)
        model = train(name, train_set, epochs)
        norms[name] = float(losses(model, *test_set, create_graph=False)[1])
        with torch.no_grad():
            noise = torch.randn_like(test_set[0])
            answers = [model(test_set[0] + level * noise).argmax(1) for level in LEVELS]
        accuracy[name] = [float((answer == test_set[1]).float().mean()) for answer in answers]
        print(f"{name:>7} penalty: squared norm {norms[name]:.4f}, accuracy {accuracy[name][0]:.1%}")

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, values in accuracy.items():
        axes.plot(LEVELS, values, marker="o", label=f"{name} penalty")
    axes.set(xlabel="standard deviation of the noise", ylabel="test accuracy", ylim=(0, 1))
    axes.legend()
    figure.savefig(Path(folder) / "gradient_penalty.png", dpi=120, bbox_inches="tight")
    return norms, accuracy


# %% tags=["active-py"]
if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10, sys.argv[2] if len(sys.argv) > 2 else ".")

# %% [markdown]
# ## With and without

# %% tags=["active-ipynb"]
# from IPython.display import Image
#
# norms, accuracy = main(epochs=6)
# Image("gradient_penalty.png")
