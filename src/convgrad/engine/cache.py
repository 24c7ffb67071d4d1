"""Calls that were seen before: their plans, and the compiled table (``csrc/aten``), by which a call needs no Python.

Both are bounded, and emptied whenever choices may change. Without the compiled library, and with a PyTorch that lacks a
function that it needs, there is no table, and every call is computed in Python.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any

import torch

from .._compat import offset_of_tensor
from ..backends import native_library
from ..settings import capturing, on_change

_MOST = 4096

#: Everything that a call's meaning and choice depend on -> its plan; see `calls.find`.
plans: dict[Any, Any] = {}
#: How often the plans were forgotten; a plan that was kept elsewhere has its own number, `Plan.generation`.
generation: list[int] = [0]


def remember(key: Any, plan: Any, since: int) -> None:
    """Keep a plan, unless plans were forgotten ``since`` its making began; where there are too many, all others go."""
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = plan
    if generation[0] != since:
        plans.pop(key, None)


def invalidate() -> None:
    """Forget all plans and entries: a backend came or went, or the default changed, so every choice is made again."""
    generation[0] += 1
    plans.clear()
    clear_table()


# ---- the compiled table ----------------------------------------------------------------------------------


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
        """Store an entry under the key that the library gave for a call; nothing if the table was emptied since.

        Nothing within a capture either: the key is that of a call after it, which may be timed, and this one was not.
        """
        if not capturing():
            self._store(key, len(key), entry, len(entry))


#: The table, once `open_table` has made it.
_opened: Table | None = None
#: How many observers and requests there are: what the table is told when it is opened.
_told = 0


def tell(more: int) -> None:
    """Count observers and requests, while which no call is computed without Python: one more, or one less."""
    global _told  # noqa: PLW0603
    _told += more
    if _opened is not None:
        _opened.tell(more)


def clear_table() -> None:
    """Empty the table: a choice may have changed."""
    if _opened is not None:
        _opened.clear()


on_change.append(clear_table)


def inside(value: bool) -> None:
    """Tell the table whether PyTorch's convolutions in this thread are PyTorch's own from now on."""
    if _opened is not None:
        _opened.inside(value)


@functools.cache
def open_table(compute: Callable[..., Any]) -> Table | None:
    """Open the table; ``compute`` computes what is not in it. None without the library, or what it needs of PyTorch."""
    global _opened  # noqa: PLW0603
    if native_library.load() is None:
        return None
    library = ctypes.PyDLL(str(native_library.library_path()))
    library.convgrad_aten_names.restype = ctypes.c_char_p
    names, folder = ("torch_cpu", "torch_python", "torch_cuda", "torch_hip"), Path(torch.__file__).parent / "lib"
    paths = [path for name in names for suffix in ("so", "dylib") if (path := folder / f"lib{name}.{suffix}").exists()]
    places: list[Any] = [ctypes.pythonapi, *map(ctypes.CDLL, map(str, paths))]
    found: list[int] = []  # the addresses of the functions that the library needs, in its order
    for name in library.convgrad_aten_names().decode().split():
        function = next((getattr(place, name) for place in places if hasattr(place, name)), None)
        if function is None and "_cuda_" not in name:
            return None
        found.append(0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0)
    addresses, offset = Struct(f"{len(found)}P").pack(*found), offset_of_tensor()
    if offset is None:
        return None
    library.convgrad_aten_open.restype = ctypes.py_object
    library.convgrad_aten_open.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.py_object)
    opened = Table(library, library.convgrad_aten_open(addresses, offset, compute))
    opened.tell(_told)
    _opened = opened
    return opened
