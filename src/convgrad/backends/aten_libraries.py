"""ATen's own libraries by name: ``aten:cudnn``, ``aten:miopen``, ``aten:mkldnn`` (oneDNN) and ``aten:native``.

PyTorch picks one of its libraries for a convolution by rules and global flags. Here it is picked by name, with no flag
touched, in the first of three ways that there is:

1. PyTorch's own call (`AtenBackend`), bit for bit, where PyTorch would pick this library anyway;
2. the library's own operator, where PyTorch exposes one (``torch.cudnn_convolution``, ``aten::_slow_conv2d_forward``);
3. that operator in another role: the gradient of the input is a transposed convolution, and the gradient of the
   weight is a convolution of the input with grad_output, stride and dilation exchanged (`_grad_weight_as_convolution`).

Where there is none, `reasons_against` says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._compat import onednn_has, usual_strides
from ..problem import ConvProblem, Outputs, Pass, add_bias
from ..settings import benchmark, cudnn_allows_tf32, determinism_demanded, mkldnn
from .aten import AtenBackend, aten_backward, output_padding, statable, statable_arguments, with_height
from .aten_defects import tidy, without_slack
from .base import Arithmetic, Backend, Kernel
from .padded_copy import over_copy, padded

#: A function of (a, b, bias): the operands of one pass of one problem, and what is added to the result's channels.
Contract = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

_ops: Any = torch.ops.aten
_aten = AtenBackend()
_GPU = torch.device("cuda")


class _Sized(Tensor):
    """A tensor that has sizes and a device, but no memory. PyTorch's own, `FakeTensor`, takes a second to import."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> NoReturn:
        raise NotImplementedError(f"{func} is asked of a tensor without memory")


def aten_choice(problem: ConvProblem, device: torch.device) -> Any:
    """Return the ``torch._C._ConvBackend`` that PyTorch chooses under the flags in force; the device must be here."""
    p = statable(problem)
    p = with_height(p) if p.ndim == 1 else p  # as PyTorch computes it

    def sized(shape: tuple[int, ...]) -> Tensor:
        strides = usual_strides(shape, p.channels_last)
        return Tensor._make_wrapper_subclass(_Sized, shape, strides, dtype=p.dtype, device=device)

    operands = sized(p.output_shape if p.transposed else p.input_shape), sized(p.weight_shape)
    return torch._C._select_conv_backend(*operands, None, *statable_arguments(p))


class AtenLibrary(Backend):
    """One of ATen's libraries, by name."""

    #: The values of ``torch._C._ConvBackend`` that stand for it, the same in every release that is supported.
    kinds: frozenset[int]
    #: Its own name, the types of device that it is for, and these in words.
    library: str
    device_types: tuple[str, ...]
    where: str
    #: What it computes; empty where there are other rules.
    dtypes: tuple[torch.dtype, ...] = ()
    #: Whether this PyTorch was built with it.
    built: Callable[[], bool] = staticmethod(lambda: True)
    from_pytorch = True

    def absent(self, device: torch.device) -> list[str]:
        """Return why the library is not there for this device; empty if it is."""
        reasons = [] if self.built() else [f"this PyTorch was built without {self.library}"]
        if device.type not in self.device_types:
            reasons.append(f"{self.library} needs {self.where}, got {device.type}")
        return reasons

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = self.absent(device)
        if self.dtypes and problem.dtype not in self.dtypes:
            reasons.append(f"{self.library} computes {', '.join(map(str, self.dtypes))}, got {problem.dtype}")
        return reasons

    @abstractmethod
    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract | None:
        """Return a pass in 2 or 3 dimensions with symmetric padding; None: grad_weight by a forward."""

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def repeats_aten(self, problem: ConvProblem, device: torch.device) -> bool:
        return int(aten_choice(problem, device)) in self.kinds

    def by_pytorch(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> bool:
        """Whether PyTorch's own call computes a pass, which chooses this library."""
        return self.repeats_aten(problem, device)

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        problem = without_slack(problem)
        if not problem.symmetric:
            return over_copy(problem, outputs, self.bind(padded(problem), outputs))
        if problem.ndim == 1:  # an image of height 1
            flat = self.bind(with_height(problem), outputs)
            return lambda a, b, bias=None, workspace=None: flat(a.unsqueeze(2), b.unsqueeze(2), bias).squeeze(2)

        @cache  # the device is known at the first call
        def contraction(device: torch.device) -> Contract:
            if self.by_pytorch(problem, pass_, device):
                return _aten.bind(problem, outputs)
            p = problem.replace(origin="plain")
            operator = self.operator(p, pass_, device)
            if operator is None:
                operator = _grad_weight_as_convolution(p, lambda other: self.operator(other, "forward", device))
            return lambda a, b, bias: operator(tidy(a), tidy(b), bias)

        def kernel(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return contraction(a.device)(a, b, bias).contiguous(memory_format=problem.memory_format)

        return kernel


def _grad_weight_as_convolution(p: ConvProblem, operator: Callable[[ConvProblem], Any]) -> Contract:
    """Compute the gradient of the weight as the forward of another problem, whose function ``operator`` makes.

    The input's channels become the batch, the batch becomes the channels that are summed over, grad_output the kernel;
    stride and dilation change places. Positions past the kernel, which a stride leaves over, are cut off.
    """
    n, g, c = p.batch, p.groups, p.in_channels // p.groups
    reached = tuple(d.kernel + more // d.dilation for d, more in zip(p.dims, output_padding(p), strict=True))
    exchanged = {"batch": c, "in_channels": g * n, "kernel_size": p.output_size, "stride": p.dilation}
    exchanged |= {"dilation": p.stride, "output_size": reached, "memory_format": torch.contiguous_format}
    forward: Contract = operator(p.replace(**exchanged, has_bias=False))

    def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        kernel = a.transpose(0, 1).contiguous()  # [C_out, N, *out]
        input = b.reshape(n, g, c, *p.input_size).transpose(0, 2).reshape(c, g * n, *p.input_size)
        result = forward(input, kernel, None)  # [C_in/groups, C_out, *reached]
        for i, k in enumerate(p.kernel_size):
            result = result.narrow(2 + i, 0, k)
        return result.transpose(0, 1)  # [C_out, C_in/groups, *k]

    return grad_weight


def _by_groups(p: ConvProblem, contract: Contract, *, of_weight: bool = False) -> Contract:
    """Compute group by group, as ATen does; the result has its groups first if it is a weight."""
    if p.groups == 1:
        return contract

    def grouped(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        biases = (None,) * p.groups if bias is None else bias.chunk(p.groups)
        parts = zip(a.chunk(p.groups, 1), b.chunk(p.groups, int(of_weight)), biases, strict=True)
        return torch.cat([contract(x.contiguous(), y.contiguous(), z) for x, y, z in parts], int(not of_weight))

    return grouped


# ---- libraries on a GPU ----------------------------------------------------------------------------


class Flags(NamedTuple):
    """Flags of a call; None means PyTorch's flag at the time of the call."""

    benchmark: bool | None = None  # try the library's algorithms and take the fastest
    deterministic: bool | None = None  # only algorithms that repeat their bits
    allow_tf32: bool | None = None  # float32 operands may be rounded to TF32 (cuDNN only)

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


class _GpuLibrary(AtenLibrary):
    """A GPU library, by the operators that PyTorch exposes: its forward, and its backward-data as a transposed forward.

    For the gradient of the weight no operator is left: it is PyTorch's own backward where that picks the library, and
    refused with the reason where not. PyTorch's backward takes no flags: where those of this instance, a part of its
    name, forbid something that PyTorch's allow, it is a forward of the library in another role.
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

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        rounds = self.library == "cuDNN" and self.flags.in_force()[2] and problem.dtype is torch.float32
        return "tf32" if rounds else "transform"

    def by_pytorch(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> bool:
        # Else by the same functions that PyTorch calls, with this call's flags.
        alike = pass_ == "grad_weight" and not self.flags.stricter_than_pytorch(problem.dtype)
        return alike and self.repeats_aten(problem, device)

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract | None:
        if pass_ == "grad_weight":
            return None
        stride, padding, dilation, _, _, groups = statable_arguments(problem)
        extra, kind = ([output_padding(problem)], "_transpose") if pass_ == "grad_input" else ([], "")
        arguments, miopen = (padding, *extra, stride, dilation, groups), self.library == "MIOpen"
        depthwise = "depthwise_" if miopen and problem.depthwise and not kind else ""
        own = getattr(torch, f"{self.library.lower()}_{depthwise}convolution{kind}")

        def contract(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            flags = self.flags.in_force()
            if miopen:
                return own(a, b, bias, *arguments, *flags[:2])
            return add_bias(own(a, b, *arguments, *flags), bias)

        return contract


class AtenCudnnBackend(_GpuLibrary):
    name = "aten:cudnn"
    summary = "NVIDIA's cuDNN"
    kinds = frozenset({2, 3})
    library = "cuDNN"
    where = "a CUDA device"
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    built = staticmethod(lambda: torch.version.hip is None and torch.backends.cudnn.is_available())


class AtenMiopenBackend(_GpuLibrary):
    name = "aten:miopen"
    summary = "AMD's MIOpen"
    kinds = frozenset({5, 6, 7})
    library = "MIOpen"
    where = "a ROCm device (PyTorch calls it cuda)"
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    built = staticmethod(lambda: torch.version.hip is not None)

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons = super().reasons_against(problem, outputs, device)
        if problem.groups > 1 and max(problem.dilation) > 1:
            reasons.append("PyTorch gives MIOpen no convolution that is both grouped and dilated")
        strict = "grad_weight" in outputs and self.flags.stricter_than_pytorch(problem.dtype)
        if strict and problem.groups > 1 and max(problem.stride) > 1:
            reasons.append(
                "for MIOpen's gradient of the weight PyTorch takes no flags of the call, and without its own flag "
                "torch.backends.cudnn.deterministic there is no other way for a grouped and strided convolution"
            )
        return reasons


# ---- libraries on a CPU ----------------------------------------------------------------------------


class AtenMkldnnBackend(AtenLibrary):
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
    built = staticmethod(lambda: torch.backends.mkldnn.is_available())  # noqa: PLW0108, as it is at each call

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
        p, of_weight, arguments = problem, pass_ == "grad_weight", statable_arguments(problem)
        stride, padding, dilation, *_, groups = arguments
        if pass_ == "forward":
            return lambda a, b, bias: torch.mkldnn_convolution(a, b, bias, padding, stride, dilation, groups)

        def gradient(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            unread = a.new_empty(p.weight_shape if of_weight else p.input_shape)
            operands = (b.to_mkldnn(), unread) if of_weight else (unread.to_mkldnn(), b)
            mask = [not of_weight, of_weight, False]
            found = aten_backward(a.to_mkldnn(), *operands, None, *arguments, mask)[of_weight]
            return found if of_weight else add_bias(found.to_dense(), bias)

        return gradient


class AtenNativeBackend(AtenLibrary):
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

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract | None:
        p, d, k = problem, problem.ndim, problem.kernel_size
        stride, padding, dilation, *_ = statable_arguments(p)
        undilated, of_weight = max(dilation) == 1, pass_ == "grad_weight"
        name, arguments, knows_groups = f"slow_conv_dilated{d}d", (stride, padding, dilation), False
        if pass_ != "forward" and d == 2 and undilated:
            name, arguments = "_slow_conv2d_backward", (k, stride, padding, [not of_weight, of_weight, False])
        elif of_weight:
            return None
        elif pass_ == "grad_input":
            name, arguments = f"slow_conv_transpose{d}d", (stride, padding, output_padding(p), dilation)
        elif p.depthwise and device.type == "cuda":
            name, knows_groups = "_conv_depthwise2d" if d == 2 else "conv_depthwise3d", True
        elif undilated and (d == 2 or device.type == "cpu"):
            name, arguments = "_slow_conv2d_forward" if d == 2 else "slow_conv3d_forward", (stride, padding)
            knows_groups = d == 3
        own, g = getattr(_ops, name), p.groups

        def contract(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            return own(a, b, k, bias, *arguments)

        def gradient(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            if of_weight:  # the unread tensor is of the layout that the result gets, which must be contiguous
                a, b, unread = a.contiguous(), b.contiguous(), a.new_empty(p.out_channels // g, *p.weight_shape[1:])
                return own(a, b, unread, *arguments)[1]
            unread = a.new_empty(p.batch, p.in_channels // g, *p.input_size)
            return add_bias(own(a, unread, b, *arguments)[0], bias)

        one = gradient if name == "_slow_conv2d_backward" else contract
        return one if knows_groups else _by_groups(p, one, of_weight=of_weight)
