"""``aten:mkldnn``: oneDNN on the CPU, also where PyTorch's rules of thumb would not call it.

The forward has an operator of its own. The gradients have none, but PyTorch's backward always picks oneDNN for
tensors in oneDNN's layout; so they are converted, which copies them, and no flag is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..problem import ConvProblem, Output, Pass
from .aten_direct import MKLDNN, AtenDirect, Contract

__all__ = ["AtenMkldnnBackend"]

_backward: Any = torch.ops.aten.convolution_backward.default
_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


class AtenMkldnnBackend(AtenDirect):
    """oneDNN, forced."""

    name = "aten:mkldnn"
    summary = "oneDNN (once called MKL-DNN) on the CPU"
    kinds = MKLDNN

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons = []
        if not torch.backends.mkldnn.is_available():
            reasons.append("this PyTorch was built without oneDNN")
        if device.type != "cpu":
            reasons.append(f"oneDNN needs the CPU, got {device.type}")
        if problem.dtype not in (torch.float32, *_SUPPORTED):
            reasons.append(f"oneDNN computes torch.float32, torch.bfloat16 and torch.float16, got {problem.dtype}")
        elif not reasons and problem.dtype in _SUPPORTED and not _cpu_has(problem.dtype):
            reasons.append(f"this CPU lacks the instructions with which oneDNN computes {problem.dtype}")
        if set(outputs) - {"forward", "grad_bias"} and not torch._C._get_mkldnn_enabled():
            reasons.append(
                "torch.backends.mkldnn is switched off, and PyTorch reaches oneDNN's grad_input and grad_weight "
                "only where it is on"
            )
        return reasons

    def operator(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> tuple[Contract, bool]:
        s, d, g = problem.stride, problem.dilation, problem.groups
        pad = [low for low, _ in problem.padding]
        if pass_ == "forward":
            return lambda a, b, bias=None: torch.mkldnn_convolution(a, b, bias, pad, s, d, g), True
        rest = (None, s, pad, d, False, [0] * problem.ndim, g)

        def grad_input(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
            unread = a.new_empty(problem.input_shape).to_mkldnn()
            return _backward(a.to_mkldnn(), unread, b, *rest, [True, False, False])[0].to_dense()

        def grad_weight(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
            unread = a.new_empty(problem.weight_shape)
            return _backward(a.to_mkldnn(), b.to_mkldnn(), unread, *rest, [False, True, False])[1]

        return (grad_input if pass_ == "grad_input" else grad_weight), False


def _cpu_has(dtype: torch.dtype) -> bool:
    ask = getattr(torch.ops.mkldnn, _SUPPORTED[dtype], None)
    return True if ask is None else bool(ask())
