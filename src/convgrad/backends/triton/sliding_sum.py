"""The geometry of a problem for a kernel, as plain integers: no tensor, no device, no triton.

Every pass of a depthwise convolution is a sliding sum over a **source** that yields **results**:

- ``forward`` and ``grad_weight`` slide over ``input``; results stand at the positions of ``grad_output``.
  The result q reads the source at ``q * stride + k * dilation - low`` for the kernel position k.
- ``grad_input``, and the sweep of both gradients, slide over ``grad_output``; results stand at the positions of
  ``input``. The result q reads the source at ``(q + low - k * dilation) / stride`` where that is whole.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from ...problem import ConvProblem


class Axis(NamedTuple):
    """One spatial dimension of a sliding sum."""

    result: int
    source: int
    kernel: int
    stride: int
    dilation: int
    low: int
    adjoint: bool

    @property
    def constants(self) -> tuple[int, int, int, int]:
        """The constants of a compiled kernel."""
        return self[2:6]

    @property
    def flipped(self) -> tuple[int, int, int, int]:
        """The constants of the same sum as a forward; of an adjoint one, without a stride, with the flipped kernel."""
        kernel, stride, dilation, low = self.constants
        return (kernel, 1, dilation, (kernel - 1) * dilation - low) if self.adjoint else (kernel, stride, dilation, low)

    @property
    def whole_tap(self) -> int:
        """A kernel position whose reads cover the source exactly once, or -1.

        Only for the adjoint direction without a stride: there the result h reads the source ``h + low - k * dilation``.
        """
        firsts = [k * self.dilation - self.low for k in range(self.kernel if self.adjoint and self.stride == 1 else 0)]
        return next((k for k, first in enumerate(firsts) if 0 <= first <= self.result - self.source), -1)

    def begins(self, results: int) -> bool:
        """Whether patches of so many results begin where the source has a position."""
        return not self.adjoint or results % self.stride == 0 or results >= self.result


@lru_cache(maxsize=4096)
def read(axis: Axis, results: int) -> int:
    """Return the number of source positions that neighboring results span; a dilated kernel skips some."""
    pairs = [(q, k * axis.dilation) for q in range(results) for k in range(axis.kernel)]
    if axis.adjoint:
        return len({q + axis.low - k for q, k in pairs if (q + axis.low - k) % axis.stride == 0})
    return len({q * axis.stride + k for q, k in pairs})


class Geometry(NamedTuple):
    """A sliding sum over depth, height and width; a dimension that is not there has length 1."""

    batch: int
    channels: int  # of the result
    multiplier: int  # output channels per input channel
    adjoint: bool  # the direction of ``grad_input``
    channels_last: bool  # neighbors in memory are channels and not columns
    axes: tuple[Axis, Axis, Axis]
    itemsize: int
    wide: bool  # offsets need 64 bits

    @property
    def kernel_elements(self) -> int:
        return math.prod(axis.kernel for axis in self.axes)

    @property
    def whole_tap(self) -> tuple[int, int, int]:
        """The kernel position whose reads cover the source exactly once, or -1 where there is none."""
        depth, height, width = (axis.whole_tap for axis in self.axes)
        return (depth, height, width) if min(depth, height, width) >= 0 else (-1, -1, -1)


def geometry(problem: ConvProblem, *, adjoint: bool) -> Geometry:
    """Describe one direction of a depthwise problem."""
    axes = [Axis(1, 1, 1, 1, 1, 0, adjoint)] * (3 - problem.ndim)
    for size, out, kernel, stride, low, _, dilation in problem.dims:
        result, source = (size, out) if adjoint else (out, size)
        # A stride is never taken where there is one output: every such problem is one without a stride.
        axes.append(Axis(result, source, kernel, stride if out > 1 else 1, dilation if kernel > 1 else 1, low, adjoint))
    return Geometry(
        problem.batch, problem.in_channels if adjoint else problem.out_channels,
        problem.out_channels // problem.in_channels, adjoint, problem.channels_last, (axes[0], axes[1], axes[2]),
        problem.dtype.itemsize, problem.needs_int64,
    )  # fmt: skip
