"""A forward of the user's whose calls to ``torch.nn.functional`` run the functions that convgrad has."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import functional
from .._compat import fx_tracing
from ..nn import batch_norm, linear

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.conv1d: functional.conv1d,
    F.conv2d: functional.conv2d,
    F.conv3d: functional.conv3d,
    F.conv_transpose1d: functional.conv_transpose1d,
    F.conv_transpose2d: functional.conv_transpose2d,
    F.conv_transpose3d: functional.conv_transpose3d,
    F.batch_norm: batch_norm.batch_norm,
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
