"""Routes: the same pass through ATen by another way than the call as given, for problems where that way is faster.

PyTorch computes a convolution in the dtype, the layout and the number of dimensions of its operands, whatever its
kernels for these are worth. A route restates the problem, converts the operands, calls ATen, and converts the result
back; the conversions are a part of its time.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from .._compat import channels_last_of
from ..problem import ConvProblem, Output, Pass
from .aten import AtenBackend
from .aten_direct import with_height
from .base import BOTH_GRADIENTS, Arithmetic, Backend, Kernel
from .padding import over_copy, padded

_aten = AtenBackend()


class _Restated(Backend):
    """ATen on converted operands: another dtype or layout, a sequence as an image of one row, padding written out."""

    from_pytorch = True
    sweeps = BOTH_GRADIENTS
    layouts = ("strided",)

    @abstractmethod
    def restated(self, problem: ConvProblem) -> ConvProblem:
        """The problem that ATen gets; the problem itself where this route changes nothing."""

    @abstractmethod
    def nothing_to_change(self, problem: ConvProblem) -> str:
        """Why this route is the call as given; empty where it is not."""

    def reasons_against(self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> list[str]:
        why = self.nothing_to_change(problem)
        return [why] if why else _aten.reasons_against(self.restated(problem), outputs, device)

    def wrong_here(
        self, problem: ConvProblem, outputs: tuple[Output, ...], device: torch.device
    ) -> tuple[str, tuple[str, ...]]:
        return _aten.wrong_here(self.restated(problem), outputs, device)

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        other = self.restated(problem)
        kernel, lifted = _aten.bind(other, outputs), other.ndim > problem.ndim

        def there(t: Tensor) -> Tensor:
            return _converted(t.unsqueeze(2) if lifted else t, other)

        def back(t: Tensor) -> Tensor:
            return _converted(t.squeeze(2) if lifted else t, problem)

        def one_pass(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return back(kernel(there(a), there(b), None if bias is None else bias.to(other.dtype)))

        def sweep(*operands: Tensor | None) -> tuple[Tensor, ...]:
            found = kernel(*[there(t) for t in operands[:3] if t is not None])
            return tuple(t.to(problem.dtype) if t.dim() == 1 else back(t) for t in found)

        return one_pass if len(outputs) == 1 else sweep

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        return _aten.arithmetic(self.restated(problem), pass_, device)


def _converted(t: Tensor, p: ConvProblem) -> Tensor:
    """A tensor in the dtype and the layout of a problem, in one copy at most."""
    if t.dtype is not p.dtype:
        return t.to(p.dtype, memory_format=p.memory_format)
    return t.contiguous(memory_format=p.memory_format)


class AtenFloat32Backend(_Restated):
    """float16 and bfloat16 in float32: for a CPU without their arithmetic, and for sums that are rounded once."""

    name = "aten:float32"
    summary = "ATen in float32, for float16 and bfloat16"

    def nothing_to_change(self, problem: ConvProblem) -> str:
        if problem.dtype in (torch.float16, torch.bfloat16):
            return ""
        return f"it computes torch.float16 and torch.bfloat16 in torch.float32, got {problem.dtype}"

    def restated(self, problem: ConvProblem) -> ConvProblem:
        return problem.replace(dtype=torch.float32)


class AtenChannelsLastBackend(_Restated):
    """Contiguous tensors in channels_last; a sequence, which has no such layout, as an image of one row."""

    name = "aten:channels_last"
    summary = "ATen in channels_last, for contiguous tensors; a sequence is an image of one row"

    def nothing_to_change(self, problem: ConvProblem) -> str:
        return "its layout is channels_last as it is" if problem.channels_last else ""

    def restated(self, problem: ConvProblem) -> ConvProblem:
        lifted = with_height(problem) if problem.ndim == 1 else problem
        return lifted.replace(memory_format=channels_last_of(lifted.ndim))


class AtenPaddedBackend(_Restated):
    """ATen over an input that carries its padding, for its kernels that are wrong at the border.

    Most of oneDNN's kernels in `aten_defects` go wrong where a border is wide and the image small. With the zeros
    written out there is no border; that costs one copy of the input, and the kernel stays the fast one.
    """

    name = "aten:padded"
    summary = "ATen over an input that carries its padding"
    sweeps = ()
    layouts = ("any",)

    def nothing_to_change(self, problem: ConvProblem) -> str:
        return "there is no padding to write out" if padded(problem) is problem else ""

    def restated(self, problem: ConvProblem) -> ConvProblem:
        """A plain problem: a transposed one over a padded output is its gradient of the input, and then cropped."""
        return padded(problem).replace(origin="plain")

    def bind(self, problem: ConvProblem, outputs: tuple[Output, ...]) -> Kernel:
        return over_copy(problem, outputs, _aten.bind(self.restated(problem), outputs))
