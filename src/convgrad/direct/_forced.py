"""How a call of an old name is forced onto its library, with its flags, through every derivative."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..backends.aten_direct_gpu import AtenCudnnBackend, AtenMiopenBackend, Flags
from ..backends.base import Backend
from ..engine.registry import backends, register
from ..engine.request import use_backend
from ..errors import BackendError, ShapeError
from ..problem import ConvProblem

__all__ = [
    "Grads",
    "Ints",
    "also_with_bias",
    "backward",
    "cudnn",
    "forced",
    "grad_input_of_transposed",
    "grad_weight_of_transposed",
    "miopen",
]

Ints = int | Sequence[int]
Grads = tuple["Tensor | None", ...]


@contextmanager
def forced(function: str, backend: Backend, *tensors: Tensor) -> Generator[None, None, None]:
    """Compute on one backend in this block, and in every backward of what was computed here.

    Raises:
        BackendError: the library is not here; the message says why not, and what there is.
        TypeError: something else in a tensor's place.
    """
    for t in tensors:
        if not isinstance(t, Tensor):
            raise TypeError(f"convgrad.direct.{function}: expected a Tensor, but got {type(t).__name__}")
    absent = getattr(backend, "absent", None)
    device = next(t.device for t in tensors)
    against = absent(device) if absent is not None else []
    if against:
        raise BackendError(_refusal(function, backend, against, device))
    if backends().get(backend.name) is None:
        register(backend)  # a set of flags that is met for the first time
    with use_backend(backend.name):
        yield


def _refusal(function: str, backend: Backend, against: list[str], device: torch.device) -> str:
    names = {"cpu": "thnn_conv2d, slow_conv2d and mkldnn_convolution run", "cuda": "thnn_conv2d and slow_conv2d run"}
    small = ConvProblem.parse("ic1iw3oc1kw3")
    able = [n for n, b in backends().items() if "[" not in n and not b.reasons_against(small, ("forward",), device)]
    return (
        f"convgrad.direct.{function} is forced onto {backend.summary}, which is not here: {'; '.join(against)}. "
        f"Of the direct names {names.get(device.type, 'none runs')} on {device.type}; convgrad.convolution and "
        f"convgrad.convolution_backward compute the same with the best of the backends here: {', '.join(able)}"
    )


def cudnn(benchmark: bool | None, deterministic: bool | None, allow_tf32: bool | None) -> Backend:
    """cuDNN with the flags of one call."""
    return _made(AtenCudnnBackend(Flags(_bool(benchmark), _bool(deterministic), _bool(allow_tf32))))


def miopen(benchmark: bool | None, deterministic: bool | None) -> Backend:
    """MIOpen with the flags of one call."""
    return _made(AtenMiopenBackend(Flags(_bool(benchmark), _bool(deterministic))))


def _bool(flag: bool | None) -> bool | None:
    return None if flag is None else bool(flag)


def _made(backend: Backend) -> Backend:
    """The one that is registered under this name, if there is one."""
    return backends().get(backend.name, backend)


# ---- shared by the families ----------------------------------------------------------------------


def backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
    output_mask: Sequence[bool],
    transposed: bool = False,
    output_padding: Ints = 0,
) -> Grads:
    """The gradients that a mask of 2 or 3 entries asks for, None for the others; as many as the mask has entries.

    Args:
        arguments: stride, padding, dilation and groups.
    """
    if len(output_mask) not in (2, 3):
        raise ShapeError(f"expected output_mask to have 2 or 3 entries, but got output_mask={list(output_mask)}")
    stride, padding, dilation, groups = arguments
    mask = [bool(m) for m in output_mask]
    grads = functional.convolution_backward(
        grad_output, input, weight, None, stride, padding, dilation, transposed, output_padding, groups,
        [*mask, False][:3],
    )  # fmt: skip
    return grads[: len(mask)]


def grad_input_of_transposed(grad_output: Tensor, weight: Tensor, arguments: tuple[Any, ...]) -> Tensor:
    """The input's gradient of a transposed convolution: the plain convolution of grad_output."""
    stride, padding, dilation, groups = arguments
    return functional.convolution(grad_output, weight, None, stride, padding, dilation, False, 0, groups)


def grad_weight_of_transposed(
    weight_size: Sequence[int], grad_output: Tensor, input: Tensor, arguments: tuple[Any, ...]
) -> Tensor:
    """The weight's gradient of a transposed convolution: that of a plain one, input and grad_output exchanged."""
    stride, padding, dilation, groups = arguments
    return functional.grad_weight(grad_output, weight_size, input, stride, padding, dilation, False, 0, groups)


def also_with_bias(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let a bias (a tensor or None) stand third, as it did in these functions in PyTorch's early releases."""

    @wraps(function)
    def either(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 2 and (args[2] is None or isinstance(args[2], Tensor)):
            kwargs["bias"] = args[2]
            args = (*args[:2], *args[3:])
        return function(*args, **kwargs)

    return either
