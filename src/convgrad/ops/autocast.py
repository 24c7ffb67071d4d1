"""Autocast: the operands are cast to the autocast dtype of their device, as for PyTorch's own convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}


def register(library: torch.library.Library) -> None:
    """Give every operator a kernel at each device's autocast key."""
    for device, key in _KEYS.items():
        for name in ("convolution", "convolution_backward", "grad_input", "grad_weight"):
            packet = getattr(torch.ops.convgrad, name)
            for overload in packet.overloads():
                operator = getattr(packet, overload)
                library.impl(operator, _kernel(operator, device), key)


def cast_operands(*operands: Tensor | None) -> tuple[Any, ...]:
    """What autocast makes of the operands of a convolution: the same tensors where it is off.

    For an autograd.Function: cast before it, so that it saves what was computed with, as PyTorch's convolution does.
    """
    return tuple([_cast(t, t.device.type) if t is not None and autocast_is_on(t.device.type) else t for t in operands])


def autocast_is_on(device: str) -> bool:
    """Whether autocast casts on this kind of device."""
    return device in _KEYS and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> Any:
    """A block in which autocast is off for this kind of device; cheaper than ``torch.autocast(device, enabled=False)``,
    and the casts that the enclosing block remembers stay.
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEYS[device])))


def _cast(value: Any, device: str) -> Any:
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.get_autocast_dtype(device)) if eligible and value.device.type == device else value


def _kernel(operator: Callable[..., Any], device: str) -> Callable[..., Any]:

    def kernel(*args: Any, **options: Any) -> Any:
        with without_autocast(device):
            return operator(*[_cast(a, device) for a in args], **options)

    return kernel
