"""One launch: a kernel with its arguments, on the device of its tensors, with as many registers as it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...settings import capturing

#: ptxas spills a few bytes where that lets one more program run beside the others. Where it does, it is told to take
#: all the registers that a thread can have.
ALL_REGISTERS = {"maxnreg": 255}
#: Programs that run at once where nothing is known of the device: three on each multiprocessor of an H100.
PROGRAMS = 3 * 132


class Launch:
    """A kernel with all its arguments but the tensors.

    Args:
        arguments: the others by name.
        options: ``num_warps`` and ``num_stages``.
        grid: the number of programs and the argument ``parts``, where the GPU can run so many programs at once.
    """

    __slots__ = ("_arguments", "_grid", "_kernel", "_options")

    def __init__(
        self, kernel: Any, arguments: dict[str, Any], options: dict[str, int], grid: Callable[[int], tuple[int, int]]
    ) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._options: dict[str, Any] = {"num_stages": 1, "enable_fp_fusion": True, **options}
        self._grid = grid

    def start(self, **tensors: Tensor) -> tuple[int, str]:
        """Start the kernel; in how many parts, and which compiled one it is, if its result can be looked at now.

        Args:
            tensors: by name; what the kernel does not take is left out.
        """
        device = next(iter(tensors.values())).device
        programs, parts = self._grid(at_once(device))
        arguments = self.arguments(parts, tensors)
        with torch.accelerator.device_index(device.index):  # Triton launches on the current one
            compiled = self._kernel[(programs,)](**arguments, **self._options)
            spills = getattr(compiled, "n_spills", 0) and device.type == "cuda" and torch.version.hip is None
            if spills and "maxnreg" not in self._options:
                self._options = {**self._options, **ALL_REGISTERS}
                compiled = self._kernel[(programs,)](**arguments, **self._options)
            # The interpreter compiles nothing, and during a capture nobody can wait for a result.
            return parts, "" if compiled is None or capturing() else compiled.hash

    def arguments(self, parts: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """What the kernel is given."""
        given = {**tensors, **self._arguments, "parts": parts}
        return {name: given[name] for name in self._kernel.arg_names}


@cache
def at_once(device: torch.device) -> int:
    """How many programs a GPU runs at once, about."""
    if device.type != "cuda":
        return PROGRAMS
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count
