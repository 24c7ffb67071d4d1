"""``aten:native``: PyTorch's own kernels, on the CPU or in CUDA, with no library.

These are the descendants of THNN: unfold to columns, one matrix product a batch item and group (``slow_conv2d``,
``slow_conv3d``, ``slow_conv_dilated``, ``slow_conv_transpose``), and CUDA's depthwise kernels. Only ``slow_conv2d``
exposes its gradients; the others' are reached through PyTorch's own call where it picks them, else in another role.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Pass
from .aten import AtenBackend
from .aten_direct import NATIVE, AtenDirect, Contract, grad_weight_as_convolution, output_padding
from .base import Arithmetic

__all__ = ["AtenNativeBackend"]

_ops: Any = torch.ops.aten
_rules = AtenBackend()


class AtenNativeBackend(AtenDirect):
    """PyTorch's own kernels, also where it would call oneDNN, NNPACK, cuDNN or MIOpen."""

    name = "aten:native"
    summary = "PyTorch's own kernels (slow_conv, CUDA depthwise), with no library"
    kinds = NATIVE

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        if device.type not in ("cpu", "cuda"):
            return [f"PyTorch has kernels of its own for the CPU and for CUDA, got {device.type}"]
        if problem.dtype.is_complex:
            return ["PyTorch makes three real convolutions of a complex one before it picks a backend; ask for 'aten'"]
        return _rules.reasons_against(problem, outputs, device)

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        # Columns are added up, and batch items accumulated, in the storage dtype.
        return "low-precision accumulation" if problem.dtype in (torch.float16, torch.bfloat16) else "direct"

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> tuple[Contract, bool]:
        undilated = all(d == 1 for d in problem.dilation)
        if pass_ == "forward":
            return _forward(problem, device), True
        if problem.ndim == 2 and undilated:
            return _slow_conv2d_gradient(problem, pass_), False
        if pass_ == "grad_input":
            return _transposed(problem), True
        return grad_weight_as_convolution(problem, lambda p: _forward(p, device)), False


def _forward(p: ConvProblem, device: torch.device) -> Contract:
    k, s, d, pad = _arguments(p)
    undilated = all(v == 1 for v in d)
    if device.type == "cuda" and p.depthwise:
        own: Any = _ops._conv_depthwise2d if p.ndim == 2 else _ops.conv_depthwise3d
        return lambda a, b, bias=None: own(a, b, k, bias, s, pad, d)
    if p.ndim == 2 and undilated:
        return _by_groups(p, lambda a, b, bias: _ops._slow_conv2d_forward(a, b, k, bias, s, pad))
    if device.type == "cpu" and undilated:
        return lambda a, b, bias=None: _ops.slow_conv3d_forward(a, b, k, bias, s, pad)  # knows groups
    dilated: Any = _ops.slow_conv_dilated2d if p.ndim == 2 else _ops.slow_conv_dilated3d
    return _by_groups(p, lambda a, b, bias: dilated(a, b, k, bias, s, pad, d))


def _transposed(p: ConvProblem) -> Contract:
    k, s, d, pad = _arguments(p)
    extra = output_padding(p)
    own: Any = _ops.slow_conv_transpose2d if p.ndim == 2 else _ops.slow_conv_transpose3d
    return _by_groups(p, lambda a, b, bias: own(a, b, k, bias, s, pad, extra, d))


def _slow_conv2d_gradient(p: ConvProblem, pass_: Pass) -> Contract:
    k, s, _, pad = _arguments(p)
    backward: Any = _ops._slow_conv2d_backward.output_mask
    one = p.replace(groups=1, in_channels=p.in_channels // p.groups, out_channels=p.out_channels // p.groups)
    if pass_ == "grad_input":

        def grad_input(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
            return backward(a, a.new_empty(one.input_shape), b, k, s, pad, [True, False, False])[0]

        return _by_groups(p, grad_input)

    def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        unread = a.new_empty(one.weight_shape)  # of the layout that the result gets, which must be contiguous
        return backward(a.contiguous(), b.contiguous(), unread, k, s, pad, [False, True, False])[1]

    return _by_groups(p, grad_weight, second=1, joined=0)


def _by_groups(
    p: ConvProblem,
    contract: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    second: int = 0,
    joined: int = 1,
) -> Contract:
    """One call a group, as ATen does for kernels that know no groups.

    Args:
        second: the dimension along which the second operand's groups lie.
        joined: the dimension along which the results' do.
    """
    g = p.groups
    if g == 1:
        return contract

    def grouped(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        biases = (None,) * g if bias is None else bias.chunk(g)
        parts = [
            contract(x.contiguous(), y.contiguous(), z)
            for x, y, z in zip(a.chunk(g, 1), b.chunk(g, second), biases, strict=True)
        ]
        return torch.cat(parts, joined)

    return grouped


def _arguments(p: ConvProblem) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel size, stride, dilation and padding."""
    return list(p.kernel_size), list(p.stride), list(p.dilation), [low for low, _ in p.padding]
