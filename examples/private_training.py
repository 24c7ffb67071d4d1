# %% [markdown]
"""Differentially private training: each sample's gradient is clipped, and noise hides what is left of it.

    python examples/private_training.py [epochs] [folder]

DP-SGD (Abadi et al., "Deep Learning with Differential Privacy", 2016, algorithm 1) on digits, with a depthwise
separable network. One backward pass gives the gradient of each layer's output, `per_sample_norms` the norms, and
`grad_weight` the sum of the clipped gradients: no gradient of a single sample is in memory. The script compares it with
the loop over samples that defines it, and its accuracy with that of ordinary training. How much privacy a noise level
gives is computed by an accountant, such as Opacus'; there is none here.
"""

# %%
from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import convgrad

BATCH, TESTS, CLIP, NOISE, LR = 64, 360, 1.0, 0.6, 0.5

# %% [markdown]
# A small network; its layers are called one after another.


# %%
def network() -> nn.Sequential:
    """8 x 8 pixels -> 10 classes; without batch norm, which would mix the samples."""
    torch.manual_seed(0)
    return nn.Sequential(
        convgrad.nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        convgrad.nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=16),  # [N, 16, 4, 4]
        convgrad.nn.Conv2d(16, 32, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def options(layer: nn.Conv2d) -> dict[str, object]:
    return {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups}


# %% [markdown]
# ## Clipping without the gradients of single samples
# The norm of a sample's gradient follows from the layer's input and the gradient of its output. Once the norms are
# known, the clipped sum is one ordinary weight gradient, of a scaled gradient of the output.


# %%
def clipped_gradients(model: nn.Sequential, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The sum over samples of their gradients, each clipped to the norm CLIP."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    layers = [m for m in model if isinstance(m, (nn.Conv2d, nn.Linear))]
    hooks = [m.register_forward_hook(lambda m, x, y: calls.append((m, x[0].detach(), y))) for m in layers]
    loss = F.cross_entropy(model(images), labels, reduction="sum")
    for hook in hooks:
        hook.remove()
    grads = torch.autograd.grad(loss, [y for _, _, y in calls])  # of no weight: of the outputs alone

    norms = []
    for (layer, x, _), g in zip(calls, grads, strict=True):
        if isinstance(layer, nn.Conv2d):
            norms.append(convgrad.per_sample_norms(x, layer.weight.shape, g, **options(layer), bias=True))
        else:  # the gradient is the outer product of g and (x, 1)
            norms.append(g.norm(dim=1) * (x.square().sum(1) + 1).sqrt())
    scale = (CLIP / torch.stack(norms).norm(dim=0)).clamp(max=1)  # [N]

    clipped = []
    for (layer, x, _), g in zip(calls, grads, strict=True):
        scaled = g * scale.view(-1, *(1,) * (g.dim() - 1))
        if isinstance(layer, nn.Conv2d):
            clipped.append(convgrad.grad_weight(x, layer.weight.shape, scaled, **options(layer)))
            clipped.append(convgrad.grad_bias(scaled))
        else:
            clipped += [scaled.T @ x, scaled.sum(0)]
    return clipped


# %% [markdown]
# The definition, to compare with:


# %%
def clipped_gradients_by_a_loop(model: nn.Sequential, images: Tensor, labels: Tensor) -> list[Tensor]:
    """The same by definition: one backward pass for each sample, by PyTorch."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    with convgrad.use_backend("aten"):
        for image, label in zip(images.split(1), labels.split(1), strict=True):
            grads = torch.autograd.grad(F.cross_entropy(model(image), label), list(model.parameters()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            total = [t + g * (CLIP / norm).clamp(max=1) for t, g in zip(total, grads, strict=True)]
    return total


# %% [markdown]
# ## Training


# %%
def train(private: bool, train_set: tuple[Tensor, Tensor], test_set: tuple[Tensor, Tensor], epochs: int) -> list[float]:
    """The accuracy after each epoch."""
    model, accuracy = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in track(range(epochs), description="private" if private else "ordinary"):
        for batch in torch.randperm(len(train_set[0])).split(BATCH):
            images, labels = (t[batch] for t in train_set)
            if private:
                for p, g in zip(model.parameters(), clipped_gradients(model, images, labels), strict=True):
                    p.grad = (g + NOISE * CLIP * torch.randn_like(g)) / len(batch)
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy.append(float((model(test_set[0]).argmax(1) == test_set[1]).float().mean()))
    return accuracy


# %% [markdown]
# ## The comparison


# %%
def main(epochs: int = 20, folder: str | Path = ".") -> dict[str, list[float]]:
    """Compare the clipped gradients, train both ways and save the picture; the accuracies of both."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None][order] / 8 - 1  # [1797, 1, 8, 8]
    labels = torch.tensor(digits.target)[order]

    model, batch = network(), (images[:BATCH], labels[:BATCH])
    for _ in range(2):  # the first call chooses kernels
        times = [time.perf_counter()]
        results = []
        for function in (clipped_gradients, clipped_gradients_by_a_loop):
            results.append(function(model, *batch))
            times.append(time.perf_counter())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    whole, loop = (1000 * (b - a) for a, b in pairwise(times))
    print(f"clipped gradients of {BATCH} samples: {whole:.1f} ms, by a loop {loop:.1f} ms, and they are equal")

    torch.manual_seed(0)
    test_set, train_set = (images[:TESTS], labels[:TESTS]), (images[TESTS:], labels[TESTS:])
    accuracy = {name: train(name == "private", train_set, test_set, epochs) for name in ("ordinary", "private")}
    print(", ".join(f"{name}: {values[-1]:.1%}" for name, values in accuracy.items()))

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for name, values in accuracy.items():
        axes.plot(range(1, epochs + 1), values, label=name)
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1), title=f"clipped to {CLIP}, noise {NOISE}")
    axes.legend()
    figure.savefig(Path(folder) / "private_training.png", dpi=120, bbox_inches="tight")
    return accuracy


# %% tags=["active-py"]
if __name__ == "__main__":
    import sys

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2] if len(sys.argv) > 2 else ".")

# %% [markdown]
# ## What privacy costs

# %% tags=["active-ipynb"]
# from IPython.display import Image
#
# accuracy = main(epochs=8)
# Image("private_training.png")
