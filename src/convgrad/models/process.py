"""`takeover`: every convolution of the process through convgrad, for as long as a block lasts.

The kernels of aten::convolution and aten::convolution_backward are exchanged at the dispatch keys of the devices, below
autograd, autocast, functorch and every mode. So whatever ends in these two operators is caught: modules, functional
calls, transposed convolutions, double backward, scripted models, compiled code. One router serves the whole process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from marshal import dumps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from .._compat import cpu_convolution, function_modes, jit_tracing, profiler_enabled
from ..engine.cache import BoundedCache
from ..engine.events import Event, observers, thread
from ..engine.request import active
from .dispatch import Override, original_kernel
from .routes import Route, backward_route, forward_route, inside

__all__ = ["takeover", "watch_stock"]

Ints = Sequence[int]
Original = Callable[..., Any]


class _Router:
    """The one owner of the exchanged kernels: there from the first block that opens until the last one closes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = {"ours": 0, "stock": 0}
        self._override: Override | None = None
        self.taking = False

    def open(self, kind: str) -> None:
        with self._lock:
            self._open[kind] += 1
            self.taking = self._open["ours"] > 0
            if self._override is None:
                self._override = self._put()

    def close(self, kind: str) -> None:
        with self._lock:
            self._open[kind] -= 1
            self.taking = self._open["ours"] > 0
            if not any(self._open.values()) and self._override is not None:
                self._override.undo()
                self._override = None

    def _put(self) -> Override:
        override = Override()
        try:
            for key in _keys():
                short = cpu_convolution() if key == "CPU" else None
                forward = _forward_kernel(self, original_kernel("convolution", key), short)
                backward = _backward_kernel(self, original_kernel("convolution_backward", key))
                override.put("convolution", key, forward)
                override.put("convolution_backward", key, backward)
        except BaseException:
            override.undo()
            raise
        return override


def _keys() -> tuple[str, ...]:
    """The dispatch keys of the devices for which this PyTorch was built."""
    gpu = torch.version.cuda is not None or torch.version.hip is not None
    return ("CPU", "CUDA") if gpu else ("CPU",)


# ---- the kernels ---------------------------------------------------------------------------------
# These two functions are paid for at every call.

#: Calls that are PyTorch's own whatever is not in this key: the bytes of the arguments, the sizes, the dtype. What else
#: may be wrong with their operands, PyTorch says.
_settled = BoundedCache()


def _forward_kernel(router: _Router, original: Original, short: Original | None) -> Callable[..., Tensor]:
    """The kernel for aten::convolution; ``short`` computes what ``original`` does, and starts faster."""

    def convolution(
        keyset: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        transposed: bool,
        output_padding: Ints,
        groups: int,
    ) -> Tensor:
        rest: Any = (stride, padding, dilation, transposed, output_padding, groups)
        watched = observers or profiler_enabled()
        if thread.inside or not (router.taking or watched) or jit_tracing() is not None:
            return original(keyset, input, weight, bias, *rest)
        known = None if watched else (dumps(rest, 2), input.shape, weight.shape, input.dtype)
        if known in _settled and input.is_cpu and active() is None:
            if short is None or function_modes():  # those see what is called from Python
                return original(keyset, input, weight, bias, *rest)
            return short(
                input,
                weight,
                bias,
                stride,
                padding,
                dilation,
                transposed,
                output_padding,
                groups,
                False,
                False,
                False,
                False,
            )
        arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        route = forward_route(router.taking, input, weight, bias, arguments)
        if known is not None and route is not None and route.is_settled:
            _settled[known] = True
        if route is None or (route.is_stock and not watched):
            return original(keyset, input, weight, bias, *rest)
        with inside():
            if route.plan is not None:
                return route.plan.contract(input, weight, bias)
            return _observed(route, input.device, partial(original, keyset, input, weight, bias, *rest))

    return convolution


def _backward_kernel(router: _Router, original: Original) -> Callable[..., Any]:
    """The kernel for aten::convolution_backward."""

    def convolution_backward(
        keyset: Any, grad_output: Tensor, input: Tensor, weight: Tensor, bias_sizes: Ints | None, *rest: Any
    ) -> Any:
        if bias_sizes is None and rest[6][2]:  # without them an empty batch would end the process
            bias_sizes = [weight.shape[1] * rest[5] if rest[3] else weight.shape[0]]
        watched = observers or profiler_enabled()
        if thread.inside or not (router.taking or watched) or jit_tracing() is not None:
            return original(keyset, grad_output, input, weight, bias_sizes, *rest)
        written: Any = (bias_sizes, rest)
        known = None if watched else (dumps(written, 2), grad_output.shape, input.shape, weight.shape, input.dtype)
        if known in _settled and input.is_cpu and active() is None:
            return original(keyset, grad_output, input, weight, bias_sizes, *rest)
        stride, padding, dilation, transposed, output_padding, groups, mask = rest
        arguments = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
        sizes = tuple(bias_sizes or ()) if mask[2] else None  # autograd states the sizes of a missing bias as [0]
        route = backward_route(router.taking, grad_output, input, weight, sizes, arguments, tuple(mask))
        if known is not None and route is not None and route.is_settled:
            _settled[known] = True
        if route is None or (route.is_stock and not watched):
            return original(keyset, grad_output, input, weight, bias_sizes, *rest)
        with inside():
            if route.plan is not None:
                return route.plan.gradients(grad_output, input, weight)
            stock = partial(original, keyset, grad_output, input, weight, bias_sizes, *rest)
            return _observed(route, input.device, stock)

    return convolution_backward


def _observed(route: Route, device: torch.device, stock: Callable[[], Any]) -> Any:
    """PyTorch's own kernel, with a label for the profiler and a word to everybody who watches."""
    wait = device.type == "cuda" and any(o.synchronize for o in observers)
    label = f"convgrad::{'+'.join(route.outputs)}[aten]"
    with record_function(label) if profiler_enabled() else nullcontext():
        if wait:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        result = stock()
        if wait:
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    event = Event(route.problem, route.outputs, "aten", str(device), "PyTorch's own kernel", (), seconds)
    for observer in tuple(observers):
        observer(event)
    return result


# ---- blocks --------------------------------------------------------------------------------------

_router = _Router()


@contextmanager
def takeover() -> Iterator[None]:
    """Compute every convolution of this process with convgrad while the block lasts; undone exactly when it ends.

    Blocks may be nested and may be open in several threads; the last one to close undoes it. It concerns all threads,
    for PyTorch has one table of kernels. Where PyTorch's own kernel is the best choice it runs, and so it does for what
    convgrad does not compute: quantised, sparse, mkldnn, meta and complex tensors. Not caught: jit-traced models,
    AOTInductor packages and other processes.

    Raises:
        BackendError: at a convolution that a backend asked for by name (`use_backend`) cannot compute.
        ShapeError: at a gradient whose sizes do not belong to input and weight; PyTorch does not look at them.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
        >>> with convgrad.takeover(), convgrad.use_backend("reference"):
        ...     torch.nn.functional.conv2d(x, w).item()
        9.0
    """
    _router.open("ours")
    try:
        yield
    finally:
        _router.close("ours")


@contextmanager
def watch_stock() -> Iterator[None]:
    """Change nothing, but report PyTorch's own convolutions to those who watch, while the block lasts.

    An open `takeover` goes before it.
    """
    _router.open("stock")
    try:
        yield
    finally:
        _router.close("stock")
