"""What a kernel is made of: its code, everything that this code refers to, and the compiled libraries behind it.

`fingerprint` is a digest of all that, under which a verification is remembered: after a change of a helper, of a value
in a closure or of a byte of a library, it is another kernel. `hints` are the numbers in the code, which often are the
limits of the kernel.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..problem import ConvProblem

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.memory_format)
#: Functions behind the objects that decorators of these packages make of them, whose other attributes are caches.
_WRAPPED = ("fn", "py_func", "_init_fn", "__wrapped__")
_WRAPPERS = ("triton", "numba", "torch", "functools")
#: A tensor with more bytes is not looked at.
_MOST_BYTES = 1 << 24
_ENOUGH_HINTS = 40
#: What a class has that says nothing of what it computes.
_ASIDE = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "_abc_impl")
_ASIDE += ("__annotations__", "__annotate_func__", "__annotations_cache__")  # two of them from Python 3.14 on


class _Unknown(Exception):  # noqa: N818
    """An object of which nothing is known but its address."""


def fingerprint(parts: Iterable[Any]) -> str | None:
    """A digest of functions, objects and plain values, equal in another process; None where there is none.

    Equivalent to:
        >>> from functools import partial
        >>> two, too, three = (fingerprint([partial(max, n)]) for n in (2, 2, 3))
        >>> two == too, two == three
        (True, False)
    """
    digest = hashlib.sha256()
    try:
        for token in _Walk().tokens(tuple(parts)):
            digest.update(token if isinstance(token, bytes) else repr(token).encode())
            digest.update(b"\0")
    except (_Unknown, OSError, RecursionError):
        return None
    return digest.hexdigest()


def hints(parts: Iterable[Any]) -> list[Any]:
    """Integers, tuples of integers and problems that the code of functions mentions, in its order.

    Equivalent to:
        >>> from functools import partial
        >>> hints([partial(max, (6, 10), 34)])
        [(6, 10), 6, 10, 34]
    """
    walk = _Walk()
    try:
        for _ in walk.tokens(tuple(parts)):
            pass
    except (_Unknown, OSError, RecursionError):
        pass  # what was met until there will do
    return walk.hints[:_ENOUGH_HINTS]


class _Walk:
    """One walk through everything that some objects refer to."""

    def __init__(self) -> None:
        self.hints: list[Any] = []
        #: id of an object -> how many were met before it, and the object itself: its id belongs to it
        self._met: dict[int, tuple[int, Any]] = {}

    def tokens(self, part: Any) -> Iterator[Any]:
        """Texts and bytes that together say what it is; `_Unknown` is raised where nothing can."""
        if isinstance(part, _PLAIN):
            if type(part) is int:
                self._mentions(part)
            yield part
            return
        if id(part) in self._met:
            yield f"again {self._met[id(part)][0]}"
            return
        self._met[id(part)] = len(self._met), part
        yield type(part).__name__
        if isinstance(part, (tuple, list, set, frozenset, dict)):
            yield len(part)  # so that what follows is told from what belongs to it
        if isinstance(part, (tuple, list)):
            if part and all(type(n) is int for n in part):
                self._mentions(tuple(part))
            yield from self._each(part)
        elif isinstance(part, (set, frozenset)):
            yield from self._each(sorted(part, key=repr))
        elif isinstance(part, dict):
            yield from self._each(n for pair in part.items() for n in pair)
        elif isinstance(part, slice):  # a constant of code, from Python 3.14 on
            yield from self._each((part.start, part.stop, part.step))
        elif isinstance(part, ConvProblem):
            self._mentions(part)
            yield str(part)
        else:
            yield from self._object(part)

    def _each(self, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            yield from self.tokens(part)

    def _mentions(self, hint: Any) -> None:
        if hint not in self.hints:
            self.hints.append(hint)

    def _object(self, part: Any) -> Iterator[Any]:
        if isinstance(part, types.CodeType):
            yield from self._code(part)
        elif isinstance(part, types.FunctionType):
            yield from _library(part) or self._function(part)
        elif isinstance(part, types.MethodType):
            yield from self._each((part.__func__, part.__self__))
        elif isinstance(part, functools.partial):
            yield from self._each((part.func, part.args, part.keywords))
        elif isinstance(part, types.ModuleType):
            yield from _module(part.__name__)
        elif isinstance(part, type):
            yield from _library(part) or self._class(part)
        elif isinstance(part, torch.Tensor):
            yield from _tensor(part)
        elif isinstance(part, ctypes.CDLL):
            yield Path(part._name).read_bytes()
        elif isinstance(part, ctypes._CFuncPtr):  # pyright: ignore[reportAttributeAccessIssue]
            yield getattr(part, "__name__", "")
            yield from self._each((getattr(part, "_objects", None),))
        elif isinstance(part, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            yield from self._operator(part)
        elif isinstance(part, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            yield part.__qualname__
            yield from _module(getattr(part, "__module__", None) or _owner(part))
        else:
            yield from self._instance(part)

    def _code(self, code: types.CodeType) -> Iterator[Any]:
        yield code.co_code
        yield from self._each((code.co_names, code.co_varnames, code.co_consts))
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_SMALL_INT":  # from Python 3.14 on these are not among the constants
                self._mentions(step.argval)

    def _function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from self.tokens(function.__code__)
        cells = [c.cell_contents for c in function.__closure__ or () if c != types.CellType()]
        yield from self._each((function.__defaults__, function.__kwdefaults__, cells))
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):
            yield name
            yield from self.tokens(function.__globals__[name])

    def _class(self, kind: type) -> Iterator[Any]:
        yield kind.__qualname__
        yield from self._each(kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            if name not in _ASIDE:
                yield name
                yield from self.tokens(value)

    def _operator(self, operator: Any) -> Iterator[Any]:
        """An operator of torch.library: the Python function behind it, or every library that was loaded."""
        yield str(operator)
        name = str(operator).removesuffix(".default").replace(".", "::")
        defined = getattr(torch._library.custom_ops, "OPDEFS", {}).get(name)  # pyright: ignore[reportAttributeAccessIssue]
        if defined is not None:
            yield from self.tokens(defined)
        else:
            for library in sorted(torch.ops.loaded_libraries):
                yield Path(library).read_bytes()

    def _instance(self, part: Any) -> Iterator[Any]:
        wrapped = _WRAPPED if type(part).__module__.partition(".")[0] in _WRAPPERS else ()
        inner = next((f for w in wrapped if callable(f := getattr(part, w, None))), None)
        if inner is not None:
            yield from self.tokens(inner)
            return
        if isinstance(part, (staticmethod, classmethod, property)):
            yield from self._each(getattr(part, n, None) for n in ("__func__", "fget", "fset"))
            return
        if not hasattr(part, "__dict__") or type(part).__module__ in ("builtins", "_thread"):
            raise _Unknown
        yield from self.tokens(type(part))
        yield from self.tokens(vars(part))


def _names(code: types.CodeType) -> set[str]:
    """The names that code and the functions in it look up, most of them attributes."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


def _library(part: Any) -> list[Any]:
    """What stands for a function or a class of an installed package: its name and the package's version."""
    module = part.__module__ or ""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    standard = module.partition(".")[0] in sys.stdlib_module_names and module != "__main__"
    if not standard and "site-packages" not in file and not module.startswith("convgrad."):
        return []
    return [part.__qualname__, *_module(module)]


def _module(name: str | None) -> Iterator[Any]:
    """A module by its name and version, one without a version by its file."""
    module = sys.modules.get(name or "")
    if module is None:
        raise _Unknown
    yield name
    package = sys.modules.get((name or "").partition(".")[0])
    if (name or "").partition(".")[0] in sys.stdlib_module_names:
        yield sys.version
    elif hasattr(package, "__version__"):
        yield str(getattr(package, "__version__", ""))
    elif getattr(module, "__file__", None):
        yield Path(module.__file__ or "").read_bytes()


def _owner(part: Any) -> str | None:
    """The module of a builtin that names none itself."""
    owner = getattr(part, "__self__", None) or getattr(part, "__objclass__", None)
    return getattr(owner, "__module__", None) or getattr(type(owner), "__module__", None)


def _tensor(tensor: torch.Tensor) -> Iterator[Any]:
    if tensor.numel() * tensor.element_size() > _MOST_BYTES or tensor.is_meta or tensor.layout is not torch.strided:
        raise _Unknown
    yield from (tuple(tensor.shape), tensor.dtype, str(tensor.device))
    yield bytes(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist())
