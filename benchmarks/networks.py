"""Networks that transformers does not define: those of medical images, video, sequences, and image translation.

    cd benchmarks && python time_steps.py steps.csv networks:unet_2d networks:nnunet_3d --threads 2

Each function returns a network with random weights and what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_UP = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_INSTANCE = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class Residual(nn.Module):
    """The sum of what layers give and of what they get."""

    def __init__(self, *layers: nn.Module, last: bool = True) -> None:
        super().__init__()
        self.layers, self.activation = nn.Sequential(*layers), nn.ReLU() if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x + self.layers(x))


# ---- U-Nets --------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two convolutions of 3 on every level; on the way up what the way down gave is joined (arXiv:1505.04597).

    Args:
        d: dimensions.
        widths: channels of each level.
        norm, activation: behind each convolution.
        strided: the first convolution of a level halves the image, as in nnU-Net (Isensee et al., 2021); not a pool.
    """

    def __init__(
        self,
        d: int,
        widths: list[int],
        norm: Callable[[int], nn.Module],
        activation: Callable[[], nn.Module],
        strided: bool,
    ) -> None:
        super().__init__()

        def level(channels: int, width: int, stride: int = 1) -> nn.Sequential:
            first, second = _CONV[d](channels, width, 3, stride, 1), _CONV[d](width, width, 3, 1, 1)
            return nn.Sequential(first, norm(width), activation(), second, norm(width), activation())

        below = list(pairwise(widths))
        self.first = level(1, widths[0])
        self.down = nn.ModuleList(
            level(a, b, 2) if strided else nn.Sequential(_POOL[d](2), level(a, b)) for a, b in below
        )
        self.up = nn.ModuleList(_UP[d](b, a, 2, 2) for a, b in below)
        self.joined = nn.ModuleList(level(2 * a, a) for a in widths[:-1])
        self.head = _CONV[d](widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(kept[-1]))
        x = kept.pop()
        for up, joined in zip(reversed(self.up), reversed(self.joined), strict=True):
            x = joined(torch.cat([up(x), kept.pop()], 1))
        return self.head(x)


def unet_2d() -> tuple[nn.Module, Tensor]:
    return UNet(2, [64, 128, 256, 512], _BATCH[2], partial(nn.ReLU, True), False), torch.randn(2, 1, 128, 128)


def unet_3d() -> tuple[nn.Module, Tensor]:
    return UNet(3, [32, 64, 128, 256], _BATCH[3], partial(nn.ReLU, True), False), torch.randn(1, 1, 48, 48, 48)


def _nnunet(d: int, widths: list[int], *shape: int) -> tuple[nn.Module, Tensor]:
    activation = partial(nn.LeakyReLU, 0.01, inplace=True)
    return UNet(d, widths, partial(_INSTANCE[d], affine=True), activation, True), torch.randn(shape)


def nnunet_2d() -> tuple[nn.Module, Tensor]:
    return _nnunet(2, [32, 64, 128, 256, 512], 4, 1, 192, 192)


def nnunet_3d() -> tuple[nn.Module, Tensor]:
    return _nnunet(3, [32, 64, 128, 256], 2, 1, 48, 48, 48)


# ---- diffusion -----------------------------------------------------------------------------------


class _TimedBlock(nn.Module):
    """Two convolutions behind GroupNorm and SiLU, with the time of the diffusion added between."""

    def __init__(self, channels: int, width: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, channels), nn.GroupNorm(32, width)])
        self.first, self.second = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.time, self.skip = nn.Linear(time, width), nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(torch.nn.functional.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(torch.nn.functional.silu(self.norms[1](y)))


class _Diffusion(nn.Module):
    """The U-Net of DDPM without attention (arXiv:2006.11239)."""

    def __init__(self, widths: list[int], time: int = 256) -> None:
        super().__init__()
        below = list(pairwise(widths))
        self.time = nn.Parameter(torch.randn(1, time))
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.down = nn.ModuleList(_TimedBlock(w, w, time) for w in widths)
        self.narrow = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in below)
        self.middle = _TimedBlock(widths[-1], widths[-1], time)
        self.up = nn.ModuleList(_TimedBlock(2 * w, w, time) for w in widths)
        self.widen = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in below)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for i, down in enumerate(self.down):
            kept.append(down(self.narrow[i - 1](kept[-1]) if i else x, self.time))
        x = self.middle(kept[-1], self.time)
        for i in range(len(self.up) - 1, -1, -1):
            x = self.up[i](torch.cat([x, kept[i]], 1), self.time)
            if i:
                x = self.widen[i - 1](torch.nn.functional.interpolate(x, scale_factor=2.0))
        return self.last(x)


def diffusion() -> tuple[nn.Module, Tensor]:
    return _Diffusion([64, 128, 256]), torch.randn(8, 3, 32, 32)


# ---- image translation ---------------------------------------------------------------------------


def cyclegan() -> tuple[nn.Module, Tensor]:
    """The generator with six residual blocks (Zhu et al., arXiv:1703.10593)."""

    def convolution(channels: int, width: int, k: int, stride: int = 1) -> list[nn.Module]:
        pad = [nn.ReflectionPad2d(k // 2)] if stride == 1 else []
        return [*pad, nn.Conv2d(channels, width, k, stride, 0 if pad else 1), nn.InstanceNorm2d(width)]

    def block() -> nn.Module:
        return Residual(*convolution(256, 256, 3), nn.ReLU(True), *convolution(256, 256, 3), last=False)

    layers = [*convolution(3, 64, 7), nn.ReLU(True)]
    for width in (128, 256):
        layers += [*convolution(width // 2, width, 3, 2), nn.ReLU(True)]
    layers += [block() for _ in range(6)]
    for width in (128, 64):
        layers += [nn.ConvTranspose2d(2 * width, width, 3, 2, 1, 1), nn.InstanceNorm2d(width), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(64, 3, 7), nn.Tanh()), torch.randn(1, 3, 128, 128)


# ---- video and sequences -------------------------------------------------------------------------


def r2plus1d_18() -> tuple[nn.Module, Tensor]:
    """The layers of R(2+1)D-18 (Tran et al., arXiv:1711.11248): kernels of 3 in space and in time, apart."""

    def pair(channels: int, width: int, stride: int = 1) -> list[nn.Module]:
        between = 27 * channels * width // (9 * channels + 3 * width)
        in_space = nn.Conv3d(channels, between, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False)
        in_time = nn.Conv3d(between, width, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False)
        return [in_space, nn.BatchNorm3d(between), nn.ReLU(), in_time, nn.BatchNorm3d(width)]

    layers: list[nn.Module] = [nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(45)]
    layers += [nn.ReLU(), nn.Conv3d(45, 64, (3, 1, 1), 1, (1, 0, 0), bias=False), nn.BatchNorm3d(64), nn.ReLU()]
    for width in (64, 128, 256, 512):
        layers += [] if width == 64 else [*pair(width // 2, width, 2), nn.ReLU()]
        for _ in range(2 if width == 64 else 1):
            layers.append(Residual(*pair(width, width), nn.ReLU(), *pair(width, width)))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 10))
    return net, torch.randn(1, 3, 8, 112, 112)


def resnet_1d() -> tuple[nn.Module, Tensor]:
    """For signals of twelve leads, as of a heart."""

    def norm(width: int) -> list[nn.Module]:
        return [nn.Conv1d(width, width, 3, padding=1, bias=False), nn.BatchNorm1d(width)]

    layers: list[nn.Module] = [nn.Conv1d(12, 64, 15, 2, 7), nn.BatchNorm1d(64), nn.ReLU()]
    for width in (64, 128, 256):
        layers += [] if width == 64 else [nn.Conv1d(width // 2, width, 1, 2), nn.BatchNorm1d(width)]
        layers += [Residual(*norm(width), nn.ReLU(), *norm(width)) for _ in range(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 5)), torch.randn(8, 12, 4000)


# ---- small networks, whose steps take about as long as their calls ----------------------------------------


def discriminator() -> tuple[nn.Module, Tensor]:
    """The discriminator of DCGAN (arXiv:1511.06434) for images of 32x32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for width in (128, 256):
        layers += [nn.Conv2d(width // 2, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*layers, nn.Conv2d(256, 1, 4, 1, 0, bias=False), nn.Flatten()), torch.randn(8, 3, 32, 32)


def resnet20() -> tuple[nn.Module, Tensor]:
    """The ResNet for CIFAR with 20 layers (arXiv:1512.03385)."""

    def norm(channels: int, width: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]

    layers: list[nn.Module] = [*norm(3, 16), nn.ReLU()]
    for width in (16, 32, 64):
        layers += [] if width == 16 else [*norm(width // 2, width, 2), nn.ReLU()]
        layers += [Residual(*norm(width, width), nn.ReLU(), *norm(width, width)) for _ in range(3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)), torch.randn(8, 3, 32, 32)


def tcn() -> tuple[nn.Module, Tensor]:
    """A temporal convolutional network of 32 channels (arXiv:1803.01271)."""
    layers: list[nn.Module] = [nn.Conv1d(8, 32, 1)]
    for dilation in (1, 2, 4, 8):
        same = [
            layer
            for _ in range(2)
            for layer in (nn.Conv1d(32, 32, 3, padding=dilation, dilation=dilation), nn.ReLU(), nn.Dropout(0.1))
        ]
        layers.append(Residual(*same))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 4)), torch.randn(8, 8, 256)


class _Mamba(nn.Module):
    """A block of Mamba (arXiv:2312.00752) without its scan, which is no convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)
        self.conv = nn.Conv1d(2 * width, 2 * width, 4, padding=3, groups=2 * width)

    def forward(self, x: Tensor) -> Tensor:  # [N, L, C]
        x, gate = self.into(x).mT.chunk(2, 1)
        return self.out((F.silu(self.conv(x)[..., : x.shape[-1]]) * F.silu(gate)).mT)


def mamba(batch: int = 8) -> tuple[nn.Module, Tensor]:
    """Four blocks of Mamba of 768 channels, for sequences of 2048."""
    return nn.Sequential(*(_Mamba(768) for _ in range(4))), torch.randn(batch, 2048, 768)


def video_patches(batch: int = 4096) -> tuple[nn.Module, Tensor]:
    """The embedding of patches of a video as Qwen2-VL has it: one patch is the whole input of its convolution."""
    layer = nn.Conv3d(3, 1152, (2, 14, 14), stride=(2, 14, 14), bias=False)
    return nn.Sequential(layer, nn.Flatten()), torch.randn(batch, 3, 2, 14, 14)


def lenet() -> tuple[nn.Module, Tensor]:
    """LeNet-5 with ReLU and max pooling, for images of 28x28."""
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    classifier = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), *classifier), torch.randn(32, 1, 28, 28)


class Logits(nn.Module):
    """The logits of a classifier of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def mobilenet_v2_small() -> tuple[nn.Module, Tensor]:
    """MobileNetV2 for one image of 64x64."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return Logits(MobileNetV2ForImageClassification(MobileNetV2Config())), torch.randn(1, 3, 64, 64)


class _Residual(nn.Module):
    """A block of AlphaZero's tower."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.other(self.second(torch.relu(self.norm(self.first(x))))))


def tower() -> tuple[nn.Module, Tensor]:
    """Six blocks of AlphaZero's tower, for one position of 8x8."""
    return nn.Sequential(nn.Conv2d(17, 64, 3, padding=1), *(_Residual() for _ in range(6))), torch.randn(1, 17, 8, 8)


class _Fire(nn.Module):
    """A module of SqueezeNet."""

    def __init__(self, channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.one, self.three = nn.Conv2d(squeezed, expanded, 1), nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.squeeze(x))
        return torch.relu(torch.cat([self.one(x), self.three(x)], 1))


def squeezenet() -> tuple[nn.Module, Tensor]:
    """SqueezeNet 1.1 without its classifier, for 4 images of 64x64."""
    widths = [[(64, 16, 64), (128, 16, 64)], [(128, 32, 128), (256, 32, 128)]]
    widths += [[(256, 48, 192), (384, 48, 192), (384, 64, 256), (512, 64, 256)]]
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU()]
    for stage in widths:
        layers += [nn.MaxPool2d(3, 2), *(_Fire(*width) for width in stage)]
    return nn.Sequential(*layers), torch.randn(4, 3, 64, 64)
