"""A digest of what a kernel consists of: its code, what the code refers to, and the compiled libraries that it calls.

A passed check and a measurement are stored under it. After a change of a helper, of a value in a closure or of a
library it is another kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import marshal
import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from .guards import raw_bytes

#: Attributes that hold the function of an object that these packages' decorators return; the others are caches.
_WRAPPED = ("fn", "py_func", "_init_fn", "__wrapped__")
_WRAPPERS = ("triton", "numba", "torch", "functools")
#: Attributes of them that say how it is compiled: numba's options (``fastmath``), Triton's configurations, heuristics.
_HOW = ("targetoptions", "configs", "values")
#: Attributes of a class that say nothing of what it computes.
_ASIDE = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "_abc_impl", "__static_attributes__")
_ASIDE += ("__annotations__", "__annotate_func__", "__annotations_cache__")


def digest(parts: Iterable[Any]) -> str:
    """Return a digest of functions and values, equal in another process; empty if something has no identity."""
    content = hashlib.sha256()
    try:
        _Pickler(SimpleNamespace(write=content.update), protocol=4).dump(tuple(parts))
    except Exception:  # objects that do not pickle raise anything
        return ""
    return content.hexdigest()[:32]


class _Pickler(pickle.Pickler):
    """Pickles functions and classes of the user by what they consist of, those of packages by name and version."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._met: dict[int, tuple[int, Any]] = {}  # id -> number, and the object, which keeps the id its own

    def reducer_override(self, obj: Any) -> Any:
        parts = None if obj is tuple else self._parts(obj)
        if parts is None:
            return NotImplemented
        number, _ = self._met.setdefault(id(obj), (len(self._met), obj))
        return tuple, ((number, *(parts if number == len(self._met) - 1 else ())),)

    def _parts(self, obj: Any) -> tuple[Any, ...] | None:
        if id(obj) in self._met:  # a function that calls itself, a class that names itself
            return ()
        if isinstance(obj, ModuleType):
            return _module(obj.__name__)
        if isinstance(obj, (OpOverload, OpOverloadPacket)):
            return (str(obj), *_operators({*str(obj).split(".")}))
        if isinstance(obj, ctypes.CDLL):
            return (Path(obj._name).read_bytes() if Path(obj._name).is_file() else obj._name,)
        if isinstance(obj, ctypes._CFuncPtr):  # pyright: ignore[reportAttributeAccessIssue]
            return obj.__name__, obj._objects  # the second is its library
        if isinstance(obj, torch.Tensor):
            return tuple(obj.shape), str(obj.dtype), str(obj.device), raw_bytes(obj.detach()).cpu().numpy().tobytes()
        if isinstance(obj, (staticmethod, classmethod)):
            return (obj.__func__,)
        if isinstance(obj, property):
            return obj.fget, obj.fset
        if isinstance(obj, (FunctionType, BuiltinFunctionType, MethodDescriptorType, type)) and (
            known := _library(obj)
        ):
            return obj.__qualname__, *known
        if isinstance(obj, FunctionType):
            cells = [_in_order(c.cell_contents) for c in obj.__closure__ or () if c != CellType()]
            used = [*_used(_names(obj.__code__), obj.__globals__, set())]
            return marshal.dumps(_anywhere(obj.__code__), 2), obj.__defaults__, obj.__kwdefaults__, cells, used
        if isinstance(obj, type):
            return obj.__qualname__, obj.__bases__, sorted((n, v) for n, v in vars(obj).items() if n not in _ASIDE)
        wrapped = _WRAPPED if type(obj).__module__.partition(".")[0] in _WRAPPERS else ()
        inner = next((f for name in wrapped if callable(f := getattr(obj, name, None))), None)
        return None if inner is None else (inner, *(getattr(obj, name, None) for name in _HOW))


def _in_order(value: Any) -> Any:
    """Return a set of names or numbers in an order that is equal in another process; anything else as it is."""
    if isinstance(value, (set, frozenset)):
        with suppress(TypeError):  # its elements have no order
            return type(value).__name__, sorted(value)
    return value


def _anywhere(code: CodeType) -> CodeType:
    """Return code without its place: a notebook's cell is of another file in each session, and lines move."""
    consts = tuple(_anywhere(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=consts)


def _names(code: CodeType) -> set[str]:
    """Return the names that code and the functions in it look up, most of them attributes."""
    return {*code.co_names}.union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _used(names: set[str], namespace: dict[str, Any], met: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values that names have; of a module of the user's also those of the names in it, as of ``module.f``."""
    for name in sorted(names & namespace.keys()):
        yield name, _in_order(value := namespace[name])
        if value is torch.ops or (value is torch and "ops" in names):
            yield "torch.ops", _operators(names)
        elif isinstance(value, ModuleType) and not _packaged(value.__name__) and value.__name__ not in met:
            met.add(value.__name__)
            yield from _used(names, vars(value), met)


def _packaged(name: str) -> bool:
    """Whether a module is of a package, and not the user's."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name.partition(".")[0] in ("convgrad", *sys.stdlib_module_names) or "-packages" in file


def _library(obj: Any) -> tuple[Any, ...]:
    """Return what identifies the module of a function or class of a package; nothing for the user's own."""
    own = isinstance(obj, (FunctionType, type))
    owner = getattr(obj, "__self__", None) or getattr(obj, "__objclass__", None)
    name = obj.__module__ or ("" if own else getattr(owner, "__module__", None) or type(owner).__module__)
    return _module(name) if name in sys.modules and name != "__main__" and (_packaged(name) or not own) else ()


def _module(name: str) -> tuple[Any, ...]:
    """Return the name of a module, its package's version and the bytes of its file; Python's version is known."""
    top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    if top in sys.stdlib_module_names:
        return (name,)
    version = getattr(sys.modules.get(top), "__version__", None)
    return name, str(version), Path(file).read_bytes() if file and Path(file).is_file() else b""


def _operators(names: set[str]) -> list[Any]:
    """Return the Python functions of operators with such names, or the bytes of every library that may have others."""
    defined = getattr(torch._library.custom_ops, "OPDEFS", {})  # pyright: ignore[reportAttributeAccessIssue]
    if found := [op for name, op in sorted(defined.items()) if {*name.split("::")} <= names]:
        return found
    own = (m for name, m in [*sys.modules.items()] if not _packaged(name))
    built = (file for m in own if (file := getattr(m, "__file__", None) or "").endswith(tuple(EXTENSION_SUFFIXES)))
    return [Path(library).read_bytes() for library in sorted({*torch.ops.loaded_libraries, *built})]
