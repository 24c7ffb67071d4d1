"""Which of ATen's backends a convolution runs on, and in which layout: PyTorch's own choice, rule by rule.

Modelled after ``_select_conv_backend`` in ATen's ``Convolution.cpp`` (2.11 to 2.15), without the mobile builds that
XNNPACK belongs to.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...backends import padded
from ...problem import ConvProblem
from . import conditions
from .call import ConvCall, Ints, TensorSpec, call_of_problem
from .decision import Decision, DecisionLog
from .layouts import layout_decision
from .machine import MODELLED_VERSIONS, DeviceLike, Machine, machine_of

#: ATen's backends in the order of its own enumeration: the index is the value of ``torch._C._ConvBackend``.
BACKENDS: tuple[str, ...] = (
    "CudaDepthwise2d", "CudaDepthwise3d", "Cudnn", "CudnnTranspose", "Empty", "Miopen", "MiopenDepthwise",
    "MiopenTranspose", "Mkldnn", "MkldnnTranspose", "MkldnnEmpty", "NnpackSpatial", "Overrideable", "Slow2d", "Slow3d",
    "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Winograd3x3Depthwise", "Xnnpack2d", "Mps",
    "MpsTranspose",
)  # fmt: skip


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
    """Which of ATen's backends computes this convolution, with every rule on the way and the value that decided it.

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
    """The call that the arguments of `select_conv_backend` mean, and the machine that it runs on."""
    if isinstance(input, ConvProblem):
        machine = machine_of(device)
        if input.padding_mode != "zeros":  # which PyTorch writes out around the input before
            input = padded(input)
        return call_of_problem(input, machine.device_type, need_backward is not False), machine
    if weight is None:
        raise TypeError("a weight is needed beside an input tensor (or give one ConvProblem)")
    call = ConvCall.of(input, weight, *args, need_backward=need_backward, **kwargs)
    machine = machine_of(device, call.input.device_type)
    return call if device is None else call.on(machine.device_type), machine


def backend_of_call(call: ConvCall, machine: Machine) -> Decision:
    """The choice for a call that is already described and checked."""
    log = DecisionLog()
    call, notes = call.symmetric()
    name = _select(log, call.view_1d_as_2d(), machine)
    return Decision("backend", name, tuple(log.rules), machine, (*notes, *_notes(call, machine)), BACKENDS.index(name))


def _notes(call: ConvCall, machine: Machine) -> tuple[str, ...]:
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
    if call.view_1d_as_2d() is not call:
        copied = "" if call.input.is_contiguous() else ", after a copy to contiguous"
        notes.append(f"a 1-D convolution runs as 2-D with height 1{copied}")
    return tuple(notes)


def _select(log: DecisionLog, c: ConvCall, m: Machine) -> str:
    transposed = "Transpose" if c.transposed else ""
    batch, channels = c.input.shape[:2]
    if log.record("the batch or the channels are empty", 0 in (batch, channels), f"batch {batch}, {channels} channels"):
        return "MkldnnEmpty" if c.input.mkldnn else "Empty"
    if conditions.is_depthwise(log, c, m):
        if conditions.use_cudnn_depthwise(log, c, m):
            return "Cudnn"
        if conditions.use_miopen(log, c, m):
            return "MiopenDepthwise"
        return "CudaDepthwise2d" if c.input.ndim == 4 else "CudaDepthwise3d"
    libraries = {"Cudnn": conditions.use_cudnn, "Miopen": conditions.use_miopen, "Mkldnn": conditions.use_mkldnn}
    for name, use in libraries.items():
        if use(log, c, m):
            return name + transposed
    if conditions.use_winograd(log, c, m):
        return "Winograd3x3Depthwise"
    return _select_own(log, c, m, transposed)


def _select_own(log: DecisionLog, c: ConvCall, m: Machine, transposed: str) -> str:
    """PyTorch's own kernels, where no library takes the call."""
    kind, ndim = c.input.device_type, c.input.ndim
    plain_3d = ndim == 5 and not c.transposed and not c.dilated
    got = f"{ndim - 2}-D on {kind}, transposed={c.transposed}, dilation={c.dilation}"
    if log.record("3-D on the CPU, not transposed, not dilated", plain_3d and kind == "cpu", got):
        return "Slow3d"
    if log.record("on the CPU or on a CUDA or ROCm device", kind in ("cpu", "cuda"), kind):
        if log.record("transposed", c.transposed, c.transposed):
            return f"SlowTranspose{ndim - 2}d"
        if log.record("3-D", ndim == 5, f"{ndim - 2}-D"):
            return "SlowDilated3d"  # on the CPU it is dilated; on CUDA this kernel takes both
        if log.record("dilated", c.dilated, c.dilation):
            return "SlowDilated2d"
        return "NnpackSpatial" if conditions.use_nnpack(log, c, m) else "Slow2d"
    return "Mps" + transposed if conditions.use_mps(log, c, m) else "Overrideable"


def determine_backend_memory_format(
    input: TensorSpec | Tensor, weight: TensorSpec | Tensor, backend: str | int | Decision, *, device: DeviceLike = None
) -> Decision:
    """The layout in which a backend works on these operands, with every rule on the way.

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
    return layout_decision(name, x, w, machine)
