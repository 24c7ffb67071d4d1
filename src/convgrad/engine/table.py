"""The compiled table of calls (``csrc/aten``): what may be stored in it, and when it is emptied.

A call that is in the table is computed without Python. `pack` turns a plan into an entry, if everything that it does
can be done there: by the compiled CPU kernels, or by PyTorch's own operator. Without the compiled library, and with a
PyTorch that lacks a function that it needs, there is no table, and every call is computed in Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._compat import offset_of_tensor, usual_strides
from ..backends import (
    LAUNCH_BYTES,
    TritonBackend,
    native_library,
    native_plan,
    operand_format,
    reads_odd_strides,
    runs_as_stated,
)
from ..problem import ConvProblem, Outputs, gradient_outputs
from ..settings import on_change
from .steps import SLOTS, Step, is_prepared, slots_of

if TYPE_CHECKING:
    from .plan import Plan

#: ``Step`` and ``Entry`` of ``csrc/aten/convolution.cpp``.
_PYTORCH, _NATIVE, _SUM_OF_BIAS, _CUDA = range(4)
_MOST_RANK = 5
_MOST_LAUNCHES = 3
_pack_step = Struct("2i1536s").pack
_pack_launches = Struct(f"2i{_MOST_LAUNCHES}q").pack
_SHAPES = 3 * (1 + 2 * _MOST_RANK)  # a rank, a shape and strides for each result
_pack_entry = Struct(f"4i{_SHAPES}q").pack


class Table:
    """The functions of the compiled library, and the one that computes a call from Python."""

    def __init__(self, library: ctypes.PyDLL, call: Any) -> None:
        self.call: Callable[..., Any] = call
        self.clear: Callable[[], None] = library.convgrad_aten_clear
        self.size: Callable[[], int] = library.convgrad_aten_size
        self.tell: Callable[[int], None] = library.convgrad_aten_told
        self.take_over: Callable[[int], None] = library.convgrad_aten_taken_over
        self.others_kernels: Callable[[int], None] = library.convgrad_aten_others_kernels
        self.inside: Callable[[bool], None] = library.convgrad_aten_inside
        self.register: Callable[[bytes, int], int | None] = library.convgrad_aten_register
        self.unregister: Callable[[int], int] = library.convgrad_aten_unregister
        self._store: Callable[..., None] = library.convgrad_aten_store
        library.convgrad_aten_size.restype = ctypes.c_int64
        library.convgrad_aten_register.restype = ctypes.c_void_p
        library.convgrad_aten_unregister.argtypes = (ctypes.c_void_p,)
        library.convgrad_aten_store.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)

    def store(self, key: bytes, entry: bytes) -> None:
        """Store an entry under the key that the library gave for a call; nothing if the table was emptied since."""
        self._store(key, len(key), entry, len(entry))


#: The table, once `open_table` has made it.
_opened: Table | None = None
#: How many observers and requests there were before the table was opened.
_told = 0


def tell(more: int) -> None:
    """Count who must be told of every call, so that none is computed without Python: one more, or one less."""
    global _told  # noqa: PLW0603
    _told += more
    if _opened is not None:
        _opened.tell(more)


def clear() -> None:
    """Empty the table: a choice may have changed."""
    if _opened is not None:
        _opened.clear()


on_change.append(clear)


def inside(value: bool) -> None:
    """Tell the table whether PyTorch's convolutions in this thread are PyTorch's own from now on."""
    if _opened is not None:
        _opened.inside(value)


@functools.cache
def open_table(compute: Callable[..., Any]) -> Table | None:
    """Open the table; None if there is no compiled library, or PyTorch lacks a function that it needs.

    Args:
        compute: computes what is not in the table, ``compute(op, key, *arguments of the operator)``.
    """
    global _opened  # noqa: PLW0603
    if native_library.load() is None:
        return None
    library = ctypes.PyDLL(str(native_library.library_path()))
    addresses = _addresses(library)
    offset = offset_of_tensor()
    if addresses is None or offset is None:
        return None
    library.convgrad_aten_open.restype = ctypes.py_object
    library.convgrad_aten_open.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.py_object)
    opened = Table(library, library.convgrad_aten_open(addresses, offset, compute))
    opened.tell(_told)
    _opened = opened
    return opened


def _addresses(library: ctypes.PyDLL) -> bytes | None:
    """Return the addresses of the functions that the library needs, in its order; None if one is missing."""
    library.convgrad_aten_names.restype = ctypes.c_char_p
    names, folder = ("torch_cpu", "torch_python", "torch_cuda", "torch_hip"), Path(torch.__file__).parent / "lib"
    paths = [path for name in names for suffix in ("so", "dylib") if (path := folder / f"lib{name}.{suffix}").exists()]
    places: list[Any] = [ctypes.pythonapi, *map(ctypes.CDLL, map(str, paths))]
    addresses = []
    for name in library.convgrad_aten_names().decode().split():
        found = next((getattr(place, name) for place in places if hasattr(place, name)), None)
        if found is None and "_cuda_" not in name:
            return None
        addresses.append(0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0)
    return Struct(f"{len(addresses)}P").pack(*addresses)


# ---- entries -----------------------------------------------------------------------------------------


def pack(plan: Plan, operands: tuple[Tensor | None, ...], pytorchs_autograd: bool = False) -> bytes | None:
    """Return the entry of a plan that has just computed a call, or None if Python is needed for it.

    Args:
        operands: of the call: input, weight and bias, or grad_output, input and weight.
        pytorchs_autograd: PyTorch's own call, recorded by its own autograd, does all that the plan does.
    """
    problem = plan.problem
    if plan.aten:
        return _pack_entry(0, pytorchs_autograd, 0, False, *(0,) * _SHAPES)
    if plan.unsettled or problem.empty or problem.padding_mode != "zeros":
        return None
    backward = plan.outputs != (problem.bias_pass,)
    results = gradient_outputs(problem.transposed) if backward else (problem.bias_pass,)
    given = dict(zip(_names(problem, backward), operands, strict=True))
    copied = _copied(plan, given)
    if copied is None:
        return None
    steps = [_pack_one(problem, step, results, given) for step in plan.steps]
    yielded = {output for step in plan.steps for output in step.outputs}
    rest = [output for output in plan.outputs if output not in yielded]
    if rest:
        a_sum = rest == ["grad_bias"] and problem.shape_of(problem.bias_slot)[1] > 0
        steps.append(_pack_step(_SUM_OF_BIAS, 4, b"") if a_sum else None)
    packed = [step for step in steps if step is not None]
    if len(packed) < len(steps):
        return None
    shapes = []
    for output in results:
        shape = problem.result_shape(output)
        strides = usual_strides(shape, problem.channels_last) if output != "grad_bias" else (1,)
        fill = (0,) * (_MOST_RANK - len(shape))
        shapes += [len(shape), *shape, *fill, *strides, *fill]
    shapes += [0] * (_SHAPES - len(shapes))
    return _pack_entry(len(steps), pytorchs_autograd, copied, problem.channels_last, *shapes) + b"".join(packed)


def _names(problem: ConvProblem, backward: bool) -> tuple[str, str, str]:
    """Return what the operands of a call are in the plain problem."""
    if backward:
        return ("input", "grad_output", "weight") if problem.transposed else ("grad_output", "input", "weight")
    return ("grad_output" if problem.transposed else "input", "weight", "bias")


def _pack_one(problem: ConvProblem, step: Step, results: Outputs, given: dict[str, Tensor | None]) -> bytes | None:
    """Return one step of a plan as the compiled code reads it; None if it needs Python."""
    backend, bias = step.backend, given.get("bias")
    places = sum(1 << results.index(output) for output in step.outputs)
    if backend.name == "aten":
        _, *input_and_weight = given.values()
        backward = "bias" not in given
        as_they_are = backward and runs_as_stated(problem) and not reads_odd_strides(problem, *input_and_weight)  # pyright: ignore[reportArgumentType]
        return _pack_step(_PYTORCH, places, b"") if as_they_are else None
    if isinstance(backend, TritonBackend):
        read = {*_reads(step), "bias"}
        launched = backend.entry(problem, step.outputs, {n: t for n, t in given.items() if t is not None and n in read})
        if launched is None or len(launched.scratch) > 1:
            return None
        count = len(launched.launches) // LAUNCH_BYTES
        unusual = any(
            output != "grad_bias" and strides != usual_strides(shape, problem.channels_last)
            for output, (shape, strides) in launched.results.items()
        )
        if count > _MOST_LAUNCHES or unusual:
            return None
        scratch = (*launched.scratch, *(0,) * (_MOST_LAUNCHES - len(launched.scratch)))
        head = _pack_launches(count, len(launched.scratch), *scratch)
        return _pack_step(_CUDA, places, head + launched.launches)
    native = native_plan(backend, problem, step.outputs)
    return None if native is None or not (bias is None or bias.is_contiguous()) else _pack_step(_NATIVE, places, native)


def _reads(step: Step) -> list[str]:
    """Return the names of the operands that a step reads, but for a bias."""
    return [SLOTS[i] for i in slots_of(step.outputs)]


def _copied(plan: Plan, given: dict[str, Tensor | None]) -> int | None:
    """Return which operands the CPU kernels read as dense copies, a bit each; None if Python must make the copies."""
    problem, copied = plan.problem, 0
    steps = [s for s in plan.steps if s.backend.name != "aten" and not isinstance(s.backend, TritonBackend)]
    for i, (name, t) in enumerate(given.items()):
        readers = [s.backend for s in steps if name in _reads(s)]
        if t is None or all(is_prepared(backend, problem, t) for backend in readers):
            continue
        layouts = {operand_format(backend, problem) for backend in readers}
        if layouts != {problem.memory_format} or t.is_conj() or t.is_neg():
            return None
        copied |= 1 << i
    return copied
