"""Routes: backends that call ATen in another dtype, layout or number of dimensions, where that is faster.

PyTorch computes a convolution in the dtype, layout and number of dimensions of its operands, even if its kernels for
these are slow. A route restates the problem, converts the operands, calls ATen, and converts the result back; the
conversions count in its time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._compat import channels_last_of
from ..problem import ConvProblem, Outputs
from .aten import AtenBackend
from .aten_libraries import with_height
from .base import Kernel
from .padding import Restated, padded

_aten = AtenBackend()


class AtenRoute(Restated):
    """ATen on converted operands: in another dtype or layout, a sequence as an image of one row."""

    def __init__(self, name: str, summary: str, restated: Callable[[ConvProblem], ConvProblem], otherwise: str) -> None:
        super().__init__(_aten, restated, name, summary, otherwise)
        self.layouts = ("strided",)

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        other = self.restated(problem)
        kernel, lifted = _aten.bind(other, outputs), other.ndim > problem.ndim

        def there(t: Tensor) -> Tensor:
            return _converted(t.unsqueeze(2) if lifted else t, other)

        def back(t: Tensor) -> Tensor:
            return _converted(t.squeeze(2) if lifted else t, problem)

        def one_pass(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            return back(kernel(there(a), there(b), None if bias is None else bias.to(other.dtype)))

        def sweep(a: Tensor, b: Tensor, c: Tensor, workspace: object = None) -> tuple[Tensor, ...]:
            found = kernel(there(a), there(b), there(c))
            return tuple(t.to(problem.dtype) if t.dim() == 1 else back(t) for t in found)

        return one_pass if len(outputs) == 1 else sweep


def _converted(t: Tensor, p: ConvProblem) -> Tensor:
    """Return a tensor in the dtype and the layout of a problem, with one copy at most."""
    if t.dtype is not p.dtype:
        return t.to(p.dtype, memory_format=p.memory_format)
    return t.contiguous(memory_format=p.memory_format)


def _in_channels_last(p: ConvProblem) -> ConvProblem:
    lifted = with_height(p) if p.ndim == 1 else p
    return p if p.channels_last else lifted.replace(memory_format=channels_last_of(lifted.ndim))


def _padded(p: ConvProblem) -> ConvProblem:
    """A plain problem: a transposed one over a padded output is its gradient of the input, and then cropped."""
    other = padded(p)
    return p if other is p else other.replace(origin="plain")


_padding = Restated(
    _aten, _padded, "aten:padded", "ATen over an input that carries its padding", "there is no padding to write out"
)
_padding.sweeps = ()

ROUTES = (
    # For a CPU without 16-bit arithmetic, and for sums that are rounded once.
    AtenRoute("aten:float32", "ATen in float32, for float16 and bfloat16",
              lambda p: p.replace(dtype=torch.float32) if p.dtype in (torch.float16, torch.bfloat16) else p,
              "it computes torch.float16 and torch.bfloat16 in torch.float32, got {p.dtype}"),
    # A sequence has no such layout.
    AtenRoute("aten:channels_last", "ATen in channels_last, for contiguous tensors; a sequence is an image of one row",
              _in_channels_last, "its layout is channels_last as it is"),
    # On a GPU cuDNN computes the groups of channels_last tensors one after the other.
    AtenRoute("aten:contiguous", "ATen on contiguous copies, for tensors in channels_last",
              lambda p: p.replace(memory_format=torch.contiguous_format) if p.channels_last else p,
              "its layout is contiguous as it is"),
    # Most of oneDNN's kernels in `aten_defects` go wrong where a border is wide and the image small. With the zeros
    # written out there is no border; that costs one copy of the input, and the kernel stays the fast one.
    _padding,
)  # fmt: skip
