"""A table of ATen's forward and backward functions, what they allocate, and what to call today.

The pairs are those of ``derivatives.yaml`` and of the two switch statements in ATen's ``Convolution.cpp``; tests hold
the first against the file that PyTorch itself ships, and the sizes of the temporaries against PyTorch's allocations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ...errors import UnknownNameError

_FORWARD = "torch.convolution (or torch.nn.functional.conv1d/2d/3d, conv_transpose1d/2d/3d)"
_BACKWARD = "torch.ops.aten.convolution_backward(grad_output, input, weight, bias_sizes, ..., output_mask)"

#: Scratch tensors, by what they hold. k is the product of the kernel sizes, in and out of the spatial sizes.
_FINPUT = "finput: (N, C_in/groups * k, out), the unfolded input of the whole batch; none for 1x1, stride 1, no padding"
_FGRAD2 = "fgrad_input: (C_in/groups * k, out), one batch item, per thread"
_FINPUT3 = "finput: (N, C_in * k, out), the unfolded input of the whole batch; none for 1x1x1, stride 1, no padding"
_FGRAD3 = "fgrad_input: (N, C_in * k, out), the whole batch"
_COLUMNS_IN = "columns: (C_in/groups * k, out), one batch item"
_COLUMNS_OUT_BATCH = "columns: (N, C_out/groups * k, in), the whole batch"
_COLUMNS_OUT = "columns: (C_out/groups * k, in), one batch item"
_ONES = "(older releases also made ones, (1, out), to add the bias by a matrix product)"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A forward function of ATen and the function that computes its gradients."""

    backends: tuple[str, ...]  # those of `convgrad.diagnostics.aten_rules.BACKENDS` that run it
    forward: str
    backward: str
    old_names: tuple[str, ...]  # of removed functions that did this work
    note: str  # what surprises people
    autograd: str  # what autograd records when the forward is called on its own (``derivatives.yaml``)
    forward_temporaries: tuple[str, ...]  # what the forward allocates beside its result
    backward_temporaries: tuple[str, ...]  # what the backward allocates beside its results
    cuda_temporaries: tuple[str, ...]  # the same of both on a CUDA device, where it differs

    def __str__(self) -> str:
        by_name = hasattr(torch.ops.aten, self.backward)  # most are reached through `convolution_backward` only
        lines = [
            f"forward:  {self.forward}",
            f"backward: {self.backward or 'none: this kernel is for inference only'}",
            f"backends: {', '.join(self.backends) or '(any)'}",
            f"autograd of the forward called on its own: {self.autograd}",
            *(f"forward allocates   {t}" for t in self.forward_temporaries),
            *(f"backward allocates  {t}" for t in self.backward_temporaries),
            *(f"on CUDA each allocates  {t}" for t in self.cuda_temporaries),
            f"call today, forward:  {_FORWARD}",
            f"call today, backward: {f'torch.ops.aten.{self.backward}' if by_name else _BACKWARD}",
        ]
        lines += [f"older names: {', '.join(self.old_names)}"] if self.old_names else []
        return "\n".join([*lines, f"note: {self.note}"] if self.note else lines)


_CUDNN_NOTE = "It computes grad_input and grad_weight; grad_bias is a sum over grad_output made outside."
_GRADIENTS = ("_backward_input", "_backward_weight", "_backward_bias")


def _kernel(
    backends: str, forward: str, old_names: str = "", note: str = "", *, backward: str | None = None,
    autograd: str = "convolution_backward", temporaries: tuple[str, ...] = (), of_backward: tuple[str, ...] = (),
    of_cuda: tuple[str, ...] = (), gradients: int = 0,
) -> Kernel:  # fmt: skip
    """Return a row; an old name that ends in * stands for itself, its forward and its backward, too."""
    old: list[str] = []
    for name in old_names.split():
        stem = name.rstrip("*")
        old += [stem] if stem == name else [stem, f"{stem}_forward", f"{stem}_backward"]
    names = (*old, *(forward + gradient for gradient in _GRADIENTS[:gradients]))
    backward = f"{forward}_backward" if backward is None else backward
    return Kernel(tuple(backends.split()), forward, backward, names, note, autograd, temporaries, of_backward, of_cuda)


KERNELS: tuple[Kernel, ...] = (
    _kernel("", "convolution", "_convolution_nogroup",
            "The one entry to every backend below, for every device. Its own derivative is "
            "_convolution_double_backward. conv1d, conv2d, conv3d, conv_transpose1d to 3d and _convolution all end "
            "here; there is no conv2d_backward."),
    _kernel("Slow2d", "_slow_conv2d_forward",
            "thnn_conv2d* _thnn_conv2d_forward _thnn_conv2d_backward slow_conv2d* SpatialConvolutionMM",
            "thnn_conv2d still exists as a thin name over _slow_conv2d_forward. finput and fgrad_input were results "
            "passed from forward to backward until 1.10; now each pass makes its own.",
            backward="_slow_conv2d_backward", autograd="_slow_conv2d_backward", temporaries=(_FINPUT,),
            of_backward=(f"grad_weight: {_FINPUT}", f"grad_input: {_FGRAD2}"), of_cuda=(_COLUMNS_IN,)),
    _kernel("Slow3d", "slow_conv3d_forward",
            "slow_conv3d thnn_conv3d* VolumetricConvolutionMM",
            "slow_conv3d still exists as a thin name over slow_conv3d_forward. CPU only; it takes groups itself.",
            backward="slow_conv3d_backward", temporaries=(_FINPUT3,),
            of_backward=(f"grad_weight: {_FINPUT3}", f"grad_input: {_FGRAD3}")),
    _kernel("SlowDilated2d", "slow_conv_dilated2d", "thnn_conv_dilated2d* slow_conv_dilated2d_backward",
            "Also the backward of NnpackSpatial.", temporaries=(_COLUMNS_IN,), of_backward=(_COLUMNS_IN,)),
    _kernel("SlowDilated3d", "slow_conv_dilated3d", "thnn_conv_dilated3d*",
            "On CUDA it takes undilated 3-D convolutions too, where no library does.",
            temporaries=(_COLUMNS_IN,), of_backward=(_COLUMNS_IN,)),
    _kernel("SlowTranspose2d", "slow_conv_transpose2d", "thnn_conv_transpose2d* SpatialFullConvolution",
            temporaries=(_COLUMNS_OUT_BATCH, _ONES), of_backward=(_COLUMNS_OUT,), of_cuda=(_COLUMNS_OUT,)),
    _kernel("SlowTranspose3d", "slow_conv_transpose3d", "thnn_conv_transpose3d* VolumetricFullConvolution",
            temporaries=(_COLUMNS_OUT, _ONES), of_backward=(_COLUMNS_OUT,)),
    _kernel("CudaDepthwise2d", "_conv_depthwise2d",
            "thnn_conv_depthwise2d* _conv_depthwise2d_backward",
            f"CUDA's own depthwise kernels. {_CUDNN_NOTE}", backward="conv_depthwise2d_backward"),
    _kernel("CudaDepthwise3d", "conv_depthwise3d", "", "CUDA's own depthwise kernels, all three gradients."),
    _kernel("Mkldnn MkldnnEmpty", "mkldnn_convolution",
            "mkldnn_convolution_backward_input mkldnn_convolution_backward_weights",
            "oneDNN, which keeps its scratch memory to itself. MkldnnEmpty returns zeros without calling it."),
    _kernel("MkldnnTranspose", "mkldnn_convolution_transpose", "",
            "Neither is in the dispatcher; both are reached through convolution and convolution_backward only."),
    _kernel("NnpackSpatial", "_nnpack_spatial_convolution", "_nnpack_spatial_convolution_backward",
            "NNPACK's backward knows no stride, so PyTorch uses SlowDilated2d's.",
            backward="slow_conv_dilated2d_backward", of_backward=(_COLUMNS_IN,), gradients=2),
    _kernel("Cudnn", "cudnn_convolution", "", f"Removed from the dispatcher in 1.11. {_CUDNN_NOTE}",
            autograd="_cudnn_convolution_backward", gradients=3),
    _kernel("CudnnTranspose", "cudnn_convolution_transpose", "",
            "grad_input is a cuDNN forward; grad_weight is backward_weight with input and grad_output exchanged.",
            autograd="_cudnn_convolution_backward", gradients=3),
    _kernel("Miopen", "miopen_convolution", gradients=3),
    _kernel("MiopenTranspose", "miopen_convolution_transpose", gradients=2),
    _kernel("MiopenDepthwise", "miopen_depthwise_convolution", gradients=2),
    _kernel("Mps", "_mps_convolution", backward="mps_convolution_backward", autograd="mps_convolution_backward"),
    _kernel("MpsTranspose", "_mps_convolution_transpose", backward="mps_convolution_transpose_backward",
            autograd="mps_convolution_transpose_backward"),
    _kernel("Overrideable", "convolution_overrideable", "",
            "What a device outside PyTorch's core (XPU among them) implements; on any other device it raises.",
            backward="convolution_backward_overrideable", autograd="convolution_backward_overrideable"),
    _kernel("Empty", "empty (inside convolution)", "",
            "An empty batch or no channels: the gradients are zeros, and nothing is computed.",
            backward="zeros (inside convolution_backward)"),
    _kernel("Winograd3x3Depthwise", "convolution_depthwise3x3_winograd", "",
            "Inference only, on Apple and 32-bit Arm and on RISC-V; selected only where no gradient is needed.",
            backward="", autograd=""),
    _kernel("Xnnpack2d", "xnnpack::convolution2d", "",
            "Inference only, mobile builds; selected only where no gradient is needed.", backward="", autograd=""),
    _kernel("", "conv_tbc", "", "Time, batch, channels: a separate function that never reaches the pipeline.",
            autograd="conv_tbc_backward"),
)  # fmt: skip

#: Names of the one entry; conv1d_input and others like it are functions of torch.nn.grad.
_PUBLIC = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "_convolution",
           "_convolution_mode", "conv1d_backward", "conv2d_backward", "conv3d_backward", "_convolution_double_backward",
           "ConvolutionBackward0", "nn.Conv2d", "conv1d_input", "conv1d_weight", "conv2d_input", "conv2d_weight",
           "conv3d_input", "conv3d_weight")  # fmt: skip
#: Every name that leads to a kernel; a current name goes before a backend or an old name.
_BY_NAME: dict[str, Kernel] = {
    **dict.fromkeys(_PUBLIC, KERNELS[0]),
    **{name: kernel for kernel in reversed(KERNELS) for name in kernel.old_names},
    **{name: k for k in reversed(KERNELS) for name in (*k.backends, k.backward, k.forward) if name},
}
_BY_LETTERS = {name.lower(): kernel for name, kernel in _BY_NAME.items()}
_PREFIX = re.compile(
    r"^(torch\.|ops\.|aten\.|aten::|at::|at\.|native\.|native::|nn\.functional\.|nn\.grad\.|f\.|convgrad\.|direct\.)+"
)
#: What ATen's sources add to a name: the device, the variant, the dispatch table.
_SUFFIX = re.compile(r"(_out|_cpu|_cuda|_mps|_symint|_stub)+$")


def kernel_of(name: str) -> Kernel:
    """Return the forward and backward that a name means: a current, internal or removed function, or a backend.

    Raises:
        KeyError: no such name; the nearest ones are in the message.
    """
    key = _PREFIX.sub("", name.strip().lower())
    for candidate in (key, key.split(".")[0], _SUFFIX.sub("", key), "_" + _SUFFIX.sub("", key)):
        if candidate in _BY_LETTERS:
            return _BY_LETTERS[candidate]
    raise UnknownNameError.of("no convolution function of ATen is or was called", name, (*_BY_NAME, *SCRATCH))


@dataclass(frozen=True, slots=True)
class Scratch:
    """A scratch tensor of PyTorch's own convolutions."""

    name: str
    holds: str  # what is in it
    history: str  # who could see it, and until when
    today: str  # where the same tensor is in the caller's hands

    def __str__(self) -> str:
        of_each = [(k.forward, k.forward_temporaries) for k in KERNELS]
        of_each += [(k.backward, k.backward_temporaries) for k in KERNELS]
        users = dict.fromkeys(f for f, made in of_each if re.search(rf"\b{self.name}\b", " ".join(made)))
        lines = [f"{self.name}: {self.holds}", f"allocated by: {', '.join(users)}"]
        return "\n".join([*lines, f"history: {self.history}", f"today: {self.today}"])


_COLUMNS = (
    "convgrad.backends.im2col.{0}(problem, {1}, {2}, columns=columns), where problem is a convgrad.ConvProblem and "
    "columns = torch.empty(im2col.columns_size(problem), dtype=im2col.accumulate_dtype({2}.dtype))"
)
_RESULTS = (
    "a result of thnn_conv2d_forward, passed on to the backward, until 1.10; now each pass makes its own. "
    "convgrad.direct.thnn_conv2d_forward returns an empty one in its place, and thnn_conv2d_backward does not read it"
)
_ARGUMENT = "an argument of slow_conv_transpose2d_backward and others, until 1.10"

SCRATCH = {s.name: s for s in (
    Scratch("finput", "the unfolded input (im2col), which forward and grad_weight multiply", _RESULTS,
            _COLUMNS.format("grad_weight", "grad_output", "input")),
    Scratch("fgrad_input", "the gradient of the unfolded input, which is folded (col2im) into grad_input", _RESULTS,
            _COLUMNS.format("grad_input", "grad_output", "weight")),
    Scratch("columns", "the unfolded input or its gradient, as dilated and transposed convolutions call it", _ARGUMENT,
            _COLUMNS.format("forward", "input", "weight")),
    Scratch("ones", "a row of ones: a bias is the product of a column by it", _ARGUMENT,
            "convgrad.backends.im2col.forward(problem, input, weight, bias, ones=ones), where problem is a "
            "convgrad.ConvProblem and ones has an element for each output position of the batch"),
)}  # fmt: skip


def named(name: str) -> Kernel | Scratch:
    """Return a pair of functions by a name (`kernel_of`), or a scratch tensor."""
    return SCRATCH.get(name.strip().lower()) or kernel_of(name)
