"""A tensor that is not computed until its first reader is known.

The class has no memory, but a node of autograd. Its ``__torch_function__`` sees the first function that is called with
it; functions that only read sizes, dtype or device leave it as it is. What reaches PyTorch's C++ directly (a
`torch.autograd.Function`, a transform of `torch.func`) arrives at ``__torch_dispatch__``, below autograd. C++ code that
reads memory gets PyTorch's error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from .._compat import apply_of, outside_of_transforms, refuse_memory, remove_function_mode

_without_functions: Any = torch._C.DisableTorchFunctionSubclass

#: Attributes and methods that are answered without values.
_METADATA = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "itemsize", "nbytes"),
    *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn"),
    *("size", "dim", "stride", "numel", "nelement", "element_size", "get_device", "is_contiguous", "is_complex"),
    *("is_floating_point", "is_inference", "__len__"),
)  # fmt: skip
_ANSWERED: set[Any] = {f if callable(f) else f.__get__ for f in (getattr(Tensor, name) for name in _METADATA)}
_ANSWERED |= {torch.numel, torch.is_complex, torch.is_floating_point}


class _Watching(threading.local):
    """The state of a thread: the active function mode of this module, and the function of `describing`."""

    mode: TorchFunctionMode | None = None
    describe: Callable[..., Tensor | None] | None = None


_now = _Watching()


def watching() -> bool:
    """Return whether a mode of `watch` is active in this thread."""
    return _now.mode is not None


@contextmanager
def watch(mode: TorchFunctionMode) -> Generator[None, None, None]:
    """Let a mode see the functions that are called in a block, until `stop_watching`."""
    before = _now.mode
    stop_watching()  # of a module around this one
    _now.mode = mode.__enter__()
    try:
        yield
    finally:
        stop_watching()
        if before is not None:
            _now.mode = before.__enter__()


def stop_watching() -> None:
    """Leave the mode of the innermost block, where a convolution has read padding: functions take longer under one."""
    if _now.mode is not None:
        remove_function_mode(_now.mode)
        _now.mode = None


@contextmanager
def describing(convolve: Callable[..., Tensor | None]) -> Generator[None, None, None]:
    """Treat tensors on the meta device as a CPU's in this block.

    ``convolve`` is called for each convolution that may read its padding from its input, with the arguments of
    ``torch.convolution`` and the padding mode. It returns a result, or None for one that takes a padded copy.
    """
    before, _now.describe = _now.describe, convolve
    try:
        yield
    finally:
        _now.describe = before


def describes(t: Tensor) -> Callable[..., Tensor | None] | None:
    """Return the function of `describing` for a tensor on the meta device; None outside of its block."""
    return None if _now.describe is None or not t.is_meta else _now.describe


class Deferred(Tensor):
    """A tensor whose values its subclass computes, in `_compute`."""

    #: An ordinary tensor with its values and history, once it was read.
    _convgrad_read: Tensor | None = None
    #: Its version and node when that was made: C++ that changes it in place gives it others.
    _convgrad_state: tuple[int, Any] | None = None

    @classmethod
    def like(cls, shape: Any, stride: Any, of: Tensor) -> Any:
        """Return one of a shape, with the dtype and device of another tensor."""
        made = Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=of.dtype, device=of.device)
        refuse_memory(made)
        return made

    def _compute(self) -> Tensor:
        """Return the values, as a tensor without history that nothing else uses."""
        raise NotImplementedError

    def read(self) -> Tensor:
        """Return an ordinary tensor with the values, behind the same node of autograd; the same one each time."""
        if self._convgrad_read is None or self._convgrad_state != self._note():
            # Whatever the first reader computes, others may need gradients.
            with torch.inference_mode(False), torch.enable_grad(), outside_of_transforms():
                self._convgrad_read = _read(self)
        self._note()
        return self._convgrad_read  # pyright: ignore[reportReturnType]

    def _note(self) -> tuple[int, Any]:
        with _without_functions():
            self._convgrad_state = self._version, self.grad_fn
        return self._convgrad_state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERED:
            known = args[0]._convgrad_read
            with _without_functions():
                return func(args[0] if known is None else known, *args[1:], **kwargs)
        deferred = [(t, t.read()._version) for t in args if isinstance(t, Deferred)]
        args, kwargs = tree_map_only(Deferred, lambda t: t.read(), (args, kwargs))
        result = func(*args, **kwargs)
        for t, version in deferred:
            read: Any = t._convgrad_read
            if read._version != version:  # it is another version of this tensor, too, if autograd saved it
                torch.autograd.graph.increment_version(t)
                t._note()
                if result is read:
                    result = t
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Deferred, lambda t: t.read().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Read(torch.autograd.Function):
    """The values of a deferred tensor, as an ordinary one."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred) -> Tensor:
        known = deferred._convgrad_read
        return deferred._compute() if known is None else known.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_output


_read = apply_of(_Read)
