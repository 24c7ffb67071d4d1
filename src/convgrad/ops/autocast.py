"""Autocast: the operands are cast to the autocast dtype of their device, as for PyTorch's own convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["register"]

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}
_OPERATORS = ("convolution", "grad_input", "grad_weight")


def register(library: torch.library.Library) -> None:
    """Give each operator that yields one result a kernel at each device's autocast key."""
    for device, key in _KEYS.items():
        for name in _OPERATORS:
            library.impl(name, _kernel(name, device, key), key)


def _kernel(name: str, device: str, key: str) -> Callable[..., Tensor]:
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(value: Any) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(torch.get_autocast_dtype(device)) if eligible and value.device.type == device else value

    def kernel(*args: Any, **options: Any) -> Tensor:
        op = getattr(torch.ops.convgrad, name).default
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*(cast(a) for a in args), **options)

    return kernel
