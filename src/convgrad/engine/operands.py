"""Tensors in the layout in which a backend takes its operands."""

from __future__ import annotations

from torch import Tensor

from ..backends import Backend, operand_format
from ..problem import ConvProblem


def is_prepared(backend: Backend, problem: ConvProblem, tensor: Tensor) -> bool:
    """Whether the backend takes this tensor as it lies in memory."""
    if "any" in backend.layouts:
        return True
    if tensor.is_conj() or tensor.is_neg():
        return False
    memory_format = operand_format(backend, problem)
    return memory_format is None or tensor.is_contiguous(memory_format=memory_format)


def prepare(backend: Backend, problem: ConvProblem, tensor: Tensor) -> Tensor:
    """The tensor itself if the backend takes it as it is, else a copy in `operand_format`.

    An expanded gradient of a sum or a permuted weight is copied here. Lazy conjugations and negations are carried out.

    Shape:
        - tensor and result: that of a slot of the problem.

    Equivalent to:
        >>> import torch
        >>> from convgrad.backends.reference import ReferenceBackend
        >>> x = torch.zeros(1, 3, 4)
        >>> prepare(ReferenceBackend(), ConvProblem.parse("mb1ic3iw4oc1kw1"), x) is x
        True
    """
    if "any" in backend.layouts:
        return tensor
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    memory_format = operand_format(backend, problem)
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)


def prepare_bias(bias: Tensor) -> Tensor:
    """A contiguous bias: one that is expanded, or strided within another tensor, is copied here."""
    if bias.is_conj() or bias.is_neg():
        bias = bias.resolve_conj().resolve_neg()
    return bias.contiguous()
