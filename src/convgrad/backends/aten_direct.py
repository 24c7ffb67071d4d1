"""ATen's own backends as choices of their own: what they share.

PyTorch picks one of its backends for a convolution by rules and global flags. Here the pick is made by name, with no
flag touched, in one of three ways, tried in this order:

1. where PyTorch would pick this backend anyway, the call is PyTorch's own (`AtenBackend`), bit for bit;
2. else the backend's own operator, where PyTorch exposes one (``torch.cudnn_convolution``,
   ``aten::_slow_conv2d_forward``);
3. else that operator in another role: the gradient of the input is a transposed convolution, and the gradient of the
   weight is a convolution of the input with grad_output, stride and dilation exchanged (`grad_weight_as_convolution`).

What none of them reaches is a reason that `reasons_against` gives.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Pass, effective_kernel
from .aten import AtenBackend, statable, statable_arguments
from .base import Backend, Kernel
from .padding import pad_input, padded, unpad_input
from .strides import usual_strides

__all__ = ["AtenDirect", "Contract", "aten_choice", "grad_weight_as_convolution", "name_of", "output_padding"]

#: A function of (a, b, bias), the operands of one pass of one problem.
Contract = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]

#: Values of ``torch._C._ConvBackend``, the same in every release that is supported.
NATIVE = frozenset({0, 1, 13, 14, 15, 16, 17, 18})
CUDNN = frozenset({2, 3})
MIOPEN = frozenset({5, 6, 7})
MKLDNN = frozenset({8, 9})
_NAMES = {
    **dict.fromkeys(NATIVE, "its own kernels"),
    **dict.fromkeys(CUDNN, "cuDNN"),
    **dict.fromkeys(MIOPEN, "MIOpen"),
    **dict.fromkeys(MKLDNN, "oneDNN"),
    11: "NNPACK",
    12: "the device's own convolution",
}
_aten = AtenBackend()


def name_of(choice: int) -> str:
    """What a value of ``torch._C._ConvBackend`` stands for, in words."""
    return _NAMES.get(choice, f"backend {choice}")


def aten_choice(problem: ConvProblem, device: torch.device) -> int:
    """Which backend PyTorch picks for this problem under the flags in force, as its ``_ConvBackend`` value.

    The device must be here. It is asked with tensors that have sizes and no memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    p = statable(problem)
    shape = p.output_shape if p.transposed else p.input_shape
    with _disable_current_modes(), FakeTensorMode():
        first, weight = (
            torch.empty(s, dtype=p.dtype, device=device, memory_format=p.memory_format) for s in (shape, p.weight_shape)
        )
        choice: Any = torch._C._select_conv_backend(first, weight, None, *statable_arguments(p))
    return int(choice)


class AtenDirect(Backend):
    """One of ATen's backends, forced by name.

    A subclass names it and gives its operators for a problem of 2 or 3 dimensions with symmetric padding.
    """

    #: Values of ``_ConvBackend`` that stand for this backend.
    kinds: frozenset[int] = frozenset()
    from_pytorch = True

    @abstractmethod
    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> tuple[Contract, bool]:
        """The backend's own way to one pass, and whether it adds the bias.

        Args:
            problem: in 2 or 3 dimensions, with symmetric padding.
        """

    def picked(self, problem: ConvProblem, device: torch.device) -> bool:
        """Whether PyTorch would pick this backend here."""
        return aten_choice(problem, device) in self.kinds

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        made: dict[torch.device, Contract] = {}  # a plan has one device; it is known at the first call

        def contract(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            function = made.get(a.device)
            if function is None:
                function = made[a.device] = self.contraction(problem, pass_, a.device)
            result = function(_plain(problem, a), _plain(problem, b), bias)
            return result.contiguous(memory_format=problem.memory_format)

        return contract

    def contraction(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        """PyTorch's own call where it would pick this backend, else the backend's operator."""
        if self.picked(problem, device):
            return _aten.bind(problem, (pass_,))
        return self.forced(problem, pass_, device)

    def forced(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Contract:
        """The backend's operator, with one-sided padding, a missing dimension and the bias seen to."""
        p = problem if problem.symmetric else padded(problem)
        if p.ndim == 1:
            p = _with_height(p)
        operator, adds_bias = self.operator(p, pass_, device)

        def contract(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
            if not problem.symmetric:
                a, b = _with_padding(problem, pass_, a, b)
            if problem.ndim == 1:
                a, b = a.unsqueeze(2), b.unsqueeze(2)
            fused = bias if adds_bias and (problem.symmetric or pass_ != "grad_input") else None
            result = operator(a, b, fused)
            if problem.ndim == 1:
                result = result.squeeze(2)
            if not problem.symmetric and pass_ == "grad_input":
                result = unpad_input(problem, result)
            return result if bias is None or fused is not None else result + bias.view(-1, *(1,) * problem.ndim)

        return contract


def _plain(problem: ConvProblem, t: Tensor) -> Tensor:
    """The same tensor with the usual stride where its size is 1: PyTorch's kernels have read it and gone wrong."""
    if 1 not in t.shape:
        return t
    usual = usual_strides(t.shape, problem.channels_last)
    return t if t.stride() == usual else t.as_strided(t.shape, usual)


def _with_padding(problem: ConvProblem, pass_: Pass, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if pass_ == "forward":
        return pad_input(problem, a), b
    return (a, pad_input(problem, b)) if pass_ == "grad_weight" else (a, b)


def _with_height(p: ConvProblem) -> ConvProblem:
    """A 1-D problem as a 2-D one of height 1, as PyTorch runs it."""
    return p.replace(
        input_size=(1, *p.input_size),
        kernel_size=(1, *p.kernel_size),
        stride=(1, *p.stride),
        padding=((0, 0), *p.padding),
        dilation=(1, *p.dilation),
        output_size=(1, *p.output_size),
    )


def output_padding(p: ConvProblem) -> list[int]:
    """The output_padding with which a transposed convolution gives the input's size; smaller than the stride."""
    return [
        n + low + high - effective_kernel(k, d) - (out - 1) * s
        for n, (low, high), k, d, out, s in zip(
            p.input_size, p.padding, p.kernel_size, p.dilation, p.output_size, p.stride, strict=True
        )
    ]


def grad_weight_as_convolution(p: ConvProblem, operator: Callable[[ConvProblem], Contract]) -> Contract:
    """The gradient of the weight as the forward of another problem, for a backend that exposes no other way.

    The input's channels become the batch, the batch becomes the channels that are summed over, grad_output the kernel;
    stride and dilation change places. Positions past the kernel, which a stride leaves over, are cut off.

    Args:
        operator: makes the forward of a problem: a function of (input, weight, bias).
    """
    n, g, c = p.batch, p.groups, p.in_channels // p.groups
    reached = tuple(k + extra // d for k, extra, d in zip(p.kernel_size, output_padding(p), p.dilation, strict=True))
    exchanged = p.replace(
        batch=c,
        in_channels=g * n,
        kernel_size=p.output_size,
        stride=p.dilation,
        dilation=p.stride,
        output_size=reached,
        memory_format=torch.contiguous_format,
        has_bias=False,
        origin="plain",
    )
    forward = operator(exchanged)

    def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        kernel = a.transpose(0, 1).contiguous()  # [C_out, N, *out]
        input = b.reshape(n, g, c, *p.input_size).transpose(0, 2).reshape(c, g * n, *p.input_size)
        result = forward(input, kernel, None)  # [C_in/groups, C_out, *reached]
        for i, k in enumerate(p.kernel_size):
            result = result.narrow(2 + i, 0, k)
        return result.transpose(0, 1)  # [C_out, C_in/groups, *k]

    return grad_weight
