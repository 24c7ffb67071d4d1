"""One launch: a kernel with its arguments, on the device of its tensors, with as many registers as it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...settings import capturing

#: ptxas spills a few bytes where that lets one more program run beside the others. Where it does, it is told to take
#: all the registers that a thread can have.
ALL_REGISTERS = {"maxnreg": 255}
#: Programs that run at once where nothing is known of the device: three on each multiprocessor of an H100.
PROGRAMS = 3 * 132
#: Programs that one multiprocessor runs at once, of an A100, H100 or B200 (CUDA C++ Programming Guide, technical
#: specifications per compute capability); PyTorch does not tell.
_MOST_PROGRAMS = 32


class NotReadyError(Exception):
    """A CUDA graph is being captured, in which no kernel can be compiled, loaded and checked."""


class Selected(NamedTuple):
    """A compiled kernel as one launch starts it."""

    start: Callable[..., object]
    #: Which of the launch's tensors the kernel takes, by number.
    taken: list[int]
    #: The arguments after the tensors.
    others: list[Any]
    parts: int
    programs: int
    compiled: Any


class Launch:
    """A kernel with all its arguments but the tensors, which come before them.

    Triton finds out at each call which compiled kernel its arguments select, which takes longer than to start it. Of a
    launch only the alignment of its tensors can select another one, so the one that was selected is kept.

    Args:
        arguments: the others by name.
        options: ``num_warps`` and ``num_stages``.
        grid: the number of programs and the argument ``parts``, where the GPU can run so many programs at once.
    """

    __slots__ = ("_arguments", "_grid", "_kernel", "_options", "_selected")

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], options: dict[str, int], grid: Callable[[int], tuple[int, int]]
    ) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._options: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": True, **options}
        self._grid = grid
        #: By device and alignment.
        self._selected: dict[tuple[Any, ...], Selected] = {}

    def start(self, **tensors: Tensor) -> tuple[int, str]:
        """Start the kernel; in how many parts, and which compiled one it is where its result is to be looked at.

        Args:
            tensors: by name, in the kernel's order; what it does not take is left out.

        Raises:
            NotReadyError: this is its first call, and within a capture.
        """
        given = tuple(tensors.values())
        device = given[0].device
        key = (device, *[t.data_ptr() % 16 == 0 for t in given])
        with torch.accelerator.device_index(device.index):  # Triton launches on the current one
            selected = self._selected.get(key)
            if selected is None:
                return self._select(key, device, tensors)
            selected.start(*[given[i] for i in selected.taken], *selected.others)
        return selected.parts, ""

    def selected(self, device: torch.device, aligned: Iterable[bool]) -> Selected | None:
        """Return the kernel that `start` selected for tensors of this alignment to 16 bytes, or None."""
        return self._selected.get((device, *aligned))

    def _select(self, key: tuple[Any, ...], device: torch.device, tensors: dict[str, Tensor]) -> tuple[int, str]:
        """Compile the kernel, or find it in Triton's cache, start it, and keep it."""
        if capturing():
            raise NotReadyError
        compiled = self._compiled(device, tensors)
        if compiled is None:  # by the interpreter
            programs, parts = self._grid(PROGRAMS)
            self._kernel[(programs,)](**self.arguments(parts, tensors), **self._options)
            return parts, ""
        programs, parts = self._grid(at_once(device, compiled.n_regs, 32 * self._options["num_warps"]))
        arguments = self.arguments(parts, tensors)
        taken = [name for name in tensors if name in arguments]
        start, others = compiled[programs, 1, 1], list(arguments.values())[len(taken) :]
        start(*[tensors[name] for name in taken], *others)
        names = list(tensors)
        numbers = [names.index(name) for name in taken]
        self._selected[key] = Selected(start, numbers, others, parts, programs, compiled)
        return parts, compiled.hash

    def _compiled(self, device: torch.device, tensors: dict[str, Tensor]) -> Any:
        """The kernel for tensors like these, loaded onto their device, with as many registers as it needs."""
        while True:
            compiled = self._kernel.warmup(grid=(1,), **self.arguments(1, tensors), **self._options)
            if compiled is None:
                return None
            compiled[1, 1, 1]  # loads it, and counts its registers
            spills = compiled.n_spills and device.type == "cuda" and torch.version.hip is None
            if not spills or "maxnreg" in self._options:
                return compiled
            self._options = {**self._options, **ALL_REGISTERS}

    def arguments(self, parts: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of the kernel."""
        given = {**tensors, **self._arguments, "parts": parts}
        return {name: given[name] for name in self._kernel.arg_names}


@cache
def at_once(device: torch.device, registers: int, threads: int) -> int:
    """Return the number of programs, of given threads and registers, that a GPU runs at once."""
    if device.type != "cuda" or torch.version.hip is not None:
        return PROGRAMS
    gpu = torch.cuda.get_device_properties(device)
    rounded = -(-registers // 8) * 8 * threads
    each = min(gpu.regs_per_multiprocessor // rounded, gpu.max_threads_per_multi_processor // threads, _MOST_PROGRAMS)
    return gpu.multi_processor_count * max(1, each)
