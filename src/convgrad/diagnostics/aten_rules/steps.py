"""PyTorch's four steps for one call: validate, select a backend, choose a layout, compute.

The last one says which functions are called, what is copied first, and how often PyTorch loops over groups. Modelled
after ``_convolution``, ``convolution_backward`` and ``subtensor`` of ATen's ``Convolution.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...backends import padded
from ...problem import ConvProblem
from . import rules
from .call import ConvCall, Ints, TensorSpec, call_of_problem, short
from .machine import MODELLED_VERSIONS, DeviceLike, Machine, machine_of
from .names import kernel_of
from .rules import Rule

#: ATen's backends in the order of its own enumeration: the index is the value of ``torch._C._ConvBackend``.
BACKENDS: tuple[str, ...] = (
    "CudaDepthwise2d", "CudaDepthwise3d", "Cudnn", "CudnnTranspose", "Empty", "Miopen", "MiopenDepthwise",
    "MiopenTranspose", "Mkldnn", "MkldnnTranspose", "MkldnnEmpty", "NnpackSpatial", "Overrideable", "Slow2d", "Slow3d",
    "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Winograd3x3Depthwise", "Xnnpack2d", "Mps",
    "MpsTranspose",
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """A choice of PyTorch's, and why.

    Args:
        kind: what was decided: ``"backend"`` or ``"memory_format"``.
        answer: its name.
        rules: every rule that was evaluated, in PyTorch's order; one that PyTorch does not reach is not there.
        machine: the machine it was decided for.
        notes: what else a reader should know.
        value: the answer as PyTorch's own value (the number of a backend, a `torch.memory_format`).
    """

    kind: str
    answer: str
    rules: tuple[Rule, ...]
    machine: Machine
    notes: tuple[str, ...] = ()
    value: Any = field(default=None, compare=False)

    @property
    def backend(self) -> str:
        """The backend's name, where a backend was decided."""
        return self._of("backend", self.answer)

    @property
    def memory_format(self) -> torch.memory_format:
        """The layout, where a layout was decided."""
        return self._of("memory_format", self.value)

    def _of(self, kind: str, value: Any) -> Any:
        if self.kind != kind:
            raise AttributeError(f"this decision is about a {self.kind}, not a {kind}")
        return value

    def __str__(self) -> str:
        rows = [rule.cells for rule in self.rules]
        width = max((len(text) for _, text, _ in rows), default=0)
        lines = [f"  {holds:<3}  {text:<{width}}  {value}".rstrip() for holds, text, value in rows]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{self.kind}: {self.answer}", f"machine: {self.machine}", *lines, *notes])


def select_conv_backend(
    input: TensorSpec | Tensor | ConvProblem,
    weight: TensorSpec | Tensor | None = None,
    bias: TensorSpec | Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    *,
    device: DeviceLike = None,
    need_backward: bool | None = None,
) -> Decision:
    """Return which of ATen's backends computes this convolution, with every rule and the value that decided it.

    PyTorch chooses once for the forward pass; its backward chooses again, for both gradients together, with
    ``need_backward=True``.

    Args:
        input: a tensor, a `TensorSpec`, or a whole `ConvProblem` (then nothing else but the keywords is needed).
        device: None for the operands' own; a description of a machine that is not here, such as ``"h100 cudnn 9.10"``,
            ``"rocm gfx942 miopen"``, ``"xpu"``, ``"mps"``, ``"cpu arm"``; or a `Machine`.
        need_backward: whether autograd needs a backward; None reads it off the tensors, as PyTorch does (a problem:
            True).

    Shape:
        - input: (N, C_in, *in), weight: (C_out, C_in/groups, *k); transposed: (C_in, C_out/groups, *k)

    Raises:
        ShapeError, DtypeError: operands that do not belong together.
        ValueError: a device description that cannot be read.
    """
    arguments = (weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return backend_of_call(*described_call(input, *arguments, device=device, need_backward=need_backward))


def described_call(
    input: TensorSpec | Tensor | ConvProblem,
    weight: TensorSpec | Tensor | None = None,
    *args: Any,
    device: DeviceLike = None,
    need_backward: bool | None = None,
    **kwargs: Any,
) -> tuple[ConvCall, Machine]:
    """Return the call that the arguments of `select_conv_backend` mean, and the machine that it runs on."""
    if isinstance(input, ConvProblem):
        machine = machine_of(device)
        if input.padding_mode != "zeros":  # PyTorch writes it out around the input first
            input = padded(input)
        return call_of_problem(input, machine.device_type, need_backward is not False), machine
    if weight is None:
        raise TypeError("a weight is needed beside an input tensor (or give one ConvProblem)")
    call = ConvCall.of(input, weight, *args, need_backward=need_backward, **kwargs)
    machine = machine_of(device, call.input.device_type)
    return call if device is None else call.on(machine.device_type), machine


def backend_of_call(call: ConvCall, machine: Machine) -> Decision:
    """Return the choice for a call that is already described and checked."""
    log: list[Rule] = []
    call, notes = call.symmetric()
    flat = call.view_1d_as_2d()
    name = rules.select(flat, machine, log)
    if machine.torch_version not in MODELLED_VERSIONS:
        notes += (
            f"torch {machine.torch_version} is unknown: the rules are those of {MODELLED_VERSIONS[0]} to "
            f"{MODELLED_VERSIONS[-1]}, of the nearest of them where they differ",
        )
    if call.input.dtype.is_complex:
        notes += (
            "conv1d, conv2d and conv3d split a complex convolution into three real ones; this is the choice for "
            "torch.convolution called directly",
        )
    if flat is not call:
        copied = "" if call.input.is_contiguous() else ", after a copy to contiguous"
        notes += (f"a 1-D convolution runs as 2-D with height 1{copied}",)
    return Decision("backend", name, tuple(log), machine, notes, BACKENDS.index(name))


def layout_decision(backend: str, call: ConvCall, machine: Machine) -> Decision:
    """Return the layout in which a backend works on the operands of a call, with every rule."""
    log: list[Rule] = []
    fmt = rules.layout(backend, call, machine, log)
    return Decision("memory_format", short(fmt), tuple(log), machine, (), fmt)


def determine_backend_memory_format(
    input: TensorSpec | Tensor, weight: TensorSpec | Tensor, backend: str | int | Decision, *, device: DeviceLike = None
) -> Decision:
    """Return the layout in which a backend works on these operands, with every rule.

    Operands in another layout are copied first. (A 1-D convolution: give the operands viewed as 2-D, as PyTorch does.)

    Args:
        backend: a name of `BACKENDS`, its number, or the answer of `select_conv_backend`.

    Raises:
        ValueError: an unknown backend.

    Equivalent to:
        >>> import torch
        >>> x, w = torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last), torch.empty(8, 8, 3, 3)
        >>> determine_backend_memory_format(x, w, "Mkldnn").memory_format
        torch.channels_last
    """
    x, w = TensorSpec.of(input), TensorSpec.of(weight)
    if isinstance(backend, Decision):
        device = backend.machine if device is None else device
        backend = backend.backend
    name = BACKENDS[backend] if isinstance(backend, int) else backend
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is not one of ATen's backends: {', '.join(BACKENDS)}")
    machine = machine_of(device, x.device_type)
    if device is not None:
        x, w = x.on(machine.device_type), w.on(machine.device_type)
    return layout_decision(name, ConvCall(x, w, None, (), (), (), False, (), 1), machine)


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
