"""A small network with the extension's depthwise convolution, trained in both ways in which it can be used.

python examples/cpp_extension/train.py
"""

from __future__ import annotations

import torch
from extension import load
from torch import Tensor, nn

import convgrad


class Depthwise(nn.Module):
    """The differentiable function of the extension: forward in C++, backward by convgrad from C++."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, kernel, kernel) / kernel)
        self.stride = stride

    def forward(self, input: Tensor) -> Tensor:
        return load().depthwise(input, self.weight, self.stride)


def accepts(p: convgrad.ConvProblem) -> bool:
    """What the bare kernel can do."""
    return (
        p.depthwise
        and p.out_channels == p.in_channels
        and p.kernel_size in {(3, 3), (5, 5)}
        and p.stride in {(1, 1), (2, 2)}
        and p.dilation == (1, 1)
        and all(low == high == k // 2 for (low, high), k in zip(p.padding, p.kernel_size, strict=True))
    )


def register() -> None:
    """The bare kernel as a backend, for whoever names it."""
    convgrad.register(
        "extension",
        forward=load().forward,
        args=("input", "weight", "kernel_size[0]", "stride[0]"),
        accepts=accepts,
        layouts=("contiguous",),
        dtypes=(torch.float32, torch.float64),
        prefer=False,  # only where it is named
    )


def network(extension: bool) -> nn.Module:
    """Two depthwise layers: by the extension's own function, or by a module whose backend is the registered kernel."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 1)]
    for kernel, stride in ((3, 2), (5, 1)):
        if extension:
            layers.append(Depthwise(8, kernel, stride))
        else:
            layers.append(
                convgrad.nn.Conv2d(8, 8, kernel, stride, kernel // 2, groups=8, bias=False, backend="extension")
            )
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def train(model: nn.Module, steps: int = 20) -> list[float]:
    """Losses of a few steps on random images."""
    torch.manual_seed(1)
    x, target, losses = torch.randn(16, 3, 15, 13), torch.arange(16) % 4, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    register()
    for name, extension in (("the extension's function", True), ("the registered kernel", False)):
        losses = train(network(extension))
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
