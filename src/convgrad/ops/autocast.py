"""Autocast: the operands are cast to the autocast dtype of their device, as for PyTorch's own convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat import without_autocast

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}


def register(library: torch.library.Library) -> None:
    """Give every operator a kernel at each device's autocast key."""
    for device, key in _KEYS.items():
        for name in ("convolution", "convolution_backward", "grad_input", "grad_weight"):
            packet = getattr(torch.ops.convgrad, name)
            for overload in packet.overloads():
                operator = getattr(packet, overload)
                library.impl(operator, _kernel(operator, device), key)


def cast_operands(*operands: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return operands as autocast casts them: before an autograd.Function, so that it saves what was computed with."""
    return tuple([cast(t, t.device.type) if t is not None and autocast_is_on(t.device.type) else t for t in operands])


def autocast_is_on(device: str) -> bool:
    """Whether autocast casts on this kind of device."""
    return device in _KEYS and torch.is_autocast_enabled(device)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts operands to on this kind of device; None where it is off."""
    return torch.get_autocast_dtype(device) if autocast_is_on(device) else None


def cast(value: Any, device: str) -> Any:
    """Return one argument of an operator as autocast casts it on this kind of device."""
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype(device)) if eligible and value.device.type == device else value


def _kernel(operator: Callable[..., Any], device: str) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        with without_autocast():
            return operator(*[cast(a, device) for a in args], **options)

    return kernel
