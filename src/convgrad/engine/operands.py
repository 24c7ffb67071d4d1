"""Tensors in a layout that a backend declares."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.base import Backend
from ..problem import ConvProblem

__all__ = ["is_dense", "prepare"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_dense(backend: Backend, tensor: Tensor) -> bool:
    """Whether a tensor already has one of the backend's layouts.

    Equivalent to:
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> is_dense(ReferenceBackend(), torch.zeros(1).expand(2, 3, 4))
        True
    """
    layouts = backend.layouts
    if "strided" in layouts or ("contiguous" in layouts and tensor.is_contiguous()):
        return True
    channels_last = _CHANNELS_LAST.get(tensor.dim()) if "channels_last" in layouts else None
    return channels_last is not None and tensor.is_contiguous(memory_format=channels_last)


def prepare(backend: Backend, problem: ConvProblem, tensor: Tensor) -> Tensor:
    """The tensor itself if its layout is one of the backend's, else a copy in the problem's memory format.

    A copy is in the other layout where the backend does not take the problem's. Lazy conjugations and negations are
    carried out.

    Shape:
        - tensor and result: that of a slot of the problem.

    Equivalent to:
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> x = torch.zeros(1, 3, 4)
        >>> prepare(ReferenceBackend(), ConvProblem.parse("mb1ic3iw4oc1kw1"), x) is x
        True
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if is_dense(backend, tensor):
        return tensor
    channels_last = _CHANNELS_LAST.get(tensor.dim()) if "channels_last" in backend.layouts else None
    if channels_last is not None and (problem.channels_last or "contiguous" not in backend.layouts):
        return tensor.contiguous(memory_format=channels_last)
    return tensor.contiguous()
