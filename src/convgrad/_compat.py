"""Private and version-dependent PyTorch calls that more than one room needs, or that need a fallback."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor, _prims_common
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import CollectiveError

_C: Any = torch._C
_prims: Any = _prims_common


#: Every lock of `lock_over_forks`, and those that a thread holds for its fork.
_locks: list[Any] = []
_held = threading.local()


def lock_over_forks() -> Any:
    """Return a lock for work that no fork cuts short: a child never waits for a thread that it does not have."""
    lock = threading.RLock()
    _locks.append(lock)
    return lock


def _before_fork() -> None:
    """Acquire all locks, but wait for none while holding another, so that their order does not matter."""
    _held.locks = []
    while len(_held.locks) < len(_locks):
        lock = _locks[len(_held.locks)]
        if lock.acquire(blocking=False):
            _held.locks.append(lock)
        else:
            _after_fork()
            time.sleep(1e-4)


def _after_fork() -> None:
    while _held.locks:
        _held.locks.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

#: Held while something is loaded at its first use: no fork cuts that short.
loading = lock_over_forks()


functorch_active = _C._are_functorch_transforms_active
profiler_enabled: Callable[[], bool] = _C._autograd._profiler_enabled
#: A context manager: a range of the profiler with a name and, unlike `torch.profiler.record_function`, its inputs.
profiler_range: Callable[..., Any] = _C._profiler._RecordFunctionFast
#: False for tensors without memory of their own, plain ones to Python: ``autograd.grad(is_grads_batched=True)`` makes
#: them, and some escape from functorch transforms. Zeros of forward mode and functional tensors have an empty storage.
has_storage: Callable[[Tensor], bool] = _C._has_storage


def saved_tensors_hooks() -> Any:
    """The hooks that see what autograd saves now (`torch.utils.checkpoint` has such), None where there are none."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


#: In which precision a library ("cuda", "mkldnn") computes an operation ("conv", "matmul") of float32. Not
#: `torch.get_float32_matmul_precision`, which raises where one library's was set by itself.
fp32_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter


def precision(library: str, operation: str) -> str:
    """Return `fp32_precision`, with "ieee" where none was chosen."""
    return fp32_precision(library, operation).replace("none", "ieee")


def exact_matmul(library: str = "mkldnn") -> bool:
    """Whether a library computes matrix products of float32 in float32; else it may use fewer bits, and be faster."""
    return precision(library, "matmul") == "ieee"


def cuda_driver() -> int:
    """Return the version of the CUDA driver; 0 where it is not known."""
    ask = getattr(_C, "_cuda_getDriverVersion", None)
    return 0 if ask is None or torch.version.hip is not None else ask()


def suggests_channels_last(t: Tensor) -> bool:
    """Whether strides order a tensor channels_last, as PyTorch reads them: those of dimensions of size 1 count."""
    if type(t) not in (Tensor, torch.nn.Parameter):  # sizes may be symbols; it imports sympy, a third of a second
        return _prims.suggest_memory_format(t) is not torch.contiguous_format
    if t.layout is not torch.strided or t.dim() not in (4, 5) or t.numel() == 0 or t.stride(1) == 0:
        return False
    sizes, strides, least = t.shape, t.stride(), 0
    for d in (1, *range(t.dim() - 1, 1, -1)):  # from the innermost dimension outwards
        if strides[d] < least:
            return False
        least = strides[d] * sizes[d]
    return strides[0] >= least != strides[1]


def suggested_format(t: Tensor) -> torch.memory_format:
    """Return the layout that a tensor's strides mean: channels_last (4-d), channels_last_3d (5-d) or contiguous."""
    return channels_last_of(t.dim() - 2) if suggests_channels_last(t) else torch.contiguous_format


#: The dtype in which sums are kept: float32 for 16 bits, otherwise the same.
accumulate_dtype: Callable[[torch.dtype], torch.dtype] = _prims.get_computation_dtype


def channels_last_of(ndim: int) -> torch.memory_format:
    """Return the channels_last format of a tensor with ``ndim`` spatial dimensions (1-d: contiguous)."""
    return {2: torch.channels_last, 3: torch.channels_last_3d}.get(ndim, torch.contiguous_format)


def usual_strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a new tensor, without PyTorch's own functions, which import sympy for half a second."""
    last = len(shape) - 1
    strides, step = [0] * len(shape), 1
    for dim in (1, *range(last, 1, -1), 0) if channels_last else range(last, -1, -1):
        strides[dim] = step
        step *= shape[dim] if channels_last else max(shape[dim], 1)
    return tuple(strides)


def onednn_limit() -> str:
    """Return the widest instruction set that the user allows oneDNN; empty where none is named."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""


def onednn_has(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions with which oneDNN computes float16 or bfloat16; False without oneDNN."""
    question = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, question)())
    except (AttributeError, RuntimeError):
        return False


@cache
def cpu_lacks(dtype: torch.dtype) -> str:
    """Return the passes that this x86 processor has no 16-bit arithmetic for: "all", "grad_weight" or ""."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return ""
    if dtype is torch.float16 and onednn_has(dtype):
        # With AVX512-FP16 alone oneDNN has no kernel for grad_weight: its reference takes 100 times as long.
        return "" if torch.cpu._is_amx_fp16_supported() else "grad_weight"
    if dtype is torch.bfloat16:
        widest = torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_avx512_bf16_supported()
        return "all" if widest or not onednn_has(dtype) else ""
    return "all" if dtype is torch.float16 else ""


# ---- autograd and dispatch -------------------------------------------------------------------------

#: Whether the running backward pass needs the gradient that flows into a node. It raises RuntimeError where no backward
#: pass runs in this thread, and for a leaf that `torch.autograd.grad` was asked for.
will_engine_execute: Callable[[Any], bool] = _C._will_engine_execute_node
#: The node of autograd that the running backward pass computes now; None outside of one.
current_node: Callable[[], Any] = _C._current_autograd_node
#: The dispatch keys below autograd.
after_autograd_keys: Any = _C._after_autograd_keyset
#: The key of the tracer of `torch.jit.trace`, and those below it.
tracer_key: Any = _C._dispatch_key_parse("Tracer")
after_tracer_keys: Any = _C._dispatch_keyset_full_after(tracer_key)
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
function_modes: Callable[[], int] = _C._len_torch_function_stack
any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
#: A block in which autocast is off on every device; cheaper than ``torch.autocast(device, enabled=False)``, and the
#: casts that the enclosing block remembers stay. Dynamo does not know it.
without_autocast: Callable[[], Any] = _C._DisableAutocast
#: ``torch.set_grad_enabled`` without a block of its own: whether operators are recorded for autograd.
record: Callable[[bool], None] = _C._set_grad_enabled
jit_tracing: Callable[[], Any] = _C._get_tracing_state
fx_tracing: Callable[[], bool] = _symbolic_trace.is_fx_symbolic_tracing


def resolving_lazy_views() -> AbstractContextManager[object]:
    """Return a block in which PyTorch's operators resolve lazily conjugated and negated operands, as in eager mode.

    AOTAutograd runs a compiled graph below the dispatch keys that resolve them. In a custom operator of such a graph
    a product with ``t.conj()`` is one with ``t``.
    """
    excluded = _C._dispatch_tls_local_exclude_set()
    if not excluded.has(_C.DispatchKey.Conjugate):
        return nullcontext()
    for key in (_C.DispatchKey.Conjugate, _C.DispatchKey.Negative):
        excluded = excluded.remove(key)
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)


def left_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, marked so that Dynamo neither compiles nor traces it."""
    frames = _C._dynamo.eval_frame  # `torch.compiler.disable` would import all of Dynamo, which takes a second
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class DispatchMode(TorchDispatchMode):
    """A mode that Dynamo leaves alone. PyTorch's own way to say so imports all of Dynamo, which takes a second."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        left_by_dynamo(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def anything_compiled() -> bool:
    """Whether `torch.compile` was called in this process, since `torch.compiler.reset`."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(map(callable, frames.cached_backends.values()))


def forward_ad_active() -> bool:
    """Whether a `torch.autograd.forward_ad.dual_level` is open."""
    return forward_ad._current_level >= 0


#: A block in a ``jvp`` whose operators the levels of forward mode around it differentiate, as they do PyTorch's own.
#: Without it the derivatives of tangents are lost, silently.
outer_tangents: Callable[[], Any] = partial(forward_ad._set_fwd_grad_enabled, True)


def primal(t: Tensor) -> Tensor:
    """Return an operand that a ``jvp`` has saved, without its tangent at the level of the ``jvp``."""
    return forward_ad.unpack_dual(t).primal


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for callers that have asked for functorch's transforms themselves."""
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None:
        node.apply = function.backward
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def outside_of_transforms() -> Any:
    """Return a block in which no transform of `torch.func` is on: for tensors that none of them knows."""
    if not functorch_active():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def single_level(function: type[torch.autograd.Function]) -> Any:
    """Return an autograd function as one of functorch's own, which alone PyTorch 2.15 applies inside of a transform."""
    methods = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward", "jvp")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), methods)


def is_batched(t: Tensor) -> bool:
    """Whether a `torch.func.vmap` maps over a tensor, at any level; under Dynamo, whether any transform is on."""
    if torch.compiler.is_dynamo_compiling():
        return functorch_active()
    while _C._functorch.is_functorch_wrapped_tensor(t):
        if _C._functorch.is_batchedtensor(t):
            return True
        t = _C._functorch.get_unwrapped(t)
    return False


def device_modes() -> int:
    """Return how many modes of functions only choose the device of new tensors (`torch.set_default_device`)."""
    return sum(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def remove_function_mode(mode: Any) -> None:
    """Leave a mode of functions, also from under others that were entered since."""
    above: list[Any] = []
    while function_modes() and (last := _C._pop_torch_function_stack()) is not mode:
        above.append(last)
    for other in reversed(above):
        _C._push_on_torch_function_stack(other)


def offset_of_tensor() -> int | None:
    """Return where in a tensor's Python object its C++ tensor is, found by its address; None if it is not there."""
    tensor = torch.empty(1)
    capsule = _C._aoti.unsafe_alloc_void_ptr_from_tensor(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    wanted = ctypes.c_void_p.from_address(pointer(capsule, None)).value
    _C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule)  # frees the capsule's memory
    offsets = range(object.__basicsize__, Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p))
    return next((o for o in offsets if ctypes.c_void_p.from_address(id(tensor) + o).value == wanted), None)


# ---- tensor subclasses and symbolic sizes -----------------------------------------------------------


#: Lets C++ code that reads the memory of a tensor without memory raise an error, instead of reading address 0.
refuse_memory: Callable[[Tensor], None] = _C._set_throw_on_mutable_data_ptr


def is_subclass(t: Tensor) -> bool:
    """Whether a tensor is a subclass with a dispatch of its own that is not PyTorch's tracing machinery."""
    kind = type(t)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not _C._disabled_torch_dispatch_impl and not kind.__module__.startswith("torch._subclasses")


_OF_TENSOR = Tensor.__torch_function__.__func__  # pyright: ignore[reportFunctionMemberAccess]


def overrides_functions(*tensors: Tensor | None) -> bool:
    """Whether one is of a class that computes PyTorch's functions by a ``__torch_function__`` of its own."""
    own = [type(t).__torch_function__ for t in tensors if t is not None]
    off = _C._disabled_torch_function_impl
    return any(f is not off and getattr(f, "__func__", None) is not _OF_TENSOR for f in own)


def hint_of(n: Any) -> int | None:
    """The value that a symbolic integer has in this trace; a plain integer itself; None where none is known."""
    if isinstance(n, torch.SymInt):
        hint = n.node.hint
        return None if hint is None else int(hint)
    return n


# ---- collectives ----------------------------------------------------------------------------------


def all_to_all(rows: Tensor, received: list[int], sent: list[int], group: Any, what: str) -> Tensor:
    """Send the first ``sent[0]`` rows to the first process of a group, and so on; the rows that arrive, by sender.

    A functional collective, which the compiler traces. Bytes travel, so rows may be of any dtype.
    """
    from torch.distributed._functional_collectives import all_to_all_single

    shape = rows.shape[1:]
    data = rows.resolve_conj().resolve_neg().reshape(len(rows), shape.numel()).contiguous().view(torch.uint8)
    arrived = wait(all_to_all_single(data, received, sent, group), what)
    return arrived.view(rows.dtype).reshape(len(arrived), *shape)


def wait(t: Tensor, what: str) -> Tensor:
    """Return the result of a functional collective, with errors as in `named`; return any other tensor unchanged."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if not isinstance(t, AsyncCollectiveTensor):
        return t
    with named(what):
        return t.wait()


@contextmanager
def named(what: str) -> Generator[None, None, None]:
    """Raise errors of this block as a `CollectiveError` that names the collective: another process died or was late."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(f"{what} failed, as another process died or did not answer in time: {error}") from error


def compile_in_this_thread() -> None:
    """Let Inductor compile without its pool of threads: a forked process does not have it, and would wait for ever."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = 1


# ---- Python ----------------------------------------------------------------------------------------


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory: on a device, or on the CPU, where PyTorch and oneDNN have no class for it."""
    said = str(error)
    on_cpu = "DefaultCPUAllocator" in said or said == "could not create a primitive"
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None where there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


#: How the files of this library and of PyTorch begin; not those of their neighbors, such as torchvision.
LIBRARIES = tuple(os.path.join(Path(file).parent, "") for file in (__file__, torch.__file__))


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the nearest line outside of this library and of PyTorch, as Python 3.12's ``skip_file_prefixes`` does."""
    files = [summary.filename for summary in reversed(extract_stack())]  # this function's first
    level = next((n for n, file in enumerate(files, 1) if not file.startswith(LIBRARIES)), len(files))
    warnings.warn(text, category, stacklevel=level)


# ---- the processor --------------------------------------------------------------------------------

#: Whether this processor has AVX2, AVX-512, and AMX.
avx2_here: Callable[[], bool] = torch.cpu._is_avx2_supported
avx512_here: Callable[[], bool] = torch.cpu._is_avx512_supported
amx_here: Callable[[], bool] = torch.cpu._is_amx_tile_supported
