"""A user's forward whose calls to ``torch.nn.functional`` run convgrad's functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.utils import _ntuple
from torch.overrides import TorchFunctionMode

from .. import functional
from .._compat import fx_tracing
from ..nn import deferred, linear, norm_layers
from ..nn import padding as deferred_padding


def _convolution(
    d: int, compute: Callable[..., Tensor], module: Any, input: Any, weight: Any, bias: Any = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Compute a convolution by convgrad; zeros that the forward has padded are read without a copy."""

    def call(input: Tensor) -> Tensor:
        return compute(input, weight, bias, stride, padding, dilation, groups)

    if isinstance(input, deferred_padding.Padded):
        steps, gaps = _ntuple(d)(stride), _ntuple(d)(dilation)
        given = SimpleNamespace(kernel_size=weight.shape[2:], stride=steps, padding=padding, dilation=gaps)
        return input.convolved(call, weight, bias, steps, functional.sides_of(given), gaps, groups)
    return call(input.read() if isinstance(input, deferred.Deferred) else input)


def _without_module(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda module, *args, **kwargs: compute(*args, **kwargs)


#: Function -> what computes it, given the module whose forward calls it.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.conv1d: partial(_convolution, 1, functional.conv1d),
    F.conv2d: partial(_convolution, 2, functional.conv2d),
    F.conv3d: partial(_convolution, 3, functional.conv3d),
    F.conv_transpose1d: _without_module(functional.conv_transpose1d),
    F.conv_transpose2d: _without_module(functional.conv_transpose2d),
    F.conv_transpose3d: _without_module(functional.conv_transpose3d),
    F.batch_norm: norm_layers.batch_norm,
    F.instance_norm: norm_layers.instance_norm,
    F.linear: _without_module(linear.linear),
    F.pad: deferred_padding.pad,
}


class _Redirected(TorchFunctionMode):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _FUNCTIONS.get(func)
        return func(*args, **(kwargs or {})) if call is None else call(self.module, *args, **(kwargs or {}))


def redirected(cls: Any) -> Callable[..., Any]:
    """Return the forward of a class with these functions; in a graph of `torch.fx`, as the user wrote it."""

    @wraps(cls.forward)
    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if fx_tracing():
            return cls.forward(self, *args, **kwargs)
        with _Redirected(self):
            return cls.forward(self, *args, **kwargs)

    return computed
