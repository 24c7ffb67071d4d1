"""PyTorch's flags that affect which kernel may run or what it returns, and ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor

from ._compat import fp32_precision, saved_tensors_hooks

#: What `measure` has set: the share of the running time that measuring may take, 0 for none at all; None leaves it to
#: ``torch.backends.cudnn.benchmark``. A list of one item, which a call reads without a function.
measuring: list[float | None] = [None]
#: Called when `measure` changes what may be chosen.
on_change: list[Callable[[], None]] = []
_USUAL_SHARE = 0.05


def _set_measuring(share: float | None) -> None:
    measuring[0] = share
    for changed in on_change:
        changed()


def cudnn_allows_tf32() -> bool:
    """Whether float32 convolutions may round their operands to TF32, by the old switch and the new ones."""
    return fp32_precision("cuda", "conv") == "tf32"


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


#: Flags without a Python frame: how many threads there are, whether deterministic algorithms are demanded, whether
#: oneDNN may be used, and those of ``torch.backends.cudnn``.
threads = torch.get_num_threads
deterministic = torch._C._get_deterministic_algorithms
mkldnn = torch._C._get_mkldnn_enabled
benchmark = torch._C._get_cudnn_benchmark


def determinism_demanded(device: torch.device) -> bool:
    """Whether a backend that does not repeat its bits may not run on a device; cuDNN's flag says nothing of a CPU."""
    return deterministic() or (device.type != "cpu" and torch.backends.cudnn.deterministic)


def measuring_share(device: torch.device) -> float:
    """The share of the running time that measuring may take on a device; 0 where nothing may be measured."""
    if determinism_demanded(device):
        return 0.0
    share = measuring[0]
    if share is None:
        return _USUAL_SHARE if benchmark() else 0.0
    return share


def may_choose_again(device: torch.device) -> bool:
    """Whether measuring may change a choice before a checkpoint repeats the call, which must save the same tensors."""
    on_gpu = device.type == "cuda" and measuring[0] != 0  # where the first call of what a rule proposes is timed
    return saved_tensors_hooks() is not None and (on_gpu or measuring_share(device) > 0)


def flags(like: Tensor) -> object:
    """A cheap hashable value that changes whenever the flags that matter on this tensor's device do."""
    library = "mkldnn" if like.is_cpu else "cuda"
    precisions = fp32_precision(library, "conv"), fp32_precision(library, "matmul")
    usual = deterministic(), benchmark(), measuring[0], *precisions
    if like.is_cpu:
        return *usual, threads(), mkldnn()
    return *usual, torch._C._get_cudnn_enabled(), torch._C._get_cudnn_deterministic(), capturing()


class measure(ContextDecorator):  # noqa: N801 - a setting that may also be a block, as torch.set_grad_enabled is
    """Measure which backend is fastest for each problem, here and now, and remember it on this machine.

    It applies to the whole process from the call on, or until the end of a ``with`` block or of a function that it
    decorates; blocks of several threads must not overlap. ``torch.backends.cudnn.benchmark = True`` does the same.
    ``measure(False)`` freezes the choices: what was measured before is used, and nothing more is measured. Under
    deterministic algorithms, and while a CUDA graph is captured, nothing is measured either.

    Args:
        on: False measures nothing, whatever cudnn.benchmark says; None leaves it to cudnn.benchmark again.
        share: the fraction of the running time that measuring may take. When it is used up, the rules decide until
            there is time again. ``float("inf")``: measure every problem at its first call, however long that takes.

    Raises:
        TypeError: anything but True, False or None, or a share that is not a number.
        ValueError: a share that is not positive.

    Equivalent to:
        >>> import convgrad
        >>> x, w = torch.ones(2, 4, 8, 8), torch.ones(4, 1, 3, 3)
        >>> with convgrad.measure():
        ...     y = convgrad.conv2d(x, w, groups=4)
    """

    def __init__(self, on: bool | None = True, *, share: float = _USUAL_SHARE) -> None:
        if on is not None and not isinstance(on, bool):
            raise TypeError(f"measure takes True, False or None, got {on!r}")
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"share is a number, got {share!r}")
        if not share > 0:
            raise ValueError(f"share={share} must be positive; measure(False) measures nothing")
        self._share = None if on is None else float(share) if on else 0.0
        self._before = [measuring[0]]
        self._applies = True  # from the call on, until the first block begins
        _set_measuring(self._share)

    def __call__(self, function: Any) -> Any:
        """Measure while the function runs, and not before."""
        if self._applies:
            self._applies = False
            _set_measuring(self._before.pop())
        return super().__call__(function)

    def __enter__(self) -> None:
        if not self._applies:
            self._before.append(measuring[0])
            _set_measuring(self._share)
        self._applies = False

    def __exit__(self, *exception: object) -> None:
        _set_measuring(self._before.pop())
