"""A forward of the user's whose calls to ``torch.nn.functional`` run the functions that convgrad has."""

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
from ..nn import batch_norm, instance_norm, joined, linear
from ..nn import padding as unpadded


def _convolution(
    d: int,
    compute: Callable[..., Tensor],
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A function of ours, which reads the padding of an input that the forward padded (`convgrad.nn.joined`)."""
    joined.now.stop_watching()
    if isinstance(input, joined.Padded):
        stride, dilation = _ntuple(d)(stride), _ntuple(d)(dilation)
        given = SimpleNamespace(kernel_size=weight.shape[2:], stride=stride, padding=padding, dilation=dilation)
        sides = functional.sides_of(given)
        output = unpadded.convolve_padded(input, weight, bias, stride, sides, dilation, groups)
        if output is not None:
            return output
        input = input.operand()
    return compute(input, weight, bias, stride, padding, dilation, groups)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.conv1d: partial(_convolution, 1, functional.conv1d),
    F.conv2d: partial(_convolution, 2, functional.conv2d),
    F.conv3d: partial(_convolution, 3, functional.conv3d),
    F.conv_transpose1d: functional.conv_transpose1d,
    F.conv_transpose2d: functional.conv_transpose2d,
    F.conv_transpose3d: functional.conv_transpose3d,
    F.batch_norm: batch_norm.batch_norm,
    F.instance_norm: instance_norm.instance_norm,
    F.linear: linear.linear,
}


class _Redirected(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Any = _FUNCTIONS.get(func, func)
        return call(*args, **(kwargs or {}))


def redirected(cls: Any) -> Callable[..., Any]:
    """The forward of a class, as it is when called; a graph of `torch.fx` has the calls as the user wrote them."""

    @wraps(cls.forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        if fx_tracing():
            return cls.forward(*args, **kwargs)
        with _Redirected():
            return cls.forward(*args, **kwargs)

    return computed
