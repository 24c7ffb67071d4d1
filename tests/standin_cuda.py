"""The stand-in for libcuda.so.1, the compiled launcher, and a Triton that compiles for an H100 and launches there.

Only for a process of its own: Triton keeps the driver that it found first.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convgrad.backends import _native_library
from convgrad.backends.triton import TritonBackend, argument_block, first_check
from convgrad.engine import set_default_backend

CSRC = Path(__file__).parents[1] / "csrc"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
STREAM = 7


class _Record(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p), ("stream", ctypes.c_void_p), ("context", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("attributes", ctypes.c_uint32), ("count", ctypes.c_uint32), ("sizes", ctypes.c_uint32 * 32),
        ("bytes", ctypes.c_uint64 * 32),
    )  # fmt: skip


class Launched(NamedTuple):
    """A launch as the driver got it; the values of the parameters with their sizes."""

    kernel: str
    function: int
    stream: int
    context: int | None
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: int
    parameters: tuple[tuple[int, int], ...]


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


class Driver:
    """Compiles both libraries, and puts them in the place of the real ones."""

    def __init__(self, folder: Path) -> None:
        cxx = compiler()
        assert cxx is not None
        self.path = folder / "libcuda.so.1"
        launcher = folder / "launcher.so"
        strict = ["-fno-exceptions", "-fno-rtti"]
        soname = ["-Wl,-soname,libcuda.so.1"]
        for more, source, target in ((soname, "tests/cuda.cpp", self.path), (strict, "aten/cuda_launch.cpp", launcher)):
            subprocess.run([cxx, *FLAGS, *more, str(CSRC / source), "-o", str(target)], check=True)
        self.library = ctypes.CDLL(str(self.path), ctypes.RTLD_GLOBAL)
        self.library.standin_name.argtypes = (ctypes.c_void_p,)
        self.library.standin_name.restype = ctypes.c_char_p
        self.library.standin_enter.argtypes = (ctypes.c_void_p,)
        self.library.standin_time.restype = ctypes.c_double
        self.launcher = ctypes.CDLL(str(launcher))
        self._load = _native_library.load
        _native_library.load = lambda: self.launcher
        first_check.fault = lambda *_: None
        argument_block.LIBRARY = str(self.path)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self._take_triton()

    def _take_triton(self) -> None:
        """Triton finds an H100, and its own launcher reaches the stand-in."""
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaDriver
        from triton.runtime import driver

        gpu: Any = CudaDriver()
        gpu.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        gpu.get_current_device = lambda: 0
        gpu.get_current_stream = lambda device: STREAM
        driver.set_active(gpu)

    def take_calls(self) -> None:
        """Let the backend `triton` be the default, compute nothing, and launch for tensors on the CPU."""
        _native_library.load = self._load  # the table launches by the library of the package
        self.launcher = ctypes.CDLL(str(_native_library.library_path()))
        argument_block._driver.cache_clear()
        backend: Any = TritonBackend
        backend.reasons_against = lambda self, problem, outputs, device: self._reasons_of_the_kernels(problem, outputs)
        backend.entry = lambda self, problem, outputs, operands: argument_block.entry(
            self._bound(problem, outputs, torch.device("cpu")), operands
        )
        set_default_backend("triton")

    def reset(self, most: int = 64, error: int = 0) -> None:
        """Forget what was launched; later launches, at most so many of which are recorded, return this error."""
        self.library.standin_reset(most, error)

    def launched(self) -> list[Launched]:
        """What was launched since the last `reset`."""
        records = ctypes.POINTER(_Record)()
        count = self.library.standin_records(ctypes.byref(records))
        found: list[Launched] = []
        for r in records[:count]:
            name = self.library.standin_name(r.function).decode()
            values = tuple((r.sizes[i], r.bytes[i]) for i in range(r.count))
            found.append(
                Launched(name, r.function, r.stream, r.context, (*r.grid,), (*r.block,), r.shared, r.attributes, values)
            )
        return found

    def launch(self, made: argument_block.Entry, tensors: Mapping[str, Tensor], scratch: list[Tensor]) -> int:
        """Launch an entry; operands and results by the names of `argument_block.SLOTS`."""
        pointers = [tensors[name].data_ptr() if name in tensors else 0 for name in argument_block.SLOTS]
        slots = (ctypes.c_void_p * (len(pointers) + len(scratch)))(*pointers, *[t.data_ptr() for t in scratch])
        count = len(made.launches) // argument_block.SIZE
        return int(self.launcher.convgrad_cuda_launch(made.launches, count, slots, ctypes.c_void_p(STREAM)))


def operand(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, aligned: bool) -> Tensor:
    """Memory that begins at a multiple of 16 bytes, or does not."""
    like = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=layout)
    room = torch.zeros(like.numel() + 1, dtype=dtype)
    found = room.as_strided(shape, like.stride(), 0 if aligned else 1)
    assert (found.data_ptr() % 16 == 0) is aligned
    return found
