"""The one reader of PyTorch's flags that change which kernel may run or what it returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Settings", "cpu_flags", "current", "device_flags", "key"]


class Settings(NamedTuple):
    """Flags in force: each may change the choice of a backend or the bits of a result."""

    deterministic: bool
    cudnn_enabled: bool
    cudnn_benchmark: bool
    cudnn_deterministic: bool
    cudnn_tf32: bool
    mkldnn_enabled: bool
    threads: int

    @property
    def must_be_deterministic(self) -> bool:
        """Whether a backend that does not repeat its bits is ruled out."""
        return self.deterministic or self.cudnn_deterministic


def cudnn_allows_tf32() -> bool:
    """Whether float32 convolutions may round their operands to TF32, by the new switches or the old one.

    ``torch.backends.cudnn.allow_tf32`` cannot be read once the new ``fp32_precision`` has been set, hence the order.
    """
    conv = getattr(torch.backends.cudnn, "conv", None)
    precision = getattr(conv, "fp32_precision", None)
    if precision not in (None, "none"):
        return precision == "tf32"
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return False


def current() -> Settings:
    """Read every flag."""
    return Settings(
        deterministic=torch.are_deterministic_algorithms_enabled(),
        cudnn_enabled=torch.backends.cudnn.enabled,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_tf32=cudnn_allows_tf32(),
        mkldnn_enabled=torch._C._get_mkldnn_enabled(),
        threads=torch.get_num_threads(),
    )


_deterministic = torch._C._get_deterministic_algorithms
_mkldnn = torch._C._get_mkldnn_enabled
_threads = torch.get_num_threads


def cpu_flags() -> int:
    """A cheap number that changes whenever the flags that matter on a CPU do."""
    return 4 * _threads() + 2 * _deterministic() + _mkldnn()


def device_flags(*tensors: Tensor | None) -> object:
    """The devices of the tensors and all flags, hashable."""
    return (*(None if t is None else t.device for t in tensors), current())


def key(like: Tensor) -> object:
    """A cheap hashable value that changes whenever the flags that matter on this tensor's device do."""
    return cpu_flags() if like.is_cpu else current()
