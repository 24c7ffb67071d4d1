"""The kernels of PyTorch's own convolution operators, for calls that the compiled table does not have.

``aten::convolution`` and ``aten::convolution_backward`` get kernels while `takeover` or `observe_aten` is open.
``aten::convolution_overrideable`` and its backward, which PyTorch has for backends outside of it and calls on no CPU or
CUDA device, keep theirs: by them a call of this library is recorded by PyTorch's own autograd, and its backward is
known to be this library's. Both pairs of kernels are compiled (``csrc/aten``); a call that is not in the table is
validated, planned, computed and stored by `compute`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import _compat, engine, problem
from ..engine import Plan, Table
from ..errors import BackendError, ConvgradError
from ..problem import Form, Role
from .autograd import with_layout
from .kernels import fake_convolution, fake_convolution_backward

_aten = torch.ops.aten
_lock = _compat.lock_over_forks()
#: The numbers by which the compiled kernels name the operators.
CONVOLUTION, BACKWARD, OVERRIDEABLE, OVERRIDEABLE_BACKWARD = range(4)


def _inside(compute: Callable[..., Any], *arguments: Any) -> Any:
    """Call where convolutions are PyTorch's own and nothing is recorded: in no block, which an interrupt may split."""
    recorded = torch.is_grad_enabled()
    try:
        engine.thread.in_backend = True
        _compat.record(False)
        return compute(*arguments)
    finally:
        engine.thread.in_backend = False  # first: an interrupt may arrive after any call
        _compat.record(recorded)


@_compat.left_by_dynamo
def compute(op: int, key: bytes | None, a: Tensor, b: Tensor, c: Any, *raw: Any) -> Any:
    """Compute one call of an operator; store it in the table if it can be computed without Python from now on.

    ``a``, ``b`` and ``c`` are input, weight and bias; of a backward, grad_output, input and weight. ``raw`` are the
    other arguments, of each backward with ``bias_sizes``. The key is None if the table cannot have it.
    """
    backward, own = op in (BACKWARD, OVERRIDEABLE_BACKWARD), op >= OVERRIDEABLE
    if backward and raw[0] is None and raw[7][2]:  # without bias_sizes an empty batch would end the process
        raw = ([problem.channels_of_output(c.shape, raw[4], raw[6])], *raw[1:])
    watched = engine.observers or _compat.profiler_enabled()
    takes = own or taken_over()
    if not own and (engine.thread.in_backend or not (takes or watched) or _compat.jit_tracing() is not None):
        return original(op, a, b, c, *raw)
    if own:  # its forward ran under no request
        with engine.resume(None):
            plan = _inside(engine.resolve, "convolution_backward" if backward else "convolution", raw, a, b, c)
    else:
        plan = _plan(backward, raw, a, b, c)
    if plan is not None and takes:
        ours = own or not plan.aten
        result = None
        if ours:
            with _compat.without_autocast():  # which is on where a backward pass runs in its block
                result = _inside(plan.gradients if backward else plan.contract, a, b, c)
        if (
            key is not None
            and engine.requested() is None
            and (entry := engine.pack(plan, (a, b, c)))
            and (table := opened())
        ):
            table.store(key, entry)
        if ours:
            return result
    call = partial(original, op, a, b, c, *raw)
    if plan is not None and watched:
        return engine.observed(plan.event("aten", "PyTorch's own kernel"), call)
    return call()


def _plan(backward: bool, raw: Any, a: Tensor, b: Tensor, c: Any) -> Plan | None:
    """Return the plan of a call of PyTorch's operators; None where PyTorch must see the call as it is."""
    name = "convolution_backward" if backward else "convolution"
    found: Any = engine.find(f"aten::{name}", raw, a, b, c, None, True)
    return _inside(_make_plan, found, name, raw, a, b, c) if found.__class__ is tuple else found


def _make_plan(key: Any, name: str, raw: Any, a: Tensor, b: Tensor, c: Any) -> Plan | None:
    """Make the plan of a call and remember it; the shapes of a backward are checked, which PyTorch does not do."""
    plan, since, backward = None, engine.generation[0], name == "convolution_backward"
    input, weight, padding = (b, c, raw[2]) if backward else (a, b, raw[1])
    if len(padding) not in (1, weight.dim() - 2):  # which PyTorch refuses
        return None
    if backward:
        bias_sizes, *arguments, mask = raw
        try:
            geometry = problem.conv_geometry(weight.shape, *arguments)
            problem.check_operands(("grad_output", a), ("input", input), ("weight", weight))
        except ConvgradError:
            return None
        if input.shape[0] == a.shape[0] == 0:  # of an empty batch PyTorch checks nothing
            return None
        sizes = bias_sizes if mask[2] else None  # autograd states the sizes of a missing bias as [0]
        problem.check_backward(a.shape, input.shape, weight.shape, sizes, geometry, mask, as_onednn=True)
        raw, computed = (sizes, *arguments, mask), any(mask) and 0 not in (a.numel(), input.numel())
    else:
        computed = 0 not in input.shape
    if computed and not input.is_complex():
        try:
            plan = engine.make(None, name, raw, a, b, c)
        except BackendError:
            if engine.active() is not None:
                raise
        except ConvgradError:
            if backward:
                raise  # of a forward PyTorch says in its own words what is wrong
    engine.remember(key, plan, since)
    return plan


# ---- aten::convolution and its backward, while a block is open ---------------------------------------------

#: How many blocks are open.
_open = {"takeover": 0, "observe_aten": 0}
#: Whether an interrupt may have left kernels of this library registered.
_left = False
#: Undoes what the first block did.
_undo: Callable[[], object] | None = None
#: By operator and device type, what a call ran before ours.
_originals: dict[tuple[int, str], Callable[..., Any]] = {}
#: Another thread may be about to call a kernel that is being removed, and PyTorch keeps one alive only while it is
#: registered; so the last ones are kept alive here.
_retired: deque[Any] = deque(maxlen=4096)
_NAMES = {CONVOLUTION: "convolution", BACKWARD: "convolution_backward"}


def taken_over() -> int:
    """Return how many `takeover` blocks are open."""
    return _open["takeover"]


def original(op: int, a: Tensor, b: Tensor, c: Any, *raw: Any) -> Any:
    """Call the kernel that was registered before those here: PyTorch's own, or that of other code."""
    call = _originals.get((op, a.device.type))
    if call is None:  # another thread has closed the last block since
        return getattr(_aten, _NAMES[op]).default(a, b, c, *raw)
    return call(torch._C._dispatch_keys(a) & _compat.after_autograd_keys, a, b, c, *raw)


@contextmanager
def exchanged(block: str) -> Generator[None, None, None]:
    """Exchange PyTorch's kernels from the first block that opens until the last one closes."""
    _count(block, 1)
    try:
        yield
    finally:
        _count(block, -1)


def _count(block: str, more: int) -> None:
    global _undo  # noqa: PLW0603
    with _lock:
        if _undo is None:
            _undo = _exchange()
        _open[block] += more
        if block == "takeover" and (table := opened()):
            table.take_over(more)
        if not any(_open.values()):
            _undo()
            _undo = None


def _exchange() -> Callable[[], object]:
    """Replace PyTorch's kernels by those here; return the function that undoes it."""
    global _left  # noqa: PLW0603
    gpu = torch.version.cuda is not None or torch.version.hip is not None
    keys = ("CPU", "CUDA") if gpu else ("CPU",)
    for key in () if _left else keys:
        for op, name in _NAMES.items():
            _originals[op, key.lower()] = torch.library.get_kernel(f"aten::{name}", key).call_boxed
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    others = any(has_kernel("aten::convolution", key) for key in keys) or has_kernel(
        "aten::convolution_backward", "CPU"
    )
    table = opened()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once")  # PyTorch 2.11 for CUDA: a kernel is replaced
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("convolution", _traced, "Tracer", with_keyset=True)
            undo = [library._destroy, _in_python(keys) if table is None else _compiled(table, keys)]
        except BaseException:
            library._destroy()
            _left = True
            raise
    if table is not None:
        table.others_kernels(others)
    _retired.extend(torch.library.get_kernel(f"aten::{name}", key) for name in _NAMES.values() for key in keys)
    _retired.append(torch.library.get_kernel("aten::convolution", _compat.tracer_key))
    return lambda: [each() for each in undo]


def _traced(keyset: Any, *arguments: Any) -> Tensor:
    """Call PyTorch's kernel where `torch.jit.trace` records: of a result of ours it would record the numbers."""
    outer, traced = engine.thread.in_backend, _compat.jit_tracing() is not None
    try:
        engine.thread.in_backend = True
        result = _aten.convolution.default.redispatch(keyset & _compat.after_tracer_keys, *arguments)
    finally:
        engine.thread.in_backend = outer
    if traced and _compat.jit_tracing() is None:
        # The tracer has ended the trace and raised this. The compiled kernel then had the call computed once more.
        raise RuntimeError(
            "Cannot insert a Tensor that requires grad as a constant. Consider making it a parameter or input, or "
            "detaching the gradient"
        )
    return result


def _compiled(table: Table, keys: tuple[str, ...]) -> Callable[[], object]:
    libraries = [table.register(key.encode(), 0) for key in keys]
    return lambda: [table.unregister(library) for library in libraries if library is not None]


def _in_python(keys: tuple[str, ...]) -> Callable[[], object]:
    """Register kernels that compute every call in Python, where there is no compiled library."""
    library = torch.library.Library("aten", "IMPL")

    def kernel(op: int) -> Callable[..., Any]:
        return _compat.left_by_dynamo(lambda keyset, *arguments: compute(op, None, *arguments))

    try:
        for key in keys:
            for op, name in _NAMES.items():
                library.impl(name, kernel(op), key, with_keyset=True)
    except BaseException:
        library._destroy()
        raise
    return library._destroy


# ---- aten::convolution_overrideable and its backward ----------------------------------------------------------


@cache
def opened() -> Table | None:
    """Return the table of calls, opened at the first call, with the operators that record a call of this library."""
    with _compat.loading:
        return _open_table()


@cache  # of the two threads that make the first call, one opens it
def _open_table() -> Table | None:
    table = engine.open_table(compute)
    if table is None:
        return None
    # PyTorch looks an operator up at its first use. A fork in the middle leaves a lock to the child, which waits for
    # ever. No fork begins here, so that the operator of all results is looked up here.
    torch.empty(0).new_empty_strided((0,), (1,))
    gpu = torch.version.cuda is not None and torch.version.hip is None
    for key in ("CPU", "CUDA") if gpu else ("CPU",):
        if table.register(key.encode(), 1) is None:
            return None
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    library.impl("convolution_overrideable", fake_convolution, "Meta")
    batched = torch.ops.convgrad.convolution_backward.default  # of many grad_outputs (``is_grads_batched=True``)
    for backward, key in ((fake_convolution_backward, "Meta"), (batched, "FuncTorchBatched")):
        library.impl("convolution_backward_overrideable", _stating_bias_sizes(backward), key)
    for key in ("AutogradCPU", "AutogradCUDA"):  # a kernel at "Autograd" would yield to PyTorch's composite one
        library.impl("_convolution_double_backward", _double_backward, key)
    return table


_libraries: list[torch.library.Library] = []


def _stating_bias_sizes(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward as it is called without ``bias_sizes``."""

    def call(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> Any:
        sizes = [grad_output.shape[1]] if arguments[-1][2] else None
        return backward(grad_output, input, weight, sizes, *arguments)

    return call


#: The node of PyTorch's autograd that differentiates the backward of a call of this library.
_NODE = "ConvolutionBackwardOverrideableBackward"


def _double_backward(*arguments: Any) -> Any:
    """Return the derivatives of a backward of ours, one pass of the table each: PyTorch's would loop over groups."""
    node = _compat.current_node()
    if node is None or not node.name().startswith(_NODE) or _compat.functorch_active():
        return _aten._convolution_double_backward.default.decompose(*arguments)
    of_input, of_weight, of_bias, grad_output, weight, input, *rest, mask = arguments
    form, g = with_layout(Form(input.shape, weight.shape, tuple(rest)), input, weight), grad_output.conj()
    one = two = three = None
    with engine.resume(None), _compat.without_autocast():  # PyTorch's casts nothing, either
        if mask[0]:
            operands: dict[Role, Tensor] = {"input": input.conj(), "weight": weight.conj()}
            one = problem.tangent(form, "output", operands, {"input": of_input, "weight": of_weight})
        if mask[1] and of_weight is not None:
            two = problem.contract(form, "input", {"output": g, "weight": of_weight})
        if mask[2] and of_input is not None:
            three = problem.contract(form, "weight", {"output": g, "input": of_input})
    if mask[0] and of_bias is not None:
        one = problem.add_bias(torch.zeros_like(grad_output) if one is None else one, of_bias)
    return one, two, three
