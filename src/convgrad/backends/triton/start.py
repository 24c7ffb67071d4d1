"""One launch: compiled by Triton the first time, and after that handed to its compiled kernel directly.

Triton's own way to a launch inspects every argument at every call: 21 us of a Xeon's time, where this takes 5. Which
kernel it finds depends on nothing but the integers, the dtypes and which addresses are divisible by 16. A `Launch` has
its integers and dtypes fixed; so it keeps the compiled kernel for the addresses' divisibility (which is what keeps
vector loads from operands that are not aligned) and starts that one with ``CompiledKernel.__getitem__``, the same in
Triton 3.6 to 3.9.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

#: ptxas spills a few bytes where that lets one more program run beside the others. Where it does, it is told to take
#: all the registers that a thread can have.
ALL_REGISTERS = {"maxnreg": 255}
_ALIGNED = 15  # the bits of an address that are zero when it is divisible by 16
#: Programs that run at once where nothing is known of the device: three on each multiprocessor of an H100.
PROGRAMS = 3 * 132


def capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on this device's current stream."""
    module = getattr(torch, device.type, None)
    check = getattr(module, "is_current_stream_capturing", None)
    with torch.accelerator.device_index(device.index):
        return bool(check and check())


class Launch:
    """A kernel with all its arguments but the tensors, which are its first ones.

    Args:
        arguments: the others by name.
        options: ``num_warps`` and ``num_stages``.
        grid: the number of programs and the argument ``parts``, where the GPU can run so many programs at once; there
            is no such argument where it is 0.
    """

    __slots__ = ("_arguments", "_grid", "_kernel", "_options", "_started")

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], options: dict[str, int], grid: Callable[[int], tuple[int, int]]
    ) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._options = {"num_stages": 1, **options}
        self._grid = grid
        #: By device and by the addresses' divisibility: how to start the kernel, its other arguments, its parts.
        self._started: dict[object, tuple[Callable[..., None], tuple[Any, ...], int]] = {}

    def start(self, *tensors: Tensor) -> tuple[int, str]:
        """Start the kernel; in how many parts, and which compiled kernel it is if it was looked for just now."""
        index = tensors[0].device.index
        addresses = [t.data_ptr() for t in tensors]
        every = 0
        for address in addresses:
            every |= address
        # All are divisible by 16, almost always.
        like = index if not every & _ALIGNED else (index, *(not a & _ALIGNED for a in addresses))
        started = self._started.get(like)
        if started is None:
            return self._first(like, tensors)
        run, rest, parts = started
        if index is None or torch.accelerator.current_device_index() == index:
            run(*addresses, *rest)
        else:
            with torch.accelerator.device_index(index):
                run(*addresses, *rest)
        return parts, ""

    def _first(self, like: object, tensors: tuple[Tensor, ...]) -> tuple[int, str]:
        names = self._kernel.arg_names
        programs, parts = self._grid(PROGRAMS)
        given = {**dict(zip(names, tensors, strict=False)), **self._with(parts)}
        device = tensors[0].device
        with torch.accelerator.device_index(device.index):  # Triton launches on the current one
            if not isinstance(self._kernel, JITFunction):  # the interpreter
                self._kernel[(programs,)](**given, **self._options)
                return parts, ""
            compiled = self._compiled(given, {})
            if getattr(compiled, "n_spills", 0) and compiled.metadata.target.backend == "cuda":
                compiled = self._compiled(given, ALL_REGISTERS)
            programs, parts = self._grid(at_once(compiled, device))
            known = self._with(parts)
            rest = tuple(known[name] for name in names[len(tensors) :])
            run = compiled[(programs, 1, 1)]
            run(*(t.data_ptr() for t in tensors), *rest)
            if capturing(device):  # not kept: the first call outside of a capture is the one that is checked
                return parts, ""
        self._started[like] = (run, rest, parts)
        return parts, compiled.hash

    def _with(self, parts: int) -> dict[str, Any]:
        return {**self._arguments, "parts": parts} if parts else self._arguments

    def _compiled(self, given: dict[str, Any], more: dict[str, int]) -> CompiledKernel:
        """The kernel that Triton finds or compiles for these arguments, loaded and not started."""
        compiled = self._kernel.warmup(**given, **self._options, **more, grid=(1,), enable_fp_fusion=True)
        compiled._init_handles()
        return compiled


def at_once(compiled: Any, device: torch.device) -> int:
    """How many programs of a compiled kernel an NVIDIA GPU runs at once, by their registers; elsewhere a guess."""
    registers = getattr(compiled, "n_regs", 0)
    if device.type != "cuda" or torch.version.hip is not None or not registers:
        return PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    warps = compiled.metadata.num_warps
    each = min(64 // warps, 2048 // (-(-registers // 8) * 8 * warps))  # of 64 K registers, for 32 threads
    return properties.multi_processor_count * max(1, each)
