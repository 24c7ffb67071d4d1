"""Depthwise convolutions on a GPU, in Triton: one source for CUDA, ROCm and XPU.

`geometry` turns a problem into a sliding sum. `patches` and `patch_sums` compute it where columns are neighbours in
memory, `channel_patches` and `channel_sums` where channels are, `kernels` and `grad_weight` what those do not take;
`patch_tiles`, `channel_tiles`, `tiles` and `tuning` choose the shape of a program; `operands`, `arguments`,
`patch_launch`, `channel_launch` and `launch` bring tensors to them, `start` starts them; `ways` and `selfcheck`
decide which are trusted; `variants`, `aot` compile them where there is no GPU, and `work`, `listing`, `counting` count
their instructions. `banded`, `bands` and `banded_launch` do it for large kernels on tensor cores, the backend
`on_bands`. triton is imported at the first use.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...errors import BackendError
from ...problem import ConvProblem, Output
from ..base import Backend, Kernel
from . import channel_tiles, patch_tiles, tiles
from .geometry import geometry
from .tiles import UNROLLED, UNROLLED_CHANNELS
from .ways import way_of

__all__ = ["TritonBackend"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
#: What a ROCm build of PyTorch calls "cuda" too.
_DEVICES = ("cuda", "hip", "xpu")
_BOTH: tuple[Output, ...] = ("grad_input", "grad_weight")
_ALL: tuple[Output, ...] = (*_BOTH, "grad_bias")


@lru_cache(maxsize=1)
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonBackend(Backend):
    """Depthwise forward, both gradients, and both in one sweep, by reading every operand once.

    A kernel is trusted on a device after a tiny problem with an exact answer has come out right there, by this very
    kernel; a wrong one bans the backend from the device.
    """

    name = "triton"
    summary = "depthwise 1-D, 2-D and 3-D on a GPU, NCHW and channels_last, one reading of each operand"
    sweeps = (_BOTH, _ALL)
    layouts = ("contiguous", "channels_last", "strided")

    def __init__(self) -> None:
        self._trusted: set[tuple[object, ...]] = set()
        self._banned: dict[torch.device, str] = {}

    # ---- what it can do ----------------------------------------------------------------------------

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        reasons: list[str] = []
        if not _installed():
            reasons.append("triton is not installed")
        if device.type not in _DEVICES and not (device.type == "cpu" and _interpreted()):
            reasons.append(f"it runs on GPUs (cuda, hip, xpu), not on {device.type}")
        if device in self._banned:
            reasons.append(self._banned[device])
        if problem.in_channels != problem.groups:
            reasons.append("it computes depthwise convolutions only (one input channel a group)")
        if problem.dtype not in _DTYPES:
            reasons.append(f"it has no kernel for {str(problem.dtype).removeprefix('torch.')}")
        if len(outputs) > 1:
            reasons.extend(against_sweep(problem, outputs))
        elif "grad_bias" in outputs:
            reasons.append("grad_bias alone is a sum, which the engine does")
        return reasons

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def workspace(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> int:
        if "grad_weight" not in outputs or problem.empty or problem.in_channels != problem.groups:
            return 0
        use = "sweep" if len(outputs) > 1 else "sum"
        most = max(module.share_elements(problem, use) for module in (tiles, patch_tiles, channel_tiles))
        return most * max(4, problem.dtype.itemsize)

    def expected_speedup(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> float:
        """Not measured on any GPU: where ATen's own CUDA kernels are known to move more bytes than they must.

        Native grad_weight reads both operands once for every kernel position; native 3-D and large kernels read the
        input that often. cuDNN takes channels_last, and float16 with kernels up to 5x5: nothing is claimed against it,
        nor against other vendors' libraries. See docs/gpu.md.
        """
        if device.type != "cuda" or torch.version.hip is not None or self.reasons_against(problem, outputs, device):
            return 0.0
        if problem.dtype != torch.float64 and problem.channels_last:
            return 0.0
        if problem.dtype == torch.float16 and problem.ndim < 3 and max(problem.kernel_size) <= 5:
            return 0.0
        elements = prod(problem.kernel_size)
        if "grad_weight" in outputs and elements > 1:
            return 2.0
        return 1.5 if elements > 1 and (problem.ndim == 3 or elements >= 49) else 0.0

    # ---- doing it ----------------------------------------------------------------------------------

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        what = outputs[0] if len(outputs) == 1 else "sweep"
        ready: list[Kernel] = []  # made at the first call, which is when triton is imported
        trusted: set[object] = set()

        def run(a: Tensor, b: Tensor, *rest: Tensor | None) -> Any:
            met = (a.device, a.stride(), b.stride())
            if met not in trusted and self._trust(problem, what, a, b):
                trusted.add(met)
            if not ready:
                ready.append(self._made(problem, outputs))
            return ready[0](a, b, *rest)

        return run

    # ---- trust -------------------------------------------------------------------------------------

    def _trust(self, problem: ConvProblem, what: str, a: Tensor, b: Tensor) -> bool:
        """Run a tiny exact problem before the first use of a kernel on a device.

        Args:
            a, b: the operands of the pass, or grad_output and input: their strides select a kernel.

        Returns:
            Whether it need not be asked again.

        Raises:
            BackendError: it came out wrong, now or before.
        """
        device = a.device
        way = self._way(problem, what, a, b)
        key = (device, what, problem.dtype, way)
        if key in self._trusted:
            return True
        if device in self._banned:
            raise BackendError(f"{self.name}: {self._banned[device]}")
        if device.type == "cpu":  # the interpreter, in a test that checks the result anyway
            return True
        from .launch import capturing

        if capturing(device):
            return False  # nothing may be waited for now; the check comes with the first call outside a capture
        fault = self._fault(problem.dtype, what, way, device)
        if fault is not None:
            self._banned[device] = fault
            raise BackendError(f"{self.name}: {fault}")
        self._trusted.add(key)
        return True

    # ---- which kernels -----------------------------------------------------------------------------

    def _made(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        """What `bind` returns, without asking for trust."""
        return _bound(problem, outputs)

    def _way(self, problem: ConvProblem, what: str, a: Tensor, b: Tensor) -> Any:
        """What tells the kernels of one pass and dtype apart."""
        return way_of(problem, what, a, b)

    def _fault(self, dtype: torch.dtype, what: str, way: Any, device: torch.device) -> str | None:
        """What is wrong with the kernels of a pass, or of ``"sweep"``, on a device."""
        from .selfcheck import first_fault

        return first_fault(what, dtype, way, device)


def against_sweep(problem: ConvProblem, outputs: tuple[Output, ...]) -> list[str]:
    if outputs not in (_BOTH, _ALL):
        return ["its one sweep computes grad_input and grad_weight, with or without grad_bias"]
    reasons: list[str] = []
    if problem.out_channels != problem.in_channels:
        reasons.append("its sweep is for one output channel per input channel")
    elif problem.in_channels == problem.groups:
        g = geometry(problem, adjoint=True, channel_lanes=problem.channels_last)
        most = UNROLLED if not problem.channels_last else UNROLLED_CHANNELS
        if prod(axis.taps for axis in g.axes) > most:
            reasons.append(f"its sweep keeps at most {most} kernel positions in registers")
        if "grad_bias" in outputs and (problem.transposed or min(g.field("whole_tap")) < 0):
            reasons.append("no kernel position reads all of grad_output: grad_bias needs a sum of its own")
    return reasons


def _bound(
    problem: ConvProblem, outputs: tuple[Output, ...], *, fixed_tiles: bool = False, wide: bool = False
) -> Kernel:
    """The kernel of one pass or of a sweep, without asking for trust."""
    from . import launch

    if len(outputs) == 1:
        what: Any = outputs[0]
        call = launch.bound(problem, what, fixed_tiles=fixed_tiles, wide=wide)
        if outputs == ("grad_weight",):
            return lambda grad_output, input, bias=None, workspace=None: call(input, grad_output, None, workspace)[1]
        return lambda a, b, bias=None, workspace=None: call(a, b, bias)
    if "grad_bias" in outputs:
        return launch.bound(problem, "sweep+bias", fixed_tiles=fixed_tiles, wide=wide)
    call = launch.bound(problem, "sweep", fixed_tiles=fixed_tiles, wide=wide)
    return lambda grad_output, input, weight, workspace=None: call(grad_output, input, weight, workspace)[:2]
