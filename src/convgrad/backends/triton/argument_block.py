"""The launches of a call, as bytes that ``csrc/aten/cuda_launch.cpp`` reads, without Triton and Python.

Triton compiles a kernel, loads it and launches it the first time. From then on a call with the same key needs the
function's handle, the grid, and an argument block that differs only in the addresses of its tensors. Kernels that need
more than that (clusters, cooperative launches, memory that Triton allocates), a profiler's hooks on Triton's launcher,
and GPUs that are not NVIDIA's have no entry: Triton's launcher starts them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from ..._compat import usual_strides
from ...problem import Output
from .. import _native_library
from . import LAUNCH_BYTES
from .launch import Bound, Selected

#: Operands and results; scratch buffers follow.
SLOTS = _native_library.TENSORS
LIBRARY = "libcuda.so.1"

_MOST_PARAMETERS = 24
_HEAD = Struct("2Q8I")  # CudaLaunch up to its parameters
_PARAMETER = Struct("i2HQ")  # CudaParameter
#: Bytes of one ``CudaLaunch``.
SIZE = _HEAD.size + _MOST_PARAMETERS * _PARAMETER.size
assert SIZE == LAUNCH_BYTES
_FUNCTIONS = ("cuLaunchKernel", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
#: Triton launches a kernel with more shared memory with an attribute that says so.
_MOST_SHARED = 228 * 1024
#: Attributes of a launch, and memory that Triton allocates.
_UNUSUAL = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8}


class Entry(NamedTuple):
    """The launches that compute some outputs of a problem: for operands of the same shapes, strides, dtypes, device and
    alignment to 16 bytes.
    """

    #: ``CudaLaunch``, one after the other.
    launches: bytes
    #: Bytes of each scratch buffer that the caller allocates, in the order of their slots.
    scratch: tuple[int, ...]
    #: The shape and strides of each result that the caller allocates, all of the operands' dtype.
    results: dict[Output, tuple[tuple[int, ...], tuple[int, ...]]]


def entry(made: Bound, operands: Mapping[str, Tensor]) -> Entry | None:
    """Return the entry of a call that was made before, with its results checked; None where there can be none.

    ``operands`` are those of the call's outputs, by the names of `SLOTS`, and no other.
    """
    p, layout = made.problem, made.layout
    if layout != p.memory_format and made.outputs != ("grad_weight",):
        return None  # a result is copied
    for name, t in operands.items():
        dense = t.is_contiguous(memory_format=torch.contiguous_format if name in ("weight", "bias") else layout)
        if not dense or t.is_neg():
            return None  # an operand is copied
    device = next(iter(operands.values())).device
    context = _context(device)
    if context is None:
        return None
    results: dict[Output, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for output in made.outputs:
        shape = p.result_shape(output)
        results[output] = shape, usual_strides(shape, p.channels_last and output in ("forward", "grad_input"))
    aligned = {name: t.data_ptr() % 16 == 0 for name, t in operands.items()}

    def is_aligned(place: str, begin: int) -> bool:  # PyTorch's allocator aligns what it returns
        return aligned.get(place, True) and begin % 16 == 0

    steps = made.selected(device, operands, is_aligned)
    if steps is None:
        return None
    launches = b""
    for selected, places in steps.launches:
        pointers: list[tuple[int, int, int]] = []
        for place in places.values():
            slot = SLOTS.index(place) if place in SLOTS else len(SLOTS)
            begin = steps.bias_part if place == "bias scratch" else 0
            pointers.append((slot, begin, 16 if is_aligned(place, begin) else 1))
        one = packed(selected, pointers, context)
        if one is None:
            return None
        launches += one
    return Entry(launches, (steps.scratch,) if steps.scratch else (), results)


def packed(selected: Selected, pointers: list[tuple[int, int, int]], context: int) -> bytes | None:
    """Return a launch as a ``CudaLaunch``; None if Triton's launcher does more than to pass the arguments.

    ``pointers`` are the slots of the launch's tensors, an offset in bytes, and the alignment.
    """
    kernel = selected.compiled
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)  # of profilers: one, or a chain of some
    plain = (
        kernel.metadata.target.backend == "cuda"
        and kernel.metadata.num_ctas == 1
        and kernel.metadata.shared <= _MOST_SHARED
        and not any(getattr(kernel.metadata, name, 0) for name in _UNUSUAL)
    )
    if not plain or any(getattr(hook, "calls", hook) for hook in hooks):
        return None
    types = [t for t in kernel.src.signature.values() if t != "constexpr"]
    values: list[tuple[int, int, int]] = [pointers[i] for i in selected.taken]
    names = list(kernel.src.signature)[len(values) :]
    others = zip(names, selected.others, strict=True)
    values += [(-1, value, 1) for name, value in others if kernel.src.signature[name] != "constexpr"]
    sizes = [8 if str(t).startswith("*") else _SIZES.get(str(t), 0) for t in types]
    expected = _expected(kernel.asm["ptx"], kernel.metadata.name, 32 * kernel.metadata.num_warps)
    # What the kernel takes beyond its own: addresses of memory that it does not use.
    more = [] if expected is None else expected[len(sizes) :]
    if expected is None or sizes != expected[: len(sizes)] or more != [8] * len(more) or len(more) > 2:
        return None
    values += [(-1, 0, 1)] * len(more)
    if len(values) > _MOST_PARAMETERS:
        return None
    head = (kernel.function, context, selected.programs, 1, 1, 32 * kernel.metadata.num_warps, 1, 1)
    block = _HEAD.pack(*head, kernel.metadata.shared, len(values))
    for (slot, value, alignment), size in zip(values, expected, strict=True):
        block += _PARAMETER.pack(slot, size, alignment, value % (1 << 8 * size))
    _pinned[kernel.function] = kernel
    return block.ljust(SIZE, b"\0")


#: Kernels of entries by their handles: they stay loaded, for entries are plain bytes.
_pinned: dict[int, Any] = {}


def _expected(ptx: str, name: str, threads: int) -> list[int] | None:
    """Return the sizes of a kernel's parameters as it was compiled; None for other kinds, or another block size."""
    found = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)([^{{]*)", ptx)
    if found is None:
        return None
    parameters, directives = found.groups()
    sizes = [int(bits) // 8 for bits in re.findall(r"\.param\s+\.[busf](8|16|32|64)\b", parameters)]
    block = re.search(r"\.reqntid\s+(\d+)", directives)
    if block is None or int(block[1]) != threads or len(sizes) != parameters.count(".param "):
        return None
    return sizes


# ---- the driver --------------------------------------------------------------------------------------


@cache
def _driver(library: str) -> ctypes.CDLL | None:
    """Hand the functions of a driver's library to the compiled launcher; None where one of the two is not there."""
    native = _native_library.load()
    if native is None or not hasattr(native, "convgrad_cuda_driver"):
        return None
    try:
        driver = ctypes.CDLL(library)
        addresses = [ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except (OSError, AttributeError):
        return None
    functions = (ctypes.c_void_p * len(addresses))(*addresses)
    _given.append(functions)
    native.convgrad_cuda_driver(functions)
    return driver


#: Structures that the compiled launcher reads at each launch.
_given: list[Any] = []


def _context(device: torch.device) -> int | None:
    """Return the driver's context in which PyTorch uses a device; None without the driver, or before its first use."""
    driver = _driver(LIBRARY)
    if driver is None:
        return None
    context = ctypes.c_void_p()
    with torch.accelerator.device_index(device.index):
        failed = driver.cuCtxGetCurrent(ctypes.byref(context))
    return None if failed else context.value
