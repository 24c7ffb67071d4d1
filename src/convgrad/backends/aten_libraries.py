"""ATen's own libraries by name: ``aten:cudnn``, ``aten:miopen``, ``aten:mkldnn`` (oneDNN) and ``aten:native``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import onednn_has
from ..calculus import add_bias
from ..problem import ConvProblem, Outputs, Pass
from ..settings import benchmark, cudnn_allows_tf32, determinism_demanded, mkldnn
from .aten import AtenBackend, aten_backward, output_padding
from .aten_direct import AtenDirect, Contract, aten_choice, grad_weight_as_convolution
from .base import Arithmetic

_ops: Any = torch.ops.aten
_aten = AtenBackend()
_GPU = torch.device("cuda")


def _arguments(p: ConvProblem) -> tuple[list[int], list[int], list[int]]:
    """Return padding, stride and dilation."""
    return [low for low, _ in p.padding], list(p.stride), list(p.dilation)


class Flags(NamedTuple):
    """Flags of a call; None means PyTorch's flag at the time of the call.

    Args:
        benchmark: try the library's algorithms and take the fastest.
        deterministic: only algorithms that repeat their bits.
        allow_tf32: float32 operands may be rounded to TF32 (cuDNN only).
    """

    benchmark: bool | None = None
    deterministic: bool | None = None
    allow_tf32: bool | None = None

    def in_force(self) -> tuple[bool, ...]:
        """Return the values of the three flags."""
        theirs = (benchmark(), determinism_demanded(_GPU), cudnn_allows_tf32())
        return tuple(b if a is None else a for a, b in zip(self, theirs, strict=True))

    def stricter_than_pytorch(self, dtype: torch.dtype) -> bool:
        """Whether these flags forbid something that PyTorch's own allow at this moment."""
        tf32 = self.allow_tf32 is False and cudnn_allows_tf32() and dtype is torch.float32
        return tf32 or (self.deterministic is True and not determinism_demanded(_GPU))

    def __str__(self) -> str:
        """Return the given flags as ``benchmark=1,deterministic=0``."""
        return ",".join(f"{k}={int(v)}" for k, v in self._asdict().items() if v is not None)


class _GpuLibrary(AtenDirect):
    """A GPU library, by the operators that PyTorch exposes: its forward, and its backward-data as a transposed forward.

    For the gradient of the weight no operator is left: it is PyTorch's own backward where that picks the library, and
    refused with the reason where not. PyTorch's backward takes no flags: where those of this instance forbid something
    that PyTorch's allow, the gradient of the weight is a forward of the library in another role.

    Args:
        flags: of every call of this instance; those that are given become part of its name.
    """

    device_types = ("cuda",)

    def __init__(self, flags: Flags = Flags()) -> None:  # noqa: B008, immutable
        self.flags = flags
        if str(flags):
            self.name = f"{type(self).name}[{flags}]"
        # Without the flag PyTorch's own decides, and is on wherever deterministic algorithms are required.
        self.deterministic = flags.deterministic is not False

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = super().reasons_against(problem, outputs, device)
        if reasons or "grad_weight" not in outputs or not torch.cuda.is_available():
            return reasons
        if self.flags.stricter_than_pytorch(problem.dtype) or self.repeats_aten(problem, device):
            return reasons
        return [
            f"{self.library}'s gradient of the weight is reached only through convolution_backward, "
            f"which picks {aten_choice(problem, device).name} for this problem under the flags in force"
        ]

    def contraction(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        if pass_ == "grad_weight" and not self.flags.stricter_than_pytorch(problem.dtype):
            return super().contraction(problem, pass_, device)
        return self.forced(problem, pass_, device)  # the same functions that PyTorch calls, with this call's flags

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        if pass_ == "grad_weight":
            return grad_weight_as_convolution(problem, lambda p: self.operator(p, "forward", device))
        padding, stride, dilation = _arguments(problem)
        extra = [output_padding(problem)] if pass_ == "grad_input" else []
        return self.call(problem, pass_, (padding, *extra, stride, dilation, problem.groups))

    def call(self, problem: ConvProblem, pass_: Pass, arguments: tuple[Any, ...]) -> Contract:
        """Call the library's forward, or for grad_input its transposed one, with these arguments and the flags."""
        raise NotImplementedError


class AtenCudnnBackend(_GpuLibrary):
    name = "aten:cudnn"
    summary = "NVIDIA's cuDNN"
    kinds = frozenset({2, 3})
    library = "cuDNN"
    where = "a CUDA device"
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

    def built(self) -> bool:
        return torch.version.hip is None and torch.backends.cudnn.is_available()

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        allowed = cudnn_allows_tf32() if self.flags.allow_tf32 is None else self.flags.allow_tf32
        return "tf32" if allowed and problem.dtype is torch.float32 else "transform"

    def call(self, problem: ConvProblem, pass_: Pass, arguments: tuple[Any, ...]) -> Contract:
        own: Any = torch.cudnn_convolution if pass_ == "forward" else torch.cudnn_convolution_transpose
        return lambda a, b, bias: add_bias(own(a, b, *arguments, *self.flags.in_force()), bias)


class AtenMiopenBackend(_GpuLibrary):
    name = "aten:miopen"
    summary = "AMD's MIOpen"
    kinds = frozenset({5, 6, 7})
    library = "MIOpen"
    where = "a ROCm device (PyTorch calls it cuda)"
    dtypes = (torch.float32, torch.float16, torch.bfloat16)

    def built(self) -> bool:
        return torch.version.hip is not None

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = super().reasons_against(problem, outputs, device)
        if problem.groups > 1 and any(d > 1 for d in problem.dilation):
            reasons.append("PyTorch gives MIOpen no convolution that is both grouped and dilated")
        strided = problem.groups > 1 and any(s > 1 for s in problem.stride)
        if strided and "grad_weight" in outputs and self.flags.stricter_than_pytorch(problem.dtype):
            reasons.append(
                "for MIOpen's gradient of the weight PyTorch takes no flags of the call, and without its own flag "
                "torch.backends.cudnn.deterministic there is no other way for a grouped and strided convolution"
            )
        return reasons

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "transform"

    def call(self, problem: ConvProblem, pass_: Pass, arguments: tuple[Any, ...]) -> Contract:
        forward = torch.miopen_depthwise_convolution if problem.depthwise else torch.miopen_convolution
        own: Any = forward if pass_ == "forward" else torch.miopen_convolution_transpose
        return lambda a, b, bias: own(a, b, bias, *arguments, *self.flags.in_force()[:2])


class AtenMkldnnBackend(AtenDirect):
    """oneDNN, also where PyTorch's rules of thumb would not call it.

    The forward has an operator of its own. The gradients have none, but PyTorch's backward always picks oneDNN for
    tensors in oneDNN's layout; so they are converted, which copies them, and no flag is touched.
    """

    name = "aten:mkldnn"
    summary = "oneDNN (once called MKL-DNN) on the CPU"
    kinds = frozenset({8, 9})
    library = "oneDNN"
    device_types = ("cpu",)
    where = "the CPU"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    candidate = True

    def built(self) -> bool:
        return torch.backends.mkldnn.is_available()

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = super().reasons_against(problem, outputs, device)
        if not reasons and problem.dtype is not torch.float32 and not onednn_has(problem.dtype):
            reasons.append(f"this CPU lacks the instructions with which oneDNN computes {problem.dtype}")
        if not mkldnn():
            reasons.append("torch.backends.mkldnn is switched off")
        return reasons

    def wrong_here(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> tuple[str, tuple[str, ...]]:
        return _aten.wrong_here(problem, outputs, device)

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        padding, stride, dilation = _arguments(problem)
        if pass_ == "forward":
            return lambda a, b, bias: torch.mkldnn_convolution(a, b, bias, padding, stride, dilation, problem.groups)
        rest = (None, stride, padding, dilation, False, [0] * problem.ndim, problem.groups)

        def grad_input(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            unread = a.new_empty(problem.input_shape).to_mkldnn()
            return add_bias(aten_backward(a.to_mkldnn(), unread, b, *rest, [True, False, False])[0].to_dense(), bias)

        def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            unread = a.new_empty(problem.weight_shape)
            return aten_backward(a.to_mkldnn(), b.to_mkldnn(), unread, *rest, [False, True, False])[1]

        return grad_input if pass_ == "grad_input" else grad_weight


class AtenNativeBackend(AtenDirect):
    """PyTorch's own kernels, on the CPU or in CUDA, also where it would call a library.

    These are the descendants of THNN: unfold to columns, one matrix product a batch item and group (``slow_conv2d``,
    ``slow_conv3d``, ``slow_conv_dilated``, ``slow_conv_transpose``), and CUDA's depthwise kernels. Only ``slow_conv2d``
    exposes its gradients.
    """

    name = "aten:native"
    summary = "PyTorch's own kernels (slow_conv, CUDA depthwise), with no library"
    kinds = frozenset({0, 1, *range(13, 19)})
    library = "PyTorch's own convolution"
    device_types = ("cpu", "cuda")
    where = "the CPU or CUDA"

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        if problem.dtype.is_complex:
            return ["PyTorch makes three real convolutions of a complex one before it picks a library; use 'aten'"]
        return self.absent(device) or _aten.reasons_against(problem, outputs, device)

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        # Columns are added up, and batch items accumulated, in the storage dtype.
        return "low-precision accumulation" if problem.dtype in (torch.float16, torch.bfloat16) else "direct"

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        (padding, stride, dilation), k, p = _arguments(problem), list(problem.kernel_size), problem
        plane, undilated = p.ndim == 2, all(d == 1 for d in dilation)
        own: Any
        if pass_ == "forward" and device.type == "cuda" and p.depthwise:
            own = _ops._conv_depthwise2d if plane else _ops.conv_depthwise3d
            return lambda a, b, bias: own(a, b, k, bias, stride, padding, dilation)
        if pass_ == "forward" and undilated and (plane or device.type == "cpu"):
            if plane:
                own = _ops._slow_conv2d_forward
                return _by_groups(p, lambda a, b, bias: own(a, b, k, bias, stride, padding))
            return lambda a, b, bias: _ops.slow_conv3d_forward(a, b, k, bias, stride, padding)  # has groups
        if pass_ == "forward":
            own = _ops.slow_conv_dilated2d if plane else _ops.slow_conv_dilated3d
            return _by_groups(p, lambda a, b, bias: own(a, b, k, bias, stride, padding, dilation))
        if plane and undilated:
            return _slow_conv2d_gradient(p, pass_)
        if pass_ == "grad_input":
            own, extra = _ops.slow_conv_transpose2d if plane else _ops.slow_conv_transpose3d, output_padding(p)
            return _by_groups(p, lambda a, b, bias: own(a, b, k, bias, stride, padding, extra, dilation))
        return grad_weight_as_convolution(p, lambda other: self.operator(other, "forward", device))


def _slow_conv2d_gradient(p: ConvProblem, pass_: Pass) -> Contract:
    padding, stride, _ = _arguments(p)
    rest = (list(p.kernel_size), stride, padding)
    one = p.replace(groups=1, in_channels=p.in_channels // p.groups, out_channels=p.out_channels // p.groups)

    def grad_input(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        unread = a.new_empty(one.input_shape)
        return add_bias(_ops._slow_conv2d_backward(a, unread, b, *rest, [True, False, False])[0], bias)

    def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        unread = a.new_empty(one.weight_shape)  # of the layout that the result gets, which must be contiguous
        return _ops._slow_conv2d_backward(a.contiguous(), b.contiguous(), unread, *rest, [False, True, False])[1]

    if pass_ == "grad_input":
        return _by_groups(p, grad_input)
    return _by_groups(p, grad_weight, second=1, joined=0)


def _by_groups(p: ConvProblem, contract: Callable[..., Tensor], *, second: int = 0, joined: int = 1) -> Contract:
    """Compute group by group, as ATen does for kernels without groups.

    Args:
        second: the dimension along which the second operand's groups lie.
        joined: the dimension along which the results' do.
    """
    g = p.groups
    if g == 1:
        return contract

    def grouped(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        biases = (None,) * g if bias is None else bias.chunk(g)
        parts = [
            contract(x.contiguous(), y.contiguous(), z)
            for x, y, z in zip(a.chunk(g, 1), b.chunk(g, second), biases, strict=True)
        ]
        return torch.cat(parts, joined)

    return grouped
