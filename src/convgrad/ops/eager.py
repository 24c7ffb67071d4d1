"""When a call may skip the dispatcher: plain tensors, and nobody between the caller and the kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from .._compat import (
    any_autocast,
    dispatch_modes,
    forward_ad_active,
    function_modes,
    functorch_active,
    jit_tracing,
)

__all__ = ["is_eager"]

_PLAIN = frozenset((Tensor, Parameter))


def is_eager(first: Tensor, second: Tensor, third: Tensor | None = None) -> bool:
    """No tensor subclass, functorch transform, dispatch or function mode, forward AD, autocast, trace or compiler."""
    return (
        type(first) in _PLAIN
        and type(second) in _PLAIN
        and (third is None or type(third) in _PLAIN)
        and not functorch_active()
        and not dispatch_modes()
        and not function_modes()
        and not forward_ad_active()
        and not any_autocast()
        and not torch.compiler.is_compiling()
        and jit_tracing() is None
        and first.device.type != "meta"
    )
