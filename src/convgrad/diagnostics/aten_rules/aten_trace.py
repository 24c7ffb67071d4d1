"""PyTorch's four steps for one call: validate, select a backend, choose a layout, compute.

The last one says which functions are called, what is copied first, and how often PyTorch loops over groups. Modelled
after ``_convolution``, ``convolution_backward`` and ``subtensor`` of ATen's ``Convolution.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...problem import ConvProblem
from .call import ConvCall, TensorSpec, short
from .machine import Machine
from .names import kernel_of
from .select import Decision, backend_of_call, described_call, layout_decision

#: Backends whose kernels know one group only: PyTorch cuts the tensors into groups and calls them once for each.
_ONE_GROUP = ("NnpackSpatial", "Slow2d", "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d")
#: Backends that get the operands in whatever layout they have.
_ANY_LAYOUT = ("Overrideable", "Mps", "Empty", "MkldnnEmpty", "Winograd3x3Depthwise", "Xnnpack2d")


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that PyTorch makes before or after a kernel runs."""

    what: str
    why: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class KernelRun:
    """One direction of the computation: the function, how often it is called, the copies, the scratch memory."""

    function: str
    calls: int
    copies: tuple[Copy, ...]
    temporaries: tuple[str, ...]


@dataclass(frozen=True)
class AtenTrace:
    """The four steps for one call, with everything that decided them.

    Args:
        call: the operands and arguments, checked.
        backend: the choice of the forward pass.
        memory_format: the layout of the forward pass.
        forward: what runs forward.
        gradient_backend: the choice of the backward pass: one for both gradients, made before ``output_mask`` is read.
        gradients: what runs backward; None where there is no backward.
    """

    call: ConvCall
    backend: Decision
    memory_format: Decision
    forward: KernelRun
    gradient_backend: Decision
    gradients: KernelRun | None

    def __str__(self) -> str:
        c = self.call
        lines = [
            f"validate: input {c.input}; weight {c.weight}; stride={c.stride} padding={tuple(p for p, _ in c.padding)} "
            f"dilation={c.dilation} transposed={c.transposed} output_padding={c.output_padding} groups={c.groups}: "
            "accepted",
            str(self.backend),
            str(self.memory_format),
        ]
        for title, run in (("forward", self.forward), ("gradients", self.gradients)):
            if run is None:
                lines.append(f"{title}: this backend has no backward")
                continue
            times = f", {run.calls} times, once for each group" if run.calls > 1 else ""
            of = f" ({self.gradient_backend.answer})" if title == "gradients" else ""
            lines.append(f"{title}: {run.function}{of}{times}")
            lines += [f"  copies     {k.what}, {k.nbytes} bytes: {k.why}" for k in run.copies]
            lines += [f"  allocates  {t}" for t in run.temporaries]
        return "\n".join(lines)


def trace_aten(input: TensorSpec | Tensor | ConvProblem, *args: Any, **kwargs: Any) -> AtenTrace:
    """Return PyTorch's four steps for one call: validate, select a backend, choose a layout, compute.

    The arguments are those of `select_conv_backend`.

    Raises:
        ShapeError, DtypeError: operands that do not belong together.
        ValueError: a device description that cannot be read.
    """
    return trace_call(*described_call(input, *args, **kwargs))


def trace_call(call: ConvCall, machine: Machine) -> AtenTrace:
    """Return the steps for a call that is already described and checked."""
    backend = backend_of_call(call, machine)
    gradient_backend = backend_of_call(replace(call, need_backward=True), machine)
    call, _ = call.symmetric()
    layout, forward = _run(call, backend, backward=False)
    _, gradients = _run(call, gradient_backend, backward=True)
    has_backward = bool(kernel_of(gradient_backend.answer).backward)
    return AtenTrace(call, backend, layout, forward, gradient_backend, gradients if has_backward else None)


def _run(call: ConvCall, backend: Decision, *, backward: bool) -> tuple[Decision, KernelRun]:
    """The layout in which a backend runs, and what it runs."""
    name, c = backend.answer, call.view_1d_as_2d()
    kernel, layout = kernel_of(name), layout_decision(backend.answer, c, backend.machine)
    copies: list[Copy] = []
    if c is not call and not call.input.is_contiguous():
        why = "a 1-D input is made contiguous before it is viewed as 2-D"
        copies.append(Copy(f"input {call.input}", why, call.input.nbytes))
    for what, spec in (("input", c.input), ("weight", c.weight)):
        if name not in _ANY_LAYOUT and not spec.mkldnn and not spec.is_contiguous(layout.value):
            why = f"the backend works in {short(layout.value)}"
            copies.append(Copy(f"{what} {spec}", why, spec.nbytes))
    groups = c.groups if name in _ONE_GROUP else 1
    if groups > 1:
        copies += _group_copies(c, layout.value, backward)
    forward, gradients = (kernel.forward, kernel.forward_temporaries), (kernel.backward, kernel.backward_temporaries)
    function, temporaries = gradients if backward else forward
    if call.input.device_type == "cuda" and kernel.cuda_temporaries:
        temporaries = kernel.cuda_temporaries
    return layout, KernelRun(function, groups, tuple(copies), temporaries)


def _group_copies(c: ConvCall, fmt: torch.memory_format, backward: bool) -> list[Copy]:
    """Every group's slice of every operand is made contiguous, and the results are concatenated."""
    copies: list[Copy] = []
    out = TensorSpec(c.output_shape, dtype=c.input.dtype)
    sliced = [("input", c.input.contiguous(fmt), 1), ("weight", c.weight.contiguous(fmt), 0)]
    for what, spec, dim in [*sliced, ("grad_output", out, 1)] if backward else sliced:
        part = replace(spec, shape=(*spec.shape[:dim], spec.shape[dim] // c.groups, *spec.shape[dim + 1 :]))
        if not part.is_contiguous(spec.suggest_memory_format()):
            copies.append(Copy(f"{c.groups} slices of {what}", "the kernel knows one group only", spec.nbytes))
    result = "the gradients of the groups" if backward else "the outputs of the groups"
    nbytes = c.input.nbytes + c.weight.nbytes if backward else out.nbytes
    return [*copies, Copy(result, "they are concatenated", nbytes)]
