"""One launch: compiled by Triton the first time, and after that handed to its compiled kernel directly.

Triton's own way to a launch inspects every argument at every call, tens of microseconds for our forty. Which kernel it
finds depends on nothing but the integers, the dtypes and which addresses are divisible by 16. A `Launch` has its
integers and dtypes fixed; so it keeps the compiled kernel for the addresses' divisibility and starts that one with
``CompiledKernel.__getitem__``, which is the same in Triton 3.6 to 3.9. Hooks of profilers are called as ever.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

__all__ = ["ALL_REGISTERS", "Call", "Launch", "capturing", "recording"]

#: ptxas spills a few bytes where that lets one more program run beside the others. Where it does, it is told to take
#: all the registers that a thread can have.
ALL_REGISTERS = {"maxnreg": 255}
_ALIGNED = 15  # the bits of an address that are zero when it is divisible by 16


class Call(NamedTuple):
    """What a launch would have been: a kernel, its arguments by name, its warps, and the size of the grid."""

    kernel: Any
    arguments: dict[str, Any]
    warps: int
    stages: int = 1
    programs: int = 0


_recorded: ContextVar[list[Call] | None] = ContextVar("_recorded", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Call]]:
    """Collect the launches of this block instead of making them; operands may be on the meta device."""
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def on_device(index: int | None) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the operands'."""
    if index is None or torch.accelerator.current_device_index() == index:
        return contextlib.nullcontext()
    return torch.accelerator.device_index(index)


def capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on this device."""
    module = getattr(torch, device.type, None)
    check = getattr(module, "is_current_stream_capturing", None)
    return bool(check and check())


class Launch:
    """A kernel with all its arguments but the tensors, which are its first ones.

    Args:
        arguments: the others by name; those of the tile are added.
        tile: the tile's constants and, as ``num_warps`` and ``num_stages``, its warps and the depth of its pipeline.
        programs: the size of the grid for a tile's constants.
        tune: finds the fastest tile by running the kernel, or None; see `tuning`.
    """

    __slots__ = ("_arguments", "_kernel", "_programs", "_started", "_tile", "_tune")

    def __init__(
        self,
        kernel: Any,
        arguments: dict[str, Any],
        tile: dict[str, int],
        programs: Callable[[Any], int],
        tune: Callable[[], Any] | None = None,
    ) -> None:
        self._kernel = kernel
        self._arguments = arguments
        self._tile = tile
        self._programs = programs
        self._tune = tune
        #: By device and by the addresses' divisibility: how to start the compiled kernel, and its other arguments.
        self._started: dict[object, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def again(self, index: int | None, *addresses: int) -> bool:
        """Start the kernel if it has been started before on this device and on addresses like these."""
        every = 0
        for address in addresses:
            every |= address
        # All are divisible by 16, almost always.
        like = index if not every & _ALIGNED else (index, *(not a & _ALIGNED for a in addresses))
        started = self._started.get(like)
        if started is None or _recorded.get() is not None or self._tune is not None:
            return False
        run, rest = started
        if index is None or torch.accelerator.current_device_index() == index:
            run(*addresses, *rest)
        else:
            with torch.accelerator.device_index(index):
                run(*addresses, *rest)
        return True

    def first(self, *tensors: Tensor) -> None:
        """Start the kernel through Triton, which compiles it if that is needed, and remember what it found."""
        names = self._kernel.arg_names
        given = {**self._arguments, **dict(zip(names, tensors, strict=False))}
        calls = _recorded.get()
        if calls is not None:
            tile = dict(self._tile)
            warps, stages = tile.pop("num_warps"), tile.pop("num_stages", 1)
            calls.append(Call(self._kernel, {**given, **tile}, warps, stages, self._programs(self._tile)))
            return
        device = tensors[0].device
        index = device.index
        with on_device(index):
            captured = capturing(device)
            compiled = self._compiled(given) if self._tune is None or captured else self._tuned(given)
            if not captured and _spills(compiled):  # the result is written once more, and is the same
                compiled = self._compiled(given, ALL_REGISTERS)
        if not isinstance(compiled, CompiledKernel):  # the interpreter
            return
        addresses = [t.data_ptr() for t in tensors]
        flags = tuple(not a & _ALIGNED for a in addresses)
        known = {**self._arguments, **self._tile}
        rest = tuple(known[name] for name in names[len(tensors) :])
        run = compiled[(self._programs(self._tile), 1, 1)]
        self._started[index if all(flags) else (index, *flags)] = (run, rest)

    def _compiled(self, given: dict[str, Any], options: dict[str, int] | None = None) -> Any:
        grid = (self._programs(self._tile),)
        chosen = {"num_stages": 1, **self._tile, **(options or {})}
        return self._kernel[grid](**given, **chosen, enable_fp_fusion=True)

    def _tuned(self, given: dict[str, Any]) -> Any:
        """Let the tuner find a tile, and keep that one from now on."""
        assert self._tune is not None
        tuner = self._tune()
        compiled = tuner[lambda tile: (self._programs(tile),)](**given, enable_fp_fusion=True)
        best = tuner.best_config
        self._tile = {**best.kwargs, "num_warps": best.num_warps, "num_stages": best.num_stages}
        self._tune = None
        self._started.clear()
        return compiled


def _spills(compiled: Any) -> bool:
    """Whether a kernel for an NVIDIA chip keeps registers in memory; only its compiler takes `ALL_REGISTERS`."""
    if not isinstance(compiled, CompiledKernel) or compiled.metadata.target.backend != "cuda":
        return False
    return bool(getattr(compiled, "n_spills", 0))
