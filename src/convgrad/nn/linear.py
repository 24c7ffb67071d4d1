"""The linear layer: torch's own, computed as a pointwise convolution on a CPU where that is expected to be faster.

The rows of its input are the pixels of an image of one row in channels_last, for which there are kernels; the engine
chooses, measures and reports such a call as any other. What it would leave to ATen, whatever is not a plain call, and
every error is torch's; under autocast every call is, unless the processor lacks the arithmetic of the dtype.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import _compat
from ..engine import POINTWISE, Plan, as_pointwise, beats_matmul, find, generation, linear_gains, make, remember
from ..errors import ConvgradError
from ..ops import apply_linear, autocast_is_on, cast_operands
from ..settings import may_choose_again
from .tracing import leaf_of_fx, refuse_scripting

__all__ = ["Linear"]

_is_dynamo_compiling, _recording = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_unsafe_view = torch.ops.aten._unsafe_view.default


class Linear(torch.nn.Linear):
    """``torch.nn.Linear``, computed by convgrad on a CPU where it is large enough.

    Shape:
        (*, in_features) -> (*, out_features)

    Equivalent to:
        >>> import torch, convgrad
        >>> ours, theirs = convgrad.nn.Linear(96, 384), torch.nn.Linear(96, 384)
        >>> _ = ours.load_state_dict(theirs.state_dict())
        >>> x = torch.randn(4, 512, 96)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5), repr(ours) == repr(theirs)
        (True, True)
    """

    def forward(self, input: Any) -> Any:
        """Apply the module."""
        if (input.__class__ is not Tensor or _compat.fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        return linear(input, self.weight, self.bias)

    __prepare_scriptable__ = refuse_scripting


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """``torch.nn.functional.linear``, computed by convgrad where that is expected to be faster."""
    plain = input.__class__ is Tensor or input.__class__ is Parameter
    if _is_dynamo_compiling() or not plain or _compat.jit_tracing() is not None:  # sizes may be no numbers
        return torch.nn.functional.linear(input, weight, bias)
    if input.is_cpu and autocast_is_on("cpu") and _compat.cpu_lacks(torch.get_autocast_dtype("cpu")):
        operands: Any = cast_operands(input, weight, bias)
        with _compat.without_autocast():
            return _linear(*operands)
    return _linear(input, weight, bias)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    plan: Any = None
    if input.is_cpu and len(weight.shape) == 2 and linear_gains(input.numel(), *weight.shape):
        plan = None if may_choose_again(input.device) else find("linear", (), input, weight, bias)
        if plan.__class__ is tuple:
            plan = _plan(plan, input, weight, bias)
    if plan is None:  # not torch's `forward`, which would compute a parametrized weight again
        return torch.nn.functional.linear(input, weight, bias)
    compute = apply_linear if _recording() else Plan.contract
    with _profiled(input, weight, bias) if _compat.profiler_enabled() else nullcontext():
        output = compute(plan, *as_pointwise(input, weight), bias)  # [1, out_features, 1, rows]
    # No view, since autograd would record what changes it in place, such as a ReLU, as a change of all of `output`.
    return _unsafe_view(output.permute(0, 2, 3, 1), (*input.shape[:-1], weight.shape[0]))


def _profiled(input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Open the range that PyTorch's profiler shows for torch's own layer, which tells it the FLOPs."""
    factors = [input.view(-1, weight.shape[1]), weight.t()]
    name, operands = ("aten::mm", factors) if bias is None else ("aten::addmm", [bias, *factors])
    return _compat.profiler_range(name, operands)


def _plan(key: tuple[Any, ...], input: Tensor, weight: Tensor, bias: Tensor | None) -> Plan | None:
    """The plan of a call, remembered under its key; None where it is torch's."""
    plan, since = None, generation[0]
    if _compat.exact_matmul() and input.dim() > 0 and input.is_contiguous() and weight.is_contiguous():
        with suppress(ConvgradError):  # operands that do not belong together, or a requested backend that cannot
            made = make(None, "convolution", POINTWISE, *as_pointwise(input, weight), bias)
            plan = made if beats_matmul(made) else None
    remember(key, plan, since)
    return plan
