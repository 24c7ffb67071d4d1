"""Loads the compiled CPU kernels and gives their C interface to Python; knows nothing of tensors or backends."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from .._compat import warn_user

#: The number that ``csrc/convgrad_native.h`` must carry.
ABI = 13
#: ``CONVGRAD_PLAN_BYTES``.
_PLAN_BYTES = 1536

# The structures of the header, as packed bytes: filling a `ctypes.Structure` costs five times as much.

#: ``convgrad_problem``.
pack_problem = struct.Struct("22q5i0q").pack

#: The order of ``convgrad_tensors``.
TENSORS = ("input", "weight", "grad_output", "bias", "forward", "grad_input", "grad_weight", "grad_bias")

#: ``convgrad_norm``.
pack_norm = struct.Struct("3q2d5i11P").pack


def packer(*tensors: str) -> Callable[..., bytes]:
    """Return the function that packs the addresses of these tensors, in their order, with 0 for all others."""
    return struct.Struct("".join("P" if name in tensors else "8x" for name in TENSORS)).pack


def library_path() -> Path:
    """Return the path at which the build puts the compiled library."""
    return Path(__file__).with_name("libconvgrad_native.so")


@functools.cache
def _try_load() -> tuple[ctypes.CDLL | None, str]:
    path = library_path()
    if not path.exists():
        try:  # the build writes beside the library's place why there is none
            said = f"{path.with_suffix('.txt').read_text(encoding='utf-8').strip()} when convgrad was built"
        except OSError:
            said = f"there is no {path}"
        return None, (
            f"the compiled CPU kernels are not installed ({said}); install g++ or clang++ and then "
            "convgrad again (in its checkout: `pip install --force-reinstall --no-deps .`)"
        )
    try:
        library = ctypes.CDLL(str(path))
        found = library.convgrad_abi()
    except (OSError, AttributeError) as error:
        return None, f"the compiled CPU kernels cannot be loaded: {error}"
    if found != ABI:
        return None, f"the compiled CPU kernels have interface {found}, this package needs {ABI}; reinstall convgrad"
    library.convgrad_instruction_set.restype = library.convgrad_plan_name.restype = ctypes.c_char_p
    library.convgrad_plan_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p)  # integers and bytes pass unconverted
    return library, ""


def load() -> ctypes.CDLL | None:
    """Return the library, or None where there is none."""
    return _try_load()[0]


def why_absent() -> str:
    """Return why there is no library, as a sentence; empty where it is loaded."""
    return _try_load()[1]


@functools.cache
def warn_if_absent() -> None:
    """Warn, once in a process, that there are no compiled kernels."""
    if missing := why_absent():
        warn_user(f"NO COMPILED KERNELS: {missing}", RuntimeWarning)


def make_plan(problem: bytes, set_name: str = "") -> tuple[ctypes.CDLL, bytes]:
    """Return the library and a ``convgrad_plan``, a plain value that holds nothing to free.

    ``set_name`` is an instruction set, "amx" or "winograd"; empty is the set in use. RuntimeError: it is not there.
    """
    library = load()
    if library is None:
        raise RuntimeError(why_absent())
    plan = ctypes.create_string_buffer(_PLAN_BYTES)
    if library.convgrad_plan_make(problem, set_name.encode(), plan):
        raise RuntimeError(f"there are no kernels for {set_name!r} in this build, or not on this processor")
    return library, plan.raw


def instruction_set() -> str:
    """Return ``x86-64-v4``, ``x86-64-v3`` or ``baseline``; empty without a library."""
    library = load()
    return library.convgrad_instruction_set().decode() if library else ""


@functools.cache
def why_not(name: str) -> str:
    """Return why no plan can be made for another instruction set than the one in use; empty where one can."""
    library = load()
    if library is None:
        return why_absent()
    if name == instruction_set():
        return f"{name} is what 'native' uses here"
    here = library.convgrad_has(name.encode())
    return "" if here else f"this processor, or this build of the library, does not have {name}"


@functools.cache
def digest() -> str:
    """Return a digest of the library's build; empty without a library."""
    library = load()
    return "" if library is None else blake2b(Path(library._name).read_bytes(), digest_size=4).hexdigest()
