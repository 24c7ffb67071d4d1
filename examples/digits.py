"""The demo's images, scikit-learn's handwritten digits enlarged to 64 x 64, and its network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, BATCH, TESTS, SEED = 32, 10, 32, 360, 0


@dataclass(frozen=True)
class Digits:
    """1797 handwritten digits: [n, 1, 64, 64] images and [n] labels, shuffled once."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        raw = load_digits()
        images = torch.tensor(raw.images, dtype=torch.float32)[:, None]  # [1797, 1, 8, 8]
        images = F.interpolate(images, size=(64, 64), mode="bilinear", align_corners=False)
        images = (images - images.mean()) / images.std()
        labels = torch.tensor(raw.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
        test, train = order[:TESTS], order[TESTS:]
        return cls(images[train], labels[train], images[test], labels[test])

    def batches(self, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(epochs):
            order = torch.randperm(len(self.labels), generator=generator)
            for batch in order.split(BATCH)[: len(self.labels) // BATCH]:
                yield self.images[batch], self.labels[batch]


def network(conv: Callable[..., nn.Module]) -> nn.Sequential:
    """The same network from any class with the constructor of torch.nn.Conv2d."""

    def layer(*sizes: int, **options: object) -> list[nn.Module]:
        return [conv(*sizes, bias=False, **options), nn.BatchNorm2d(sizes[1]), nn.ReLU()]

    def separable(c_in: int, c_out: int, kernel: int, stride: int) -> list[nn.Module]:
        depthwise = layer(c_in, c_in, kernel, stride=stride, padding=kernel // 2, groups=c_in)
        return [*depthwise, *layer(c_in, c_out, 1)]

    torch.manual_seed(SEED)
    w = WIDTH
    return nn.Sequential(
        *layer(1, w, 3, stride=2, padding=1),  # [N, 32, 32, 32]
        *separable(w, 2 * w, 3, 1),  # [N, 64, 32, 32]
        *separable(2 * w, 4 * w, 5, 2),  # [N, 128, 16, 16]
        *separable(4 * w, 4 * w, 7, 1),  # [N, 128, 16, 16]
        *separable(4 * w, 8 * w, 3, 2),  # [N, 256, 8, 8]
        *separable(8 * w, 8 * w, 5, 1),  # [N, 256, 8, 8]
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * w, CLASSES),
    )
