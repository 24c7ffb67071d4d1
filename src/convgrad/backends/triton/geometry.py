"""The geometry of a problem for a kernel, as plain integers: no tensor, no device, no triton.

Every pass of a depthwise convolution is a sliding sum over a **source** that yields **results**:

- ``forward`` and ``grad_weight`` slide over ``input``; results stand at the positions of ``grad_output``.
  The result q reads the source at ``q * stride + k * dilation - low`` for the kernel position k.
- ``grad_input``, and the sweep of both gradients, slide over ``grad_output``; results stand at the positions of
  ``input``. The result q reads the source at ``(q + low - k * dilation) / stride`` where that is whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
        return (self.kernel, self.stride, self.dilation, self.low)

    @property
    def whole_tap(self) -> int:
        """A kernel position whose reads cover the source exactly once, or -1.

        Only for the adjoint direction without a stride: there the result h reads the source ``h + low - k * dilation``.
        """
        if not self.adjoint or self.stride != 1:
            return -1
        for k in range(self.kernel):
            first = k * self.dilation - self.low
            if first >= 0 and first + self.source <= self.result:
                return k
        return -1

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


@dataclass(frozen=True)
class Geometry:
    """A sliding sum over depth, height and width; a dimension that is not there has length 1.

    Args:
        channels: of the result.
        multiplier: output channels per input channel.
        adjoint: the direction of ``grad_input``.
        channels_last: neighbors in memory are channels and not columns.
        wide: offsets need 64 bits.
    """

    batch: int
    channels: int
    multiplier: int
    adjoint: bool
    channels_last: bool
    axes: tuple[Axis, Axis, Axis]
    itemsize: int
    wide: bool

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
    axes: list[Axis] = []
    for size, out, kernel, stride, low, _, dilation in problem.dims:
        result, source = (size, out) if adjoint else (out, size)
        # A stride is never taken where there is one output: every such problem is one without a stride.
        axes.append(Axis(result, source, kernel, stride if out > 1 else 1, dilation if kernel > 1 else 1, low, adjoint))
    depth, height, width = [Axis(1, 1, 1, 1, 1, 0, adjoint)] * (3 - len(axes)) + axes
    return Geometry(
        batch=problem.batch,
        channels=problem.in_channels if adjoint else problem.out_channels,
        multiplier=problem.out_channels // problem.in_channels,
        adjoint=adjoint,
        channels_last=problem.channels_last,
        axes=(depth, height, width),
        itemsize=problem.dtype.itemsize,
        wide=problem.needs_int64,
    )
