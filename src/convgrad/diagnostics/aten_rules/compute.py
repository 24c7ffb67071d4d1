"""The last step of PyTorch's pipeline: which functions it calls, what it copies first, and how often it loops.

`walk` puts the four steps together: validate, select a backend, choose a layout, compute.

Modelled after ``_convolution``, ``convolution_backward`` and ``subtensor`` of ATen's ``Convolution.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from ...errors import DtypeError
from ...problem import ConvProblem
from .call import Call, Ints, call_of_problem, make_call
from .layouts import layout_of
from .names import kernel_of
from .rules import Decision, Trail
from .select import DeviceLike, backend_of_call, machine_of, on_machine
from .tensors import TensorSpec

__all__ = ["Copy", "Step", "Walk", "walk"]

#: Backends whose kernels know one group only: PyTorch cuts the tensors into groups and calls them once for each.
NO_GROUPS = ("NnpackSpatial", "Slow2d", "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d")
#: Backends that get the operands in whatever layout they have.
_AS_IS = ("Overrideable", "Mps", "Empty", "MkldnnEmpty", "Winograd3x3Depthwise", "Xnnpack2d")
_NEED_ONE_DTYPE = ("Cudnn", "CudnnTranspose", "Miopen", "MiopenTranspose", "Mkldnn", "MkldnnTranspose", "Mps",
                   "MpsTranspose")  # fmt: skip
_TYPE_NAMES = {torch.float16: "Half", torch.float32: "Float", torch.float64: "Double", torch.bfloat16: "BFloat16",
               torch.int8: "Char", torch.uint8: "Byte", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long",
               torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble", torch.bool: "Bool"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that PyTorch makes before or after a kernel runs."""

    what: str
    why: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """One direction of the computation: the function, how often it is called, the copies, the scratch memory."""

    function: str
    calls: int
    copies: tuple[Copy, ...]
    temporaries: tuple[str, ...]
    temporary_bytes: int | None


@dataclass(frozen=True)
class Walk:
    """The four steps for one call, with everything that decided them.

    Args:
        call: the operands and parameters, checked.
        backend: the choice of the forward pass.
        memory_format: the layout of the forward pass.
        forward: what runs forward.
        gradient_backend: the choice of the backward pass: one for both gradients, made before ``output_mask`` is read.
        gradients: what runs backward; None where there is no backward.
    """

    call: Call
    backend: Decision
    memory_format: Decision
    forward: Step
    gradient_backend: Decision
    gradients: Step | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        steps = {"forward": self.forward, "gradients": self.gradients}
        return {
            "input": str(self.call.input),
            "weight": str(self.call.weight),
            "backend": self.backend.to_dict(),
            "memory_format": self.memory_format.to_dict(),
            "gradient_backend": self.gradient_backend.answer,
            **{
                name: step
                and {
                    "function": step.function,
                    "calls": step.calls,
                    "copies": [{"what": c.what, "why": c.why, "bytes": c.nbytes} for c in step.copies],
                    "temporaries": list(step.temporaries),
                    "temporary_bytes": step.temporary_bytes,
                }
                for name, step in steps.items()
            },
        }

    def __str__(self) -> str:
        c = self.call
        lines = [
            f"validate: input {c.input}; weight {c.weight}; stride={c.stride} padding={c.padding} "
            f"dilation={c.dilation} transposed={c.transposed} output_padding={c.output_padding} groups={c.groups}: "
            "accepted",
            str(self.backend),
            str(self.memory_format),
        ]
        for title, step in (("forward", self.forward), ("gradients", self.gradients)):
            if step is None:
                lines.append(f"{title}: this backend has no backward")
                continue
            times = f", {step.calls} times, once for each group" if step.calls > 1 else ""
            of = f" ({self.gradient_backend.answer})" if title == "gradients" else ""
            lines.append(f"{title}: {step.function}{of}{times}")
            lines += [f"  copies     {k.what}, {k.nbytes} bytes: {k.why}" for k in step.copies]
            lines += [f"  allocates  {t}" for t in step.temporaries]
        return "\n".join(lines)


def walk(
    input: TensorSpec | torch.Tensor | ConvProblem,
    weight: TensorSpec | torch.Tensor | None = None,
    bias: TensorSpec | torch.Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    *,
    device: DeviceLike = None,
    need_backward: bool | None = None,
) -> Walk:
    """Walk through PyTorch's whole pipeline for one call: validate, select a backend, choose a layout, compute.

    The arguments are those of `select_conv_backend`.

    Raises:
        ShapeError, DtypeError: operands that do not belong together, with PyTorch's message.
        ValueError: a device description that cannot be read.

    Equivalent to:
        >>> w = walk(torch.empty(2, 6, 9, 9).double(), torch.empty(6, 2, 3, 3).double(), groups=3)
        >>> w.backend.backend, w.forward.function, w.forward.calls
        ('Slow2d', '_slow_conv2d_forward', 3)
    """
    notes: tuple[str, ...] = ()
    if isinstance(input, ConvProblem):
        machine = machine_of(device)
        call, notes = call_of_problem(input, machine.device_type, need_backward is not False)
    else:
        if weight is None:
            raise TypeError("walk: a weight is needed beside an input tensor (or give one ConvProblem)")
        call = make_call(
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, need_backward
        )
        machine = machine_of(device, call.input.device_type)
        call = on_machine(call, machine) if device is not None else call
    backend = backend_of_call(call, machine, notes)
    _check_dtypes(call, backend.answer)
    layout = _layout(call, backend)
    gradient_backend = backend_of_call(replace(call, need_backward=True), machine, notes)
    has_backward = bool(kernel_of(gradient_backend.answer).backward)
    return Walk(
        call,
        backend,
        layout,
        _step(call, backend, layout.value, backward=False),
        gradient_backend,
        _step(call, gradient_backend, _layout(call, gradient_backend).value, backward=True) if has_backward else None,
    )


def _check_dtypes(call: Call, backend: str) -> None:
    """The libraries want one dtype, and PyTorch checks it after the choice; its own kernels find out by themselves."""
    if backend not in _NEED_ONE_DTYPE:
        return
    x = call.input
    for what, spec in (("weight", call.weight), ("bias", call.bias)):
        if spec is None or spec.dtype == x.dtype or (x.mkldnn and spec.dtype == torch.float32):
            continue
        also = (
            f" or input should be a MKLDNN tensor and {what} is a dense tensor" if backend.startswith("Mkldnn") else ""
        )
        raise DtypeError(f"Input type ({_type_name(x)}) and {what} type ({_type_name(spec)}) should be the same{also}")


def _type_name(spec: TensorSpec) -> str:
    """The old name of a tensor type, torch.FloatTensor for one, as PyTorch's message has it."""
    where = "" if spec.device_type == "cpu" else f"{spec.device_type}."
    return f"torch.{where}{_TYPE_NAMES.get(spec.dtype, str(spec.dtype))}Tensor"


def _layout(call: Call, backend: Decision) -> Decision:
    trail = Trail()
    c = call.view_1d_as_2d()
    fmt = layout_of(trail, backend.answer, c.input, c.weight, backend.machine)
    name = str(fmt).removeprefix("torch.").removesuffix("_format")
    return Decision("memory_format", name, tuple(trail.rules), backend.machine, (), fmt)


def _step(call: Call, backend: Decision, fmt: torch.memory_format, *, backward: bool) -> Step:
    name, c = backend.answer, call.view_1d_as_2d()
    kernel = kernel_of(name)
    copies: list[Copy] = []
    if c is not call and not call.input.is_contiguous():
        copies.append(
            Copy(f"input {call.input}", "a 1-D input is made contiguous before it is viewed as 2-D", call.input.nbytes)
        )
    in_format = f"the backend works in {str(fmt).removeprefix('torch.')}"
    for what, spec in (("input", c.input), ("weight", c.weight)):
        if name not in _AS_IS and not spec.mkldnn and not spec.is_contiguous(fmt):
            copies.append(Copy(f"{what} {spec}", in_format, spec.nbytes))
    groups = c.groups if name in NO_GROUPS and c.groups > 1 else 1
    if groups > 1:
        copies += _group_copies(c, fmt, backward)
    return Step(
        kernel.backward if backward else kernel.forward,
        groups,
        tuple(copies),
        kernel.backward_temporaries if backward else kernel.forward_temporaries,
        temporary_bytes(name, c, backward=backward),
    )


def _group_copies(c: Call, fmt: torch.memory_format, backward: bool) -> list[Copy]:
    """The sub-tensor step: every group's slice of every operand is made contiguous, the results are concatenated."""
    copies: list[Copy] = []
    out = TensorSpec(c.output_shape, dtype=c.input.dtype)
    for what, spec, dim in (("input", c.input, 1), ("weight", c.weight, 0), ("grad_output", out, 1)):
        if what == "grad_output" and not backward:
            continue
        whole = spec.contiguous(fmt) if what != "grad_output" else spec
        part = whole.narrowed(dim, whole.shape[dim] // c.groups)
        if not part.is_contiguous(whole.suggest_memory_format()):
            copies.append(Copy(f"{c.groups} slices of {what}", "the kernel knows one group only", spec.nbytes))
    result = "the gradients of the groups" if backward else "the outputs of the groups"
    nbytes = c.input.nbytes + c.weight.nbytes if backward else out.nbytes
    return [*copies, Copy(result, "they are concatenated", nbytes)]


def temporary_bytes(backend: str, c: Call, *, backward: bool) -> int | None:
    """Bytes of the largest scratch tensor of one call of PyTorch's own CPU kernels; None where a library decides."""
    if backend not in (*NO_GROUPS, "Slow3d"):
        return 0 if backend in ("Empty", "MkldnnEmpty", "CudaDepthwise2d", "CudaDepthwise3d") else None
    if backend == "NnpackSpatial" and not backward:
        return None
    n, taps = c.input.shape[0], prod(c.weight.shape[2:])
    spatial_in, spatial_out = prod(c.input.shape[2:]), prod(c.output_shape[2:])
    groups = 1 if backend == "Slow3d" else c.groups  # Slow3d takes all groups in one call
    channels_in, channels_out = c.input.shape[1] // groups, c.output_shape[1] // groups
    size = c.input.dtype.itemsize
    if backend == "SlowTranspose2d" and not backward:
        return n * channels_out * taps * spatial_in * size
    if backend.startswith("SlowTranspose"):
        return channels_out * taps * spatial_in * size
    if backend in ("SlowDilated2d", "SlowDilated3d", "NnpackSpatial"):
        return channels_in * taps * spatial_out * size
    unfolded = n * channels_in * taps * spatial_out * size
    if backend == "Slow2d" and taps == 1 and not c.strided and not any(c.padding):
        return 0
    return unfolded
