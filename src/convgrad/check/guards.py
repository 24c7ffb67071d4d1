"""Guards: they show what a backend leaves unwritten, oversteps and keeps in memory, and which settings it changes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from .._compat import DispatchMode, fp32_precision

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
#: Elements before and after a guarded tensor: a multiple of every vector and cache line.
_MARGIN = 64


def poison_(tensor: Tensor) -> Tensor:
    """Fill a tensor with what shows up in any sum: NaN, or the largest integer."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the elements as bytes, in the order of their indices: uint8 [elements * itemsize]."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return dense.copy_(tensor.reshape(-1)).view(torch.uint8)


class Guarded:
    """A copy of a ``tensor``, or poison, between poisoned margins, ``shift`` elements off an aligned start."""

    def __init__(self, like: Tensor, shift: int = 0, *, filled: bool = True) -> None:
        extent = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        start = _MARGIN + shift
        whole = poison_(torch.empty(start + extent + _MARGIN, dtype=like.dtype, device=like.device))
        self._margins = whole[:start], whole[start + extent :]
        self.tensor = whole.as_strided(like.shape, like.stride(), start)
        if filled:
            self.tensor.copy_(like)

    def overstepped(self) -> bool:
        """Whether a margin was written."""
        return not all(torch.equal(raw_bytes(m), raw_bytes(poison_(torch.empty_like(m)))) for m in self._margins)


def paged_copy(tensor: Tensor, *, at_end: bool) -> Tensor:
    """Return a copy between two closed pages, where a read is a crash; one borders on its last byte, or on its first.

    Raises:
        OSError: the pages cannot be closed.
    """
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    page, size = mmap.PAGESIZE, extent * tensor.dtype.itemsize
    middle = -(-size // page) * page
    memory = mmap.mmap(-1, middle + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for closed in (start, start + page + middle):
        if libc.mprotect(ctypes.c_void_p(closed), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    offset = page + (middle - size if at_end else 0)
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=extent, offset=offset)
    return whole.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


class Poison(DispatchMode):
    """Every tensor that is allocated without being filled is poisoned, between guarded margins.

    A tensor without elements is left alone: as in ``out=torch.empty(0)``, it is resized before it is filled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: list[Guarded] = []

    def overstepped(self) -> bool:
        """Whether anything wrote before or after a tensor that it had allocated."""
        return any(guard.overstepped() for guard in self._guards)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.layout is torch.strided and result.numel() and not result.is_meta:
            self._guards.append(Guarded(result, filled=False))
            return self._guards[-1].tensor
        return result


class PeakMemory(DispatchMode):
    """Records the most bytes that PyTorch's operators had allocated at one time, without those of ``known`` tensors."""

    def __init__(self, *known: Tensor | None) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {t.untyped_storage()._cdata for t in known if t is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            # oneDNN's own tensors and those on the meta device have no storage
            if isinstance(tensor, Tensor) and not tensor.is_mkldnn and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


# ---- PyTorch's settings, which a kernel shares with the program that calls it --------------------

_mkldnn: Any = torch.backends.mkldnn
_cuda: Any = torch.backends.cuda


def _set_matmul_precision(both: tuple[str, str]) -> None:
    names = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
    torch.set_float32_matmul_precision(names.get(both, "highest"))  # names exist for some combinations only
    _cuda.matmul.fp32_precision, _mkldnn.matmul.fp32_precision = both


#: The functions that read and set each one.
_SETTINGS: Final[dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "whether algorithms are deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "the precision of matrix products": (
        lambda: (fp32_precision("cuda", "matmul"), fp32_precision("mkldnn", "matmul")),
        _set_matmul_precision,
    ),
    "whether oneDNN is used": (lambda: _mkldnn.enabled, lambda on: setattr(_mkldnn, "enabled", on)),
    "whether subnormal numbers become zero": (
        lambda: bool(torch.full((), 1e-40, dtype=torch.float32, device="cpu") * 1 == 0),
        torch.set_flush_denormal,
    ),
    "PyTorch's random numbers": (
        lambda: torch.get_rng_state().tolist(),
        lambda state: torch.set_rng_state(torch.tensor(state, dtype=torch.uint8)),
    ),
}


def settings(*, random: bool) -> dict[str, Any]:
    """Return the values of the settings; ``random``: also the state of random numbers."""
    return {name: get() for name, (get, _) in _SETTINGS.items() if random or "random" not in name}


def restore(before: dict[str, Any]) -> list[str]:
    """Set what is no longer as it was before, and return its names."""
    changed = [name for name, value in before.items() if _SETTINGS[name][0]() != value]
    for name in changed:
        _SETTINGS[name][1](before[name])
    return changed
