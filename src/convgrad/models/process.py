"""`takeover`: every convolution of the process through convgrad, for as long as a block lasts.

The kernels of aten::convolution and aten::convolution_backward are exchanged at the dispatch keys of the devices, below
autograd, autocast, functorch and every mode. So whatever ends in these two operators is caught: modules, functional
calls, transposed convolutions, double backward, scripted models, compiled code.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat import (
    cpu_convolution,
    function_modes,
    jit_tracing,
    left_by_dynamo,
    lock_over_forks,
    profiler_enabled,
    record,
    without_autocast,
)
from ..engine import Plan, active, find, generation, make, observed, observers, remember, thread
from ..errors import BackendError, ConvgradError
from ..shapes import channels_of_output, conv_geometry
from ..validation import check_backward, check_operands

_lock = lock_over_forks()
#: How many blocks are open.
_open = {"takeover": 0, "observe_aten": 0}
_library: torch.library.Library | None = None


@contextmanager
def _exchanged(block: str) -> Generator[None, None, None]:
    """PyTorch's kernels are exchanged from the first block that opens until the last one closes."""
    _count(block, 1)
    try:
        yield
    finally:
        _count(block, -1)


def _count(block: str, more: int) -> None:
    global _library  # noqa: PLW0603
    with _lock:
        if _library is None:
            _library = _exchange()
        _open[block] += more
        if not any(_open.values()):
            _library._destroy()
            _library = None


def _exchange() -> torch.library.Library:
    """Put our kernels in the place of PyTorch's, until what is returned is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    try:
        gpu = torch.version.cuda is not None or torch.version.hip is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once")  # PyTorch 2.11 for CUDA: a kernel is replaced
            for key in ("CPU", "CUDA") if gpu else ("CPU",):
                for op in ("convolution", "convolution_backward"):
                    kernel = _kernel(op, torch.library.get_kernel(f"aten::{op}", key).call_boxed)
                    library.impl(op, kernel, key, with_keyset=True)
                    _retired.append((torch.library.get_kernel(f"aten::{op}", key), kernel))
    except BaseException:
        library._destroy()
        raise
    return library


#: Another thread may be about to call a kernel that is being removed, and PyTorch keeps one alive only while it is
#: registered; so the last ones are kept alive here.
_retired: deque[Any] = deque(maxlen=4096)


# ---- the kernels ---------------------------------------------------------------------------------


def _inside(compute: Callable[..., Any], *arguments: Any) -> Any:
    """Call where convolutions are PyTorch's own, and nothing is recorded for autograd, which lies above.

    This is no context manager: an interrupt that arrives where its methods begin would leave gradients off for good.
    """
    recorded = torch.is_grad_enabled()
    try:
        thread.in_backend = True
        record(False)
        return compute(*arguments)
    finally:
        thread.in_backend = False  # first: an interrupt may arrive behind a call
        record(recorded)


def _kernel(op: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for aten::convolution or aten::convolution_backward: every call of PyTorch's passes through here."""
    backward = op == "convolution_backward"
    name, plan_of = f"aten::{op}", _plan_backward if backward else _plan_forward
    short = None if backward else cpu_convolution()  # computes what the original does on a CPU, and starts faster

    @left_by_dynamo
    def kernel(keyset: Any, a: Tensor, b: Tensor, c: Any, *raw: Any) -> Any:
        """Of a forward, a to c are input, weight and bias; of a backward, grad_output, input and weight."""
        if backward and raw[0] is None and raw[7][2]:  # without bias_sizes an empty batch would end the process
            raw = ([channels_of_output(c.shape, raw[4], raw[6])], *raw[1:])
        watched = observers or profiler_enabled()
        if thread.in_backend or not (_open["takeover"] or watched) or jit_tracing() is not None:
            return original(keyset, a, b, c, *raw)
        plan: Any = find(name, raw, a, b, c, None, True)
        if plan.__class__ is tuple:
            plan = _inside(plan_of, plan, raw, a, b, c)
        if plan is not None and _open["takeover"] and not plan.aten:
            with without_autocast():  # which is on where a backward pass runs in its block
                return _inside(plan.gradients if backward else plan.contract, a, b, c)
        if plan is not None and watched:
            call = partial(original, keyset, a, b, c, *raw)
            return observed(plan.problem, plan.outputs, "aten", plan.device, "PyTorch's own kernel", call)
        if short is None or not a.is_cpu or function_modes():  # those see what is called from Python
            return original(keyset, a, b, c, *raw)
        return short(a, b, c, *raw, False, False, False, False)

    return kernel


def _plan_forward(key: Any, raw: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Plan | None:
    """The plan of a call, remembered under its key; None where PyTorch must see the call as it is."""
    plan, since = None, generation[0]
    if len(raw[1]) in (1, weight.dim() - 2) and 0 not in input.shape and not input.is_complex():
        try:
            plan = make(None, "convolution", raw, input, weight, bias)
        except BackendError:
            if active() is not None:
                raise
        except ConvgradError:  # PyTorch says in its own words what is wrong
            pass
    remember(key, plan, since)
    return plan


def _plan_backward(key: Any, raw: Any, grad_output: Tensor, input: Tensor, weight: Tensor) -> Plan | None:
    """The same for a backward, whose shapes are checked: PyTorch's own kernel reads memory without."""
    bias_sizes, *arguments, mask = raw
    plan, since = None, generation[0]
    try:
        if len(arguments[1]) not in (1, weight.dim() - 2):
            raise ConvgradError("PyTorch knows no padding whose low and high sides differ")
        geometry = conv_geometry(weight.shape, *arguments)
        check_operands(("grad_output", grad_output), ("input", input), ("weight", weight))
    except ConvgradError:
        return None
    if input.shape[0] == grad_output.shape[0] == 0:  # of an empty batch PyTorch checks nothing
        return None
    sizes = bias_sizes if mask[2] else None  # autograd states the sizes of a missing bias as [0]
    check_backward(grad_output.shape, input.shape, weight.shape, sizes, geometry, mask, as_onednn=True)
    if 0 not in (grad_output.numel(), input.numel()) and any(mask) and not input.is_complex():
        try:
            plan = make(None, "convolution_backward", (sizes, *arguments, mask), grad_output, input, weight)
        except BackendError:
            if active() is not None:
                raise
    remember(key, plan, since)
    return plan


# ---- blocks --------------------------------------------------------------------------------------


@contextmanager
def takeover() -> Iterator[None]:
    """Compute every convolution of this process with convgrad inside this block; its end undoes it exactly.

    It affects all threads, because PyTorch has one table of kernels. Blocks may be nested and open in several threads;
    the last one to close undoes it. PyTorch's own kernel runs where it is the best choice, and for what convgrad does
    not compute: quantized, sparse, mkldnn, meta and complex tensors. Not covered: jit-traced models, AOTInductor
    packages and other processes.

    Raises:
        BackendError: a requested backend (`use_backend`) cannot compute a convolution.
        ShapeError: the sizes of a gradient do not belong to input and weight, which PyTorch does not check.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
        >>> with convgrad.takeover(), convgrad.use_backend("reference"):
        ...     torch.nn.functional.conv2d(x, w).item()
        9.0
    """
    with _exchanged("takeover"):
        yield


@contextmanager
def observe_aten() -> Iterator[None]:
    """Report PyTorch's own convolutions to `convgrad.trace` and `Usage` inside this block, and change nothing.

    An open `takeover` takes precedence.
    """
    with _exchanged("observe_aten"):
        yield
