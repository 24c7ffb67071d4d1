"""Which of ATen's backends a convolution runs on, and in which layout: PyTorch's own choice, rule by rule.

Modelled after ``_select_conv_backend`` in ATen's ``Convolution.cpp`` (2.11 to 2.15).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import ShapeError
from ...problem import ConvProblem
from .call import Call, Ints, call_of_problem, make_call
from .conditions import (
    is_depthwise,
    use_cudnn,
    use_cudnn_depthwise,
    use_miopen,
    use_mkldnn,
    use_mps,
    use_nnpack,
    use_winograd,
    use_xnnpack,
)
from .layouts import layout_of
from .machine import Machine
from .rules import Decision, Trail
from .tensors import TensorSpec
from .versions import MODELLED_VERSIONS

__all__ = [
    "BACKENDS",
    "DeviceLike",
    "backend_of_call",
    "determine_backend_memory_format",
    "machine_of",
    "select_conv_backend",
]

DeviceLike = Machine | torch.device | str | None

#: ATen's backends in the order of its own enumeration: the index is the value of ``torch._C._ConvBackend``.
BACKENDS: tuple[str, ...] = (
    "CudaDepthwise2d", "CudaDepthwise3d", "Cudnn", "CudnnTranspose", "Empty", "Miopen", "MiopenDepthwise",
    "MiopenTranspose", "Mkldnn", "MkldnnTranspose", "MkldnnEmpty", "NnpackSpatial", "Overrideable", "Slow2d", "Slow3d",
    "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Winograd3x3Depthwise", "Xnnpack2d", "Mps",
    "MpsTranspose",
)  # fmt: skip


def machine_of(device: DeviceLike, found_on: str = "cpu") -> Machine:
    """A machine from a machine, a device that is here, or a description; the operands' device where there is none."""
    if isinstance(device, Machine):
        return device
    if isinstance(device, torch.device):
        return Machine.here(device)
    if device is None:
        return Machine.here(found_on)
    if not isinstance(device, str):
        raise TypeError(f"device is a torch.device or a description such as 'h100', got {device!r}")
    return Machine.parse(device)


def select_conv_backend(
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
) -> Decision:
    """Which of ATen's backends computes this convolution, with every rule on the way and the value that decided it.

    PyTorch chooses once for the forward pass; its backward chooses again, for both gradients together, with
    ``need_backward=True``.

    Args:
        input: a tensor, a `TensorSpec`, or a whole `ConvProblem` (then nothing else but the keywords is needed).
        device: None for the operands' own; a description of a machine that is not here, such as ``"h100 cudnn 9.10"``,
            ``"rocm gfx942 miopen"``, ``"xpu"``, ``"mps"``, ``"cpu arm"``; or a `Machine`.
        need_backward: whether autograd needs a backward; None asks the tensors, as PyTorch does (a problem: True).

    Shape:
        - input: (N, C_in, *in), weight: (C_out, C_in/groups, *k); transposed: (C_in, C_out/groups, *k)

    Raises:
        ShapeError: operands that do not belong together, with PyTorch's message.
        ValueError: a device description that cannot be read.

    Equivalent to:
        >>> x, w = torch.empty(2, 64, 56, 56), torch.empty(64, 1, 7, 7)
        >>> select_conv_backend(x, w, padding=3, groups=64, device="h100 cudnn 9.10").backend
        'CudaDepthwise2d'
    """
    notes: tuple[str, ...] = ()
    if isinstance(input, ConvProblem):
        machine = machine_of(device)
        call, notes = call_of_problem(input, machine.device_type, need_backward is not False)
    else:
        if weight is None:
            raise TypeError("select_conv_backend: a weight is needed beside an input tensor (or give one ConvProblem)")
        call = make_call(
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, need_backward
        )
        machine = machine_of(device, call.input.device_type)
        call = on_machine(call, machine) if device is not None else call
    return backend_of_call(call, machine, notes)


def on_machine(call: Call, machine: Machine) -> Call:
    """The same call with its operands on the kind of device that the machine has."""
    kind = machine.device_type
    bias = call.bias.on(kind) if call.bias is not None else None
    return replace(call, input=call.input.on(kind), weight=call.weight.on(kind), bias=bias)


def backend_of_call(call: Call, machine: Machine, notes: tuple[str, ...] = ()) -> Decision:
    """The choice for a call that is already described and checked."""
    trail = Trail()
    notes = (*notes, *_notes(call, machine))
    name = _select(trail, call.view_1d_as_2d(), machine)
    return Decision("backend", name, tuple(trail.rules), machine, notes, BACKENDS.index(name))


def _notes(call: Call, machine: Machine) -> tuple[str, ...]:
    notes: list[str] = []
    if not machine.modelled:
        notes.append(
            f"torch {machine.torch_version} is unknown: the rules are those of {MODELLED_VERSIONS[0]} to "
            f"{MODELLED_VERSIONS[-1]}, of the nearest of them where they differ"
        )
    if call.input.dtype.is_complex:
        notes.append(
            "conv1d, conv2d and conv3d split a complex convolution into three real ones; this is the choice for "
            "torch.convolution called directly"
        )
    if call.ndim == 1 and call.view_1d_as_2d() is not call:
        copied = "" if call.input.is_contiguous() else ", after a copy to contiguous"
        notes.append(f"a 1-D convolution runs as 2-D with height 1{copied}")
    return tuple(notes)


def _select(t: Trail, c: Call, m: Machine) -> str:
    transposed = "Transpose" if c.transposed else ""
    shape = c.input.shape
    if t.ask("the batch or the channels are empty", 0 in shape[:2], f"batch {shape[0]}, {shape[1]} channels"):
        return "MkldnnEmpty" if c.input.mkldnn else "Empty"
    if c.input.numel == 0:
        raise ShapeError(f"Only zero batch or zero channel inputs are supported, but got input shape: {list(shape)}")
    if is_depthwise(t, c, m):
        if use_cudnn_depthwise(t, c, m):
            return "Cudnn"
        if use_miopen(t, c, m):
            return "MiopenDepthwise"
        return "CudaDepthwise2d" if c.input.ndim == 4 else "CudaDepthwise3d"
    if use_cudnn(t, c, m):
        return "Cudnn" + transposed
    if use_miopen(t, c, m):
        return "Miopen" + transposed
    if use_mkldnn(t, c, m):
        return "Mkldnn" + transposed
    if use_xnnpack(t, c, m):
        return "Xnnpack2d"
    if use_winograd(t, c, m):
        return "Winograd3x3Depthwise"
    return _select_own(t, c, m, transposed)


def _select_own(t: Trail, c: Call, m: Machine, transposed: str) -> str:
    """PyTorch's own kernels, where no library takes the call."""
    kind, ndim = c.input.device_type, c.input.ndim
    plain_3d = ndim == 5 and not c.transposed and not c.dilated
    got = f"{ndim - 2}-D on {kind}, transposed={c.transposed}, dilation={c.dilation}"
    if t.ask("3-D on the CPU, not transposed, not dilated", plain_3d and kind == "cpu", got):
        return "Slow3d"
    if t.ask("on the CPU or on a CUDA or ROCm device", kind in ("cpu", "cuda"), kind):
        if ndim not in (4, 5):
            raise ShapeError("unsupported ConvNd parameters")
        if t.ask("transposed", c.transposed, c.transposed):
            return f"SlowTranspose{ndim - 2}d"
        if t.ask("3-D", ndim == 5, f"{ndim - 2}-D"):
            return "SlowDilated3d"  # on the CPU it is dilated; on CUDA this kernel takes both
        if t.ask("dilated", c.dilated, c.dilation):
            return "SlowDilated2d"
        return "NnpackSpatial" if use_nnpack(t, c, m) else "Slow2d"
    if use_mps(t, c, m):
        return "Mps" + transposed
    return "Overrideable"


def determine_backend_memory_format(
    input: TensorSpec | torch.Tensor,
    weight: TensorSpec | torch.Tensor,
    backend: str | int | Decision,
    *,
    device: DeviceLike = None,
) -> Decision:
    """The layout in which a backend works on these operands, with every rule on the way.

    Operands in another layout are copied first. (A 1-D convolution: give the operands viewed as 2-D, as PyTorch does.)

    Args:
        backend: a name of `BACKENDS`, its number, or the answer of `select_conv_backend`.

    Raises:
        ValueError: an unknown backend.

    Equivalent to:
        >>> x, w = torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last), torch.empty(8, 8, 3, 3)
        >>> determine_backend_memory_format(x, w, "Mkldnn").memory_format
        torch.channels_last
    """
    x, w = (t if isinstance(t, TensorSpec) else TensorSpec.of(t) for t in (input, weight))
    name = (
        backend.backend if isinstance(backend, Decision) else BACKENDS[backend] if isinstance(backend, int) else backend
    )
    if name not in BACKENDS:
        raise ValueError(f"{name!r} is not one of ATen's backends: {', '.join(BACKENDS)}")
    if device is None and isinstance(backend, Decision):
        device = backend.machine
    machine = machine_of(device, x.device_type)
    if device is not None:
        x, w = x.on(machine.device_type), w.on(machine.device_type)
    trail = Trail()
    fmt = layout_of(trail, name, x, w, machine)
    answer = str(fmt).removeprefix("torch.").removesuffix("_format")
    return Decision("memory_format", answer, tuple(trail.rules), machine, (), fmt)
