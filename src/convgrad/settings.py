"""The one reader of PyTorch's flags that change which kernel may run or what it returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Settings", "cudnn_allows_tf32", "current", "deterministic", "flags", "mkldnn"]


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


#: Whether deterministic algorithms are demanded, and whether oneDNN may be used, without a Python frame.
deterministic = torch._C._get_deterministic_algorithms
mkldnn = torch._C._get_mkldnn_enabled


def flags(like: Tensor) -> object:
    """A cheap hashable value that changes whenever the flags that matter on this tensor's device do."""
    return (torch.get_num_threads(), deterministic(), mkldnn()) if like.is_cpu else current()
