"""PyTorch's four steps for one call: validate, select a backend, choose a layout, compute.

The last one says which functions are called, what is copied first, and how often PyTorch loops over groups. Modelled
after ``_convolution``, ``convolution_backward`` and ``subtensor`` of ATen's ``Convolution.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compat import channels_last_of
from ...backends import padded
from ...errors import ShapeError
from ...problem import ConvProblem, Geometry
from . import conditions
from .call import ConvCall, Ints, TensorSpec, short, suggested, told
from .conditions import Rule
from .kernel_names import kernel_of
from .machine import MODELLED_VERSIONS, DeviceLike, Machine, machine_of

#: ATen's backends in the order of its own enumeration: the index is the value of ``torch._C._ConvBackend``.
BACKENDS: tuple[str, ...] = (
    "CudaDepthwise2d", "CudaDepthwise3d", "Cudnn", "CudnnTranspose", "Empty", "Miopen", "MiopenDepthwise",
    "MiopenTranspose", "Mkldnn", "MkldnnTranspose", "MkldnnEmpty", "NnpackSpatial", "Overrideable", "Slow2d", "Slow3d",
    "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Winograd3x3Depthwise", "Xnnpack2d", "Mps",
    "MpsTranspose",
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """A choice of PyTorch's, and why."""

    kind: str  # what was decided: "backend" or "memory_format"
    answer: str  # its name
    rules: tuple[Rule, ...]  # every rule that was evaluated, in PyTorch's order; others PyTorch does not reach
    machine: Machine  # the machine that it was decided for
    notes: tuple[str, ...] = ()  # what else a reader should know
    value: Any = field(default=None, compare=False)  # PyTorch's own: the number of a backend, a `torch.memory_format`

    @property
    def backend(self) -> str:
        """The backend's name, where a backend was decided."""
        return self._about("backend", self.answer)

    @property
    def memory_format(self) -> torch.memory_format:
        """The layout, where a layout was decided."""
        return self._about("memory_format", self.value)

    def _about(self, kind: str, value: Any) -> Any:
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
    input: TensorSpec | Tensor | ConvProblem, weight: TensorSpec | Tensor | None = None,
    bias: TensorSpec | Tensor | None = None, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1,
    transposed: bool = False, output_padding: Ints = 0, groups: int = 1, *, device: DeviceLike = None,
    need_backward: bool | None = None,
) -> Decision:  # fmt: skip
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
    return decided(*described_call(input, *arguments, device=device, need_backward=need_backward))[0]


def described_call(
    input: Any, weight: Any = None, *args: Any, device: DeviceLike = None, need_backward: Any = None, **kwargs: Any
) -> tuple[ConvCall, Machine]:
    """Return the call that the arguments of `select_conv_backend` mean, and the machine that it runs on."""
    if isinstance(input, ConvProblem):
        machine = machine_of(device)
        if input.padding_mode != "zeros":  # PyTorch writes it out around the input first
            input = padded(input)
        return ConvCall.of_problem(input, machine.device_type, need_backward is not False), machine
    call = ConvCall.of(input, weight, *args, need_backward=need_backward, **kwargs)
    if any(low == high < 0 for low, high in call.geometry.padding):  # one number for both sides crops nothing there
        raise ShapeError(f"negative padding is not supported, but got padding={call.geometry.padding}")
    machine = machine_of(device, call.device)
    return call._replace(device=machine.device_type), machine


def decided(call: ConvCall, machine: Machine) -> tuple[Decision, Decision]:
    """Return the backend for a call that is described and checked, and the layout in which this works on it."""
    call, notes = call.symmetric()
    flat = call.view_1d_as_2d()
    name, log = conditions.select(flat, machine)
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
    backend = Decision("backend", name, tuple(log), machine, notes, BACKENDS.index(name))
    return backend, _layout(name, flat, machine)


def _layout(backend: str, call: ConvCall, machine: Machine) -> Decision:
    last, log = conditions.in_channels_last(backend, call, machine)
    fmt = channels_last_of(call.weight.dim() - 2) if last else torch.contiguous_format
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
        device, backend = backend.machine if device is None else device, backend.backend
    name = BACKENDS[backend] if isinstance(backend, int) else backend
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is not one of ATen's backends: {', '.join(BACKENDS)}")
    machine = machine_of(device, x.device_type)
    no_arguments = Geometry((), (), (), False, (), 1)
    call = ConvCall(x.meta, w.meta, None, no_arguments, machine.device_type, (x.mkldnn, w.mkldnn))
    return _layout(name, call, machine)


#: Backends whose kernels know one group only: PyTorch cuts the tensors into groups and calls them once for each.
_ONE_GROUP = ("NnpackSpatial", "Slow2d", "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d")
#: Backends that get the operands in whatever layout they have.
_ANY_LAYOUT = ("Overrideable", "Mps", "Empty", "MkldnnEmpty", "Winograd3x3Depthwise", "Xnnpack2d")


class Copy(NamedTuple):
    """A copy that PyTorch makes before or after a kernel runs."""

    what: str
    why: str
    nbytes: int

    def __str__(self) -> str:
        return f"copies     {self.what}, {self.nbytes} bytes: {self.why}"


class KernelRun(NamedTuple):
    """One direction of the computation: the function, how often it is called, the copies, the scratch memory."""

    function: str
    calls: int
    copies: tuple[Copy, ...]
    temporaries: tuple[str, ...]


@dataclass(frozen=True)
class AtenTrace:
    """The four steps for one call, with everything that decided them."""

    call: ConvCall  # the operands and arguments, checked
    backend: Decision  # the choice of the forward pass
    memory_format: Decision  # the layout of the forward pass
    forward: KernelRun
    gradient_backend: Decision  # one for both gradients, made before ``output_mask`` is read
    gradients: KernelRun

    def __str__(self) -> str:
        (input, weight, _, g), opaque = self.call[:4], self.call.opaque
        lines = [
            f"validate: input {told(input, opaque[0])}; weight {told(weight, opaque[1])}; stride={g.stride} "
            f"padding={tuple(p for p, _ in g.padding)} "
            f"dilation={g.dilation} transposed={g.transposed} output_padding={g.output_padding} groups={g.groups}: "
            "accepted",
            str(self.backend),
            str(self.memory_format),
        ]
        for title, run in (("forward", self.forward), ("gradients", self.gradients)):
            times = f", {run.calls} times, once for each group" if run.calls > 1 else ""
            of = f" ({self.gradient_backend.answer})" if title == "gradients" else ""
            lines.append(f"{title}: {run.function}{of}{times}")
            lines += [f"  {line}" for line in (*run.copies, *(f"allocates  {t}" for t in run.temporaries))]
        return "\n".join(lines)


def trace_aten(input: TensorSpec | Tensor | ConvProblem, *args: Any, **kwargs: Any) -> AtenTrace:
    """Return PyTorch's four steps for one call: validate, select a backend, choose a layout, compute.

    The arguments are those of `select_conv_backend`.

    Raises:
        ShapeError, DtypeError: operands that do not belong together.
        ValueError: a device description that cannot be read.
    """
    call, machine = described_call(input, *args, **kwargs)
    backend, layout = decided(call, machine)
    of_gradients, their_layout = decided(call._replace(need_backward=True), machine)
    call, _ = call.symmetric()
    forward = _run(call, backend, layout, backward=False)
    gradients = _run(call, of_gradients, their_layout, backward=True)
    return AtenTrace(call, backend, layout, forward, of_gradients, gradients)


def _run(call: ConvCall, backend: Decision, layout: Decision, *, backward: bool) -> KernelRun:
    """Return what a backend runs in one direction of a call."""
    kernel, name, c, x, fmt = kernel_of(backend.answer), backend.answer, call.view_1d_as_2d(), call.input, layout.value
    copies: list[Copy] = []
    if c is not call and not x.is_contiguous():
        copies.append(Copy(f"input {told(x)}", "a 1-D input is made contiguous before it is viewed as 2-D", x.nbytes))
    for what, t, opaque in (("input", c.input, c.opaque[0]), ("weight", c.weight, c.opaque[1])):
        if name not in _ANY_LAYOUT and not opaque and not t.is_contiguous(memory_format=fmt):
            copies.append(Copy(f"{what} {told(t)}", f"the backend works in {layout.answer}", t.nbytes))
    groups = c.geometry.groups if name in _ONE_GROUP else 1
    if groups > 1:  # a slice of every operand for each of them, and the results are concatenated
        input, weight = c.input.contiguous(memory_format=fmt), c.weight.contiguous(memory_format=fmt)
        out = input.new_empty(c.output_shape)
        sliced = [("input", input, 1), ("weight", weight, 0), *[("grad_output", out, 1)] * backward]
        for what, t, dim in sliced:
            if not t.narrow(dim, 0, t.shape[dim] // groups).is_contiguous(memory_format=suggested(t)):
                copies.append(Copy(f"{groups} slices of {what}", "the kernel knows one group only", t.nbytes))
        result = "the gradients of the groups" if backward else "the outputs of the groups"
        nbytes = input.nbytes + weight.nbytes if backward else out.nbytes
        copies.append(Copy(result, "they are concatenated", nbytes))
    temporaries = kernel.backward_temporaries if backward else kernel.forward_temporaries
    if c.device == "cuda":
        temporaries = kernel.cuda_temporaries or temporaries
    return KernelRun(kernel.backward if backward else kernel.forward, groups, tuple(copies), temporaries)
