"""Batch normalization modules: torch's own, with the training on a CPU exchanged and nothing else.

It is here because it is most of what is left of a convolutional net's training step after the convolutions. All but a
plain call with the statistics of the batch is torch's: evaluation, compilers, transforms, modes, subclasses of Tensor,
small inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._compat import (
    apply_of,
    channels_last_of,
    dispatch_modes,
    forward_ad_active,
    function_modes,
    functorch_active,
    fx_tracing,
    has_storage,
    jit_tracing,
)
from ..backends import native_norm_takes, norm_gains, normalization_gradients, normalize
from .joined import FUNCTIONS, OF_A_MODULE, Activated, leaf_of_fx, now, refuse_scripting

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d"]

_KINDS = (Tensor, Parameter)
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


def _plain() -> bool:
    """Whether a call is computed by what it calls: no transform, mode or trace sees it."""
    return not (
        functorch_active() or dispatch_modes() or function_modes() or forward_ad_active() or jit_tracing() is not None
    )


def _is_odd(t: Tensor) -> bool:
    """Whether a tensor's values are not simply what its memory holds."""
    return t.is_neg() or not (has_storage(t) and t.data_ptr())


def _format(input: Tensor) -> torch.memory_format:
    """How a dense input lies, if it does so in one of the layouts that have kernels."""
    return torch.contiguous_format if input.is_contiguous() else channels_last_of(input.dim() - 2)


def is_plain(input: Any) -> bool:
    """Whether an input is such as our kernels take, but for its size and layout."""
    return (
        not _is_dynamo_compiling()
        and input.__class__ in _KINDS
        and input.is_cpu
        and input.layout is torch.strided
        and input.dim() > 2
        and _plain()
        and native_norm_takes(input.dtype)
        and not _is_odd(input)
    )


def _is_ours(input: Any) -> bool:
    """Whether our kernels compute an input with the statistics of the batch."""
    return (
        is_plain(input)
        and input.is_contiguous(memory_format=(layout := _format(input)))
        and norm_gains(input.shape, layout is not torch.contiguous_format)
        and input.numel() > input.shape[1]  # otherwise torch's error
    )


def _gains(input: Tensor, activation: Any) -> bool:
    """Whether a whole step gains: in channels_last only by the activation."""
    return activation is not None or input.is_contiguous()


def fit(input: Tensor, parameters: tuple[Any, ...]) -> bool:
    """Whether weight, bias and running values, as far as there are, are such as our kernels take."""
    given = [p for p in parameters if p is not None]
    for p in given:
        if (
            p.__class__ not in _KINDS
            or p.dtype is not given[0].dtype
            or p.shape != input.shape[1:2]
            or not p.is_cpu
            or not p.is_contiguous()
            or _is_odd(p)
        ):
            return False
    return not given or given[0].dtype is input.dtype or (given[0].dtype is torch.float32 and input.itemsize == 2)


class _BatchNorm:
    """The forward that the three share."""

    _convgrad_joins = "norm"

    def forward(self: Any, input: Any) -> Any:
        """Apply the module."""
        if (input.__class__ is not Tensor or fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not (by_batch and self.eps > 0 and _is_ours(input)):
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        activation = now.joined_with(self, OF_A_MODULE)
        weight, bias, mean, var = self.weight, self.bias, self.running_mean, self.running_var
        if not (_gains(input, activation) and fit(input, (weight, bias, mean, var))):
            return super().forward(input)  # pyright: ignore[reportAttributeAccessIssue]
        self._check_input_dim(input)
        momentum = self.momentum
        if not self.track_running_stats:
            mean = var = None
        elif self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return compute(activation, input, weight, bias, mean, var, momentum or 0.0, self.eps)

    __prepare_scriptable__ = refuse_scripting


def batch_norm(
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``torch.nn.functional.batch_norm``, computed by convgrad where a module would be."""
    if training and eps > 0 and _is_ours(input):
        activation, parameters = now.joined_with(now.owner), (weight, bias, running_mean, running_var)
        if _gains(input, activation) and fit(input, parameters):
            return compute(activation, input, *parameters, momentum, eps)
    return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def compute(activation: Any, *arguments: Any, shape: torch.Size | None = None) -> Tensor:
    """Normalize by the kernels.

    Args:
        activation: the module behind it whose values are computed, too; or None.
        arguments: input, weight, bias, running mean and variance, momentum, epsilon.
        shape: of the result, if not the input's.
    """
    name = "" if activation is None else activation._convgrad_activation
    arguments = (*arguments, name)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments[:3]):
        output = _normalization(*arguments)
    else:
        output = normalize(*arguments)[0]
    if shape is not None:  # no view, since autograd would copy all of it for what changes it in place, such as a ReLU
        output = _aten._unsafe_view(output, shape)
    if activation is not None:
        now.computed[activation, id(output)] = output
        if activation in FUNCTIONS.values():
            output.__class__ = Activated
    return output


class _Normalization(torch.autograd.Function):
    """Keeps what torch's keeps: input, weight, and mean and inverse standard deviation of each channel.

    With an activation it keeps the bias, too, but neither the normalized input nor the result, as the activation would.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, *arguments: Any) -> Tensor:
        output, statistics = normalize(input, weight, bias, *arguments)
        ctx.epsilon, ctx.activation = arguments[-2:]
        ctx.save_for_backward(input, weight, bias if ctx.activation else None, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight, bias, statistics = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if (
            _is_dynamo_compiling()
            or torch.is_grad_enabled()
            or grad_output.__class__ not in _KINDS
            or _is_odd(grad_output)
            or not _plain()
        ):  # torch's formulas have derivatives of their own
            if input.is_contiguous():  # torch's kernel misreads one image's gradient that lies otherwise
                grad_output = grad_output.contiguous()
            if ctx.activation:
                normalized = torch.nn.functional.batch_norm(input, None, None, weight, bias, True, 0.0, ctx.epsilon)
                grad_output = _GRADIENTS[ctx.activation](grad_output, normalized)
            scale = None if weight is None else weight.to(statistics.dtype)
            gradients = _aten.native_batch_norm_backward(
                grad_output, input, scale, None, None, *statistics, True, ctx.epsilon, needs
            )
        else:
            grad_output = grad_output.contiguous(memory_format=_format(input))
            gradients = normalization_gradients(grad_output, input, weight, bias, statistics, needs, ctx.activation)
        return (*gradients, None, None, None, None, None)


_normalization = apply_of(_Normalization)
_aten: Any = torch.ops.aten


def _silu_gradient(g: Tensor, z: Tensor) -> Tensor:
    s = z.sigmoid()  # aten's own has no derivative
    return g * s * (1 + z * (1 - s))


#: Activation -> the gradient of its input, with derivatives of its own.
_GRADIENTS: dict[str, Any] = {
    "relu": lambda g, z: _aten.threshold_backward(g, z, 0),
    "relu6": lambda g, z: _aten.hardtanh_backward(g, z, 0.0, 6.0),
    "silu": _silu_gradient,
    "hardswish": _aten.hardswish_backward,
}

_DOCSTRING = """``torch.nn.{name}``, computed by convgrad {where}.

    Shape:
        {shape} -> the same

    Equivalent to:
        >>> import torch, convgrad
        >>> ours, theirs = convgrad.nn.{name}(8), torch.nn.{name}(8)
        >>> x = torch.randn({x})
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5), repr(ours) == repr(theirs)
        (True, True)
    """


def document(module: Any, where: str, shape: str, x: str) -> None:
    """Give a module its docstring."""
    module.__doc__ = _DOCSTRING.format(name=module.__name__, where=where, shape=shape, x=x)


# fmt: off
class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d): ...
class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d): ...
class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d): ...
# fmt: on

document(BatchNorm1d, "in training on a CPU", "(N, C) or (N, C, L)", "2, 8, 4096")
document(BatchNorm2d, "in training on a CPU", "(N, C, H, W)", "2, 8, 64, 64")
document(BatchNorm3d, "in training on a CPU", "(N, C, D, H, W)", "2, 8, 8, 16, 32")
