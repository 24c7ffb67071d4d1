"""A step: one call of one backend, and the function that makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import Backend, operand_format
from ..problem import OPERANDS, ConvProblem, Outputs, Slot

SLOTS: tuple[Slot, Slot, Slot] = ("grad_output", "input", "weight")


class Step(NamedTuple):
    """One call of one backend, and why it was chosen."""

    backend: Backend
    outputs: Outputs
    reason: str
    #: The choice is to be looked at again, once there is time to measure.
    unsettled: bool = False
    #: A rule proposed it, and its first call times it against PyTorch's own.
    proposed: bool = False


def slots_of(outputs: Outputs) -> tuple[int, ...]:
    """Return the operands that one call for these outputs reads, in the order of its backend's arguments."""
    slots = OPERANDS[outputs[0]] if len(outputs) == 1 else SLOTS  # pyright: ignore[reportArgumentType]
    return tuple([SLOTS.index(s) for s in slots])


def bind_step(problem: ConvProblem, step: Step, like: tuple[Tensor | None, ...] = ()) -> Callable[..., Any]:
    """Return a function that copies operands into a layout of the backend, allocates a workspace, and adds a bias.

    Args:
        like: operands and bias of a pass, if all later ones have the same strides and none is lazily negated: where the
            backend takes these as they are, its own function is returned.
    """
    backend = step.backend
    kernel = backend.bind(problem, step.outputs)
    size = backend.workspace(problem, step.outputs)
    one_pass = len(step.outputs) == 1
    fused = backend.fuses_bias(problem)
    if "any" in backend.layouts and not size and (fused or not one_pass):
        return kernel
    ask_all = problem.dtype.is_complex  # a lazy conjugate is possible
    if like and not ask_all and not size:
        a, b, bias = like
        taken = all(t is not None and is_prepared(backend, problem, t) for t in (a, b))
        if taken and (bias is None or (fused and bias.is_contiguous())):
            return kernel
    # Where any strides will do, contiguous operands are not looked at further.
    layout = operand_format(backend, problem) or torch.contiguous_format
    channels = (-1, *(1,) * problem.ndim)

    def ready(t: Tensor) -> Tensor:
        return prepare(backend, problem, t) if ask_all or not t.is_contiguous(memory_format=layout) or t.is_neg() else t

    def scratch(like: Tensor) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=like.device)

    def run_several(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return kernel(ready(grad_output), ready(input), ready(weight), scratch(weight) if size else None)

    def run_pass(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        # Written out, for a call of `ready` would be most of what a small convolution costs beside its kernel.
        if ask_all or not a.is_contiguous(memory_format=layout) or a.is_neg():
            a = prepare(backend, problem, a)
        if ask_all or not b.is_contiguous(memory_format=layout) or b.is_neg():
            b = prepare(backend, problem, b)
        workspace = scratch(a) if size else None
        if bias is None or not fused:
            result = kernel(a, b, None, workspace)
            return result if bias is None else result.add_(bias.view(channels))
        bias = bias.resolve_conj().resolve_neg().contiguous()  # one that is expanded, or strided in another tensor
        return kernel(a, b, bias, workspace)

    return run_pass if one_pass else run_several


# ---- operands in the layout in which a backend takes them ---------------------------------------------


def is_prepared(backend: Backend, problem: ConvProblem, tensor: Tensor) -> bool:
    """Whether the backend takes this tensor as it is."""
    if "any" in backend.layouts:
        return True
    if tensor.is_conj() or tensor.is_neg():
        return False
    memory_format = operand_format(backend, problem)
    return memory_format is None or tensor.is_contiguous(memory_format=memory_format)


def prepare(backend: Backend, problem: ConvProblem, tensor: Tensor) -> Tensor:
    """Return the tensor itself if the backend takes it as it is, else a copy in `operand_format`.

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
    if is_prepared(backend, problem, tensor):
        return tensor
    tensor, memory_format = tensor.resolve_conj().resolve_neg(), operand_format(backend, problem)
    return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)
