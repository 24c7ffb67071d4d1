"""Depthwise convolutions on a GPU, in Triton: one source for CUDA, ROCm and XPU.

`geometry` turns a problem into a sliding sum, `tiles` chooses the shape of a program, `correlate` (with `patches`) is
the kernel of every pass, `launch` brings tensors to it, `first_check` holds its first result to the exact one. `banded`
is another kernel, for large kernels on tensor cores: `bands` chooses its tiles. `argument_block` makes of a launch what
compiled code repeats. triton is imported at the first use.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import settings
from ..._compat import warn_user
from ...problem import ConvProblem, Outputs, Pass, passes_of
from ..base import Arithmetic, Backend, capability
from . import bands
from .first_check import instead
from .sliding_sum import geometry
from .tiles import choose, partial_values, use_of

if TYPE_CHECKING:
    from .argument_block import Entry
    from .launch import Bound

__all__ = ["LAUNCH_BYTES", "TritonBackend", "TritonBandedBackend"]

#: Bytes of one launch in an `argument_block.Entry` (``CudaLaunch``).
LAUNCH_BYTES = 432

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: What a ROCm build of PyTorch calls "cuda" too.
_DEVICES = ("cuda", "hip", "xpu")
#: Older ones know neither TF32 nor bfloat16, and Triton multiplies float16 one by one there, too.
_TENSOR_CORES = (8, 0)
_BOTH: Outputs = ("grad_input", "grad_weight")
_ALL: Outputs = (*_BOTH, "grad_bias")


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _tf32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products are TF32: float32 on an NVIDIA GPU; others multiply exactly."""
    return dtype == torch.float32 and device.type == "cuda" and torch.version.hip is None


class NotReadyError(Exception):
    """A CUDA graph is being captured, in which no kernel can be compiled, loaded and checked."""


class NotCompiledError(Exception):
    """A kernel cannot be compiled, or not loaded into a device: too little shared memory there, no C compiler."""


class _WrongResultError(Exception):
    """The first result of a compiled kernel is wrong."""


class TritonBackend(Backend):
    """Depthwise forward, both gradients, and both in one sweep, by reading every operand once.

    The first result of each kernel that is compiled for a device is checked (`first_check`). A wrong one bans the
    backend from that device. A kernel that cannot be compiled bans it from that problem. PyTorch's kernels compute the
    call.
    """

    name = "triton"
    summary = "depthwise 1-D, 2-D and 3-D on a GPU, NCHW and channels_last, one reading of each operand"
    sweeps = (_BOTH, _ALL)
    checks_itself = True

    def __init__(self) -> None:
        #: (device,), or (device, problem, outputs) -> why not.
        self._banned: dict[tuple[Any, ...], str] = {}
        self._checked: set[tuple[torch.device, str, int]] = set()
        self._lock = Lock()
        self._bound_ones = lru_cache(maxsize=4096)(self._made)

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        banned = [self._banned[key] for key in ((device,), (device, problem, outputs)) if key in self._banned]
        return banned + self._reasons_of_the_machine(problem, device) or self._reasons_of_the_kernels(problem, outputs)

    def _reasons_of_the_machine(self, problem: ConvProblem, device: torch.device) -> list[str]:
        reasons: list[str] = []
        if not _installed():
            reasons.append("triton is not installed")
        interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
        if device.type not in _DEVICES and not interpreted:
            reasons.append(f"it runs on GPUs (cuda, hip, xpu), not on {device.type}")
        if problem.in_channels != problem.groups:
            reasons.append("it computes depthwise convolutions only (one input channel a group)")
        if problem.dtype not in _DTYPES:
            reasons.append(f"it has no kernel for {str(problem.dtype).removeprefix('torch.')}")
        return reasons

    def _reasons_of_the_kernels(self, problem: ConvProblem, outputs: Outputs) -> list[str]:
        if problem.out_channels > problem.in_channels and (problem.channels_last or len(outputs) > 1):
            return ["in channels_last, and for both gradients at once, it takes one output channel per input channel"]
        g = geometry(problem, adjoint="grad_input" in outputs)
        use = use_of(outputs)
        if choose(g, use) is None:
            if use == "sweep":
                return ["its threads have no registers for both gradients of so many kernel positions at once"]
            kept = "positions in a plane of the kernel" if use == "result" else "kernel positions"
            return [f"its threads have registers for at most 49 {kept}"]
        if "grad_bias" in outputs and (problem.transposed or min(g.whole_tap) < 0):
            return ["no kernel position reads all of grad_output: grad_bias needs a sum of its own"]
        return []

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def workspace(self, problem: ConvProblem, outputs: Outputs) -> int:
        if "grad_weight" not in outputs or problem.empty or problem.in_channels != problem.groups:
            return 0
        return 4 * self._partial_values(problem, outputs)

    def _partial_values(self, problem: ConvProblem, outputs: Outputs) -> int:
        return partial_values(problem, use_of(outputs), "grad_bias" in outputs)

    def kernel_name(self, problem: ConvProblem, outputs: Outputs) -> str:
        return problem.layout

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Callable[..., Any]:
        return self._or_pytorch(problem, outputs, 0, partial(instead, problem, outputs))

    def _or_pytorch(
        self, problem: ConvProblem, outputs: Outputs, activation: int, by_pytorch: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the function that is bound at the first call, or ``by_pytorch`` where that cannot compute."""
        made = cache(partial(self._bound, problem, outputs, activation=activation))

        def run(*operands: Any) -> Any:
            device = operands[0].device
            if (device,) not in self._banned and (device, problem, outputs) not in self._banned:
                try:
                    return made(device)(*operands)
                except NotReadyError:
                    text = (
                        f"a CUDA graph is captured before {problem} was computed once; the graph gets PyTorch's kernel "
                        "instead of Triton's, which cannot be compiled and checked in a capture: call the model once "
                        "before"
                    )
                    warn_user(text, RuntimeWarning)
                except _WrongResultError as wrong:
                    self._ban((device,), f"on {device} any more: {wrong}", str(wrong))
                except NotCompiledError as failed:
                    why = f"its kernel cannot be compiled for {device}, or not loaded: {failed}"
                    self._ban((device, problem, outputs), f"for {'+'.join(outputs)} of {problem}: {why}", why)
            return by_pytorch(*operands)

        return run

    def bind_silu(self, problem: ConvProblem) -> Callable[..., Tensor]:
        """Return ``kernel(input, weight, bias, grad_output=None)`` for a problem whose ``forward`` is this backend's.

        It gives SiLU of ``forward``; with a grad_output the gradient of ``forward``'s result, which it computes again.
        """

        def by_pytorch(input: Tensor, weight: Tensor, bias: Tensor, _: None, grad_output: Tensor | None) -> Tensor:
            result = instead(problem, ("forward",), input, weight, bias)
            return F.silu(result) if grad_output is None else torch.ops.aten.silu_backward(grad_output, result)

        result, slope = (self._or_pytorch(problem, ("forward",), activation, by_pytorch) for activation in (1, 2))

        return lambda x, weight, bias, g=None: (result if g is None else slope)(x, weight, bias, None, g)

    def _ban(self, key: tuple[Any, ...], where: str, why: str) -> None:
        """Compute nothing on a device any more, where its kernels are wrong; or not these outputs of a problem."""
        with self._lock:
            first = key not in self._banned
            self._banned[key] = why
        if first:
            self.changed()
            warn_user(f"the backend {self.name!r} is not used {where}", RuntimeWarning)

    def _bound(self, problem: ConvProblem, outputs: Outputs, device: torch.device, activation: int = 0) -> Bound:
        """Return the one object that computes these outputs on a device, so that `entry` finds what a call selected."""
        with self._lock:
            return self._bound_ones(problem, outputs, device, activation)

    def entry(self, problem: ConvProblem, outputs: Outputs, operands: Mapping[str, Tensor]) -> Entry | None:
        """Return the launches of such a call for the table of compiled code, where there was one before on this device.

        None if it must go through Triton's launcher. The operands have the names of ``argument_block.SLOTS``.
        """
        device = next(iter(operands.values())).device
        if device.type != "cuda" or torch.version.hip is not None or (device,) in self._banned:
            return None
        from .argument_block import entry

        return entry(self._bound(problem, outputs, device), operands)

    def _made(self, problem: ConvProblem, outputs: Outputs, device: torch.device, activation: int) -> Bound:
        from .launch import bound

        return bound(problem, outputs, partial(self._verify, problem, activation > 0), activation)

    def _verify(
        self, problem: ConvProblem, silu: bool, kernel: str, outputs: Outputs, tensors: Mapping[str, Tensor]
    ) -> None:
        """Check a kernel's first results, and others for each magnitude of offsets; raise _WrongResultError."""
        device = tensors[outputs[0]].device
        key = device, kernel, max(prod(problem.input_shape), prod(problem.output_shape)).bit_length() // 4
        if key in self._checked:
            return
        from .first_check import fault

        arithmetic = self.arithmetic(problem, passes_of(outputs)[0], device)
        if wrong := fault(problem, outputs, tensors, arithmetic, silu):
            raise _WrongResultError(wrong)
        self._checked.add(key)


class TritonBandedBackend(TritonBackend):
    """Depthwise kernels of 9 columns and more as products with banded matrices.

    A backend of its own beside ``triton``, so that it is checked, measured, chosen and banned for itself.
    """

    name = "triton:banded"
    summary = "large depthwise kernels on a GPU's tensor cores, as products with banded matrices"
    sweeps = ()
    layouts = ("contiguous",)

    def _reasons_of_the_machine(self, problem: ConvProblem, device: torch.device) -> list[str]:
        reasons = super()._reasons_of_the_machine(problem, device)
        chip = capability(device)
        if chip is not None and chip < _TENSOR_CORES:
            reasons.append(f"Triton uses tensor cores from compute capability 8.0 on, this GPU has {chip[0]}.{chip[1]}")
        if _tf32(problem.dtype, device) and not settings.cudnn_allows_tf32():
            reasons.append("it multiplies float32 in TF32, which torch.backends.cudnn.allow_tf32 forbids")
        return reasons

    def _reasons_of_the_kernels(self, problem: ConvProblem, outputs: Outputs) -> list[str]:
        g = geometry(problem, adjoint=outputs == ("grad_input",))
        if g.axes[2].kernel < bands.LEAST_COLUMNS:
            return [f"the band of a kernel of fewer than {bands.LEAST_COLUMNS} columns is mostly zeros"]
        if outputs == ("grad_weight",) and g.axes[2].kernel > bands.MOST_IN_A_SUM:
            return [f"its threads have registers for grad_weight of at most {bands.MOST_IN_A_SUM} columns"]
        if g.adjoint and any(axis.stride > 1 for axis in g.axes):
            return ["it computes grad_input without a stride only"]
        return []

    def _partial_values(self, problem: ConvProblem, outputs: Outputs) -> int:
        return bands.partial_values(problem)

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return "tf32" if _tf32(problem.dtype, device) else "direct"

    def kernel_name(self, problem: ConvProblem, outputs: Outputs) -> str:
        return "banded"

    def _made(self, problem: ConvProblem, outputs: Outputs, device: torch.device, activation: int) -> Bound:
        from .launch import bound_bands

        precision = "tf32" if _tf32(problem.dtype, device) else "ieee"
        return bound_bands(problem, outputs, precision, partial(self._verify, problem, False))
