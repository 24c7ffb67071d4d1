"""Strides of dimensions of size 1: no index multiplies them, so they may be anything, but some libraries read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import channels_last_of, suggests_channels_last


def usual_strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a new tensor.

    A meta tensor would say the same, but is seen by whoever watches allocations; PyTorch's own functions would, but
    import sympy, which takes half a second.
    """
    last = len(shape) - 1
    strides, step = [0] * len(shape), 1
    for dim in (1, *range(last, 1, -1), 0) if channels_last else range(last, -1, -1):
        strides[dim] = step
        step *= shape[dim] if channels_last else max(shape[dim], 1)
    return tuple(strides)


#: (shape, strides) of tensors whose strides are as PyTorch expects them; emptied when full.
_ordinary: set[Any] = set()


def tidy(t: Tensor) -> Tensor:
    """Return a view with ordinary strides in dimensions of size 1, or the tensor itself where they are ordinary.

    PyTorch 2.13 (oneDNN, groups, a channels_last weight) returns wrong numbers for others, silently.
    """
    key = (t.shape, t.stride())
    if key in _ordinary:
        return t
    tidied = _tidy(t) if t.dim() >= 4 and 1 in t.shape else t
    if tidied is t:
        if len(_ordinary) >= 4096:
            _ordinary.clear()
        _ordinary.add(key)
    return tidied


def _tidy(t: Tensor) -> Tensor:
    channels_last = channels_last_of(t.dim() - 2)
    if suggests_channels_last(t):
        layout = channels_last
    elif t.is_contiguous():
        layout = torch.contiguous_format
    else:  # channels_last but for a stride of size 1, which PyTorch does not see as channels_last
        return t.clone(memory_format=torch.contiguous_format) if t.is_contiguous(memory_format=channels_last) else t
    usual = usual_strides(t.shape, layout is channels_last)
    if t.stride() == usual or not t.is_contiguous(memory_format=layout):
        return t
    return t.as_strided(t.shape, usual)
