"""Every private or version-dependent PyTorch call, with its fallback. Nothing else in the library touches one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "aten_memory_format",
    "functorch_active",
    "profiler_enabled",
    "suggests_channels_last",
    "will_execute",
]

_C: Any = torch._C

functorch_active = _C._are_functorch_transforms_active
profiler_enabled = getattr(_C, "_autograd", torch.autograd)._profiler_enabled


def suggests_channels_last(t: Tensor) -> bool:
    """PyTorch's suggest_memory_format for a 4-d or 5-d tensor: strides that order it channels_last."""
    if t.dim() == 4:
        return t.is_contiguous(memory_format=torch.channels_last) or _strides_like_channels_last(t)
    if t.dim() == 5:
        return t.is_contiguous(memory_format=torch.channels_last_3d) or _strides_like_channels_last(t)
    return False


def _strides_like_channels_last(t: Tensor) -> bool:
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(t) is not torch.contiguous_format


def channels_last_of(ndim: int) -> torch.memory_format:
    """The channels_last format of a tensor with ``ndim`` spatial dimensions (1-d: contiguous)."""
    return {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim, torch.contiguous_format)


def aten_memory_format(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.memory_format:
    """The layout in which ATen would return the results for these operands.

    Source: aten/src/ATen/native/Convolution.cpp, determine_backend_memory_format; asked of ATen itself.
    A 1-d convolution is returned contiguous.
    """
    ndim = weight.dim() - 2
    if ndim == 1:
        return torch.contiguous_format
    if input.device.type == "meta" or weight.device.type == "meta":
        last = suggests_channels_last(input) or suggests_channels_last(weight)
        return channels_last_of(ndim) if last else torch.contiguous_format
    backend = _C._select_conv_backend(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return _C._conv_determine_backend_memory_format(input, weight, backend)


def will_execute(node: Any) -> bool:
    """Whether the running backward pass needs the gradient that flows into ``node``."""
    if node is None:
        return False
    try:
        return _C._will_engine_execute_node(node)
    except RuntimeError:  # no backward pass is running in this thread, or it was asked for no subset
        return True
