"""What a kernel launch needs to know of a problem, as plain integers: no tensor, no device, no triton.

Every depthwise pass is a sliding sum over a **source** that yields **results**:

- ``forward`` and ``grad_weight`` slide over ``input``; results stand at the positions of ``grad_output``.
  The result q reads the source at ``q * stride + k * dilation - low`` for the kernel position k.
- ``grad_input``, and the sweep of both gradients, slide over ``grad_output``; results stand at the positions of
  ``input``. With stride s only every s-th result reads the same kernel positions, so results are taken in s
  **phases**: the result ``q * s + phase`` reads the kernel positions ``first + t * (s / g)`` at the source
  ``q + offset - t * (dilation / g)``, where g is the greatest common divisor of s and the dilation. A phase is a
  convolution without a stride again, and no product with an inserted zero is ever computed.

So both directions are one sum over t of ``source[q * src_step + t * tap_step + ...]``: one kernel serves them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...problem import INT32_MAX, ConvProblem

__all__ = ["Axis", "Geometry", "geometry", "view_5d"]


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
    def phases(self) -> int:
        return self.stride if self.adjoint else 1

    @property
    def tap_stride(self) -> int:
        """Distance, in kernel positions, of two taps that one result reads."""
        return self.stride // math.gcd(self.stride, self.dilation) if self.adjoint else 1

    @property
    def taps(self) -> int:
        """Kernel positions that one result reads, at most."""
        return -(-self.kernel // self.tap_stride)

    @property
    def src_step(self) -> int:
        return 1 if self.adjoint else self.stride

    @property
    def tap_step(self) -> int:
        """Distance in the source of two such taps."""
        if not self.adjoint:
            return self.dilation
        return -(self.dilation // math.gcd(self.stride, self.dilation))

    @property
    def per_phase(self) -> int:
        """Results of the largest phase."""
        return -(-self.result // self.phases)

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


@dataclass(frozen=True)
class Geometry:
    """A sliding sum over depth, height and width; a dimension that is not there has length 1.

    Args:
        channels: of the result.
        multiplier: output channels per input channel.
        adjoint: the direction of ``grad_input``.
        channel_lanes: neighbouring lanes of a program are neighbouring channels (channels_last) and not
            neighbouring columns.
        kept: the spatial dimension that each of depth, height and width stands for; -1 where there is none.
    """

    batch: int
    channels: int
    multiplier: int
    adjoint: bool
    channel_lanes: bool
    axes: tuple[Axis, Axis, Axis]
    kept: tuple[int, int, int]
    itemsize: int
    double: bool
    wide: bool

    @property
    def source_channels(self) -> int:
        return self.channels * self.multiplier if self.adjoint else self.channels // self.multiplier

    @property
    def weight_channels(self) -> int:
        return self.channels * self.multiplier if self.adjoint else self.channels

    @property
    def kernel_elements(self) -> int:
        return math.prod(axis.kernel for axis in self.axes)

    @property
    def phases(self) -> int:
        return math.prod(axis.phases for axis in self.axes)

    def field(self, name: str) -> tuple[int, int, int]:
        """One attribute of the three axes."""
        depth, height, width = (int(getattr(axis, name)) for axis in self.axes)
        return (depth, height, width)


def geometry(problem: ConvProblem, *, adjoint: bool, channel_lanes: bool, wide: bool = False) -> Geometry:
    """Describe one direction of a depthwise problem.

    Args:
        channel_lanes: as in `Geometry`; a 1-D problem may have either.
        wide: offsets need 64 bits, because of the operands' strides, whatever the problem says.
    """
    sizes = zip(
        problem.input_size,
        problem.output_size,
        problem.kernel_size,
        problem.stride,
        problem.dilation,
        problem.padding,
        strict=True,
    )
    axes: list[Axis] = []
    kept: list[int] = []
    for i, (size, out, kernel, stride, dilation, (low, _)) in enumerate(sizes):
        if (size, out, kernel, low) == (1, 1, 1, 0):
            continue
        result, source = (size, out) if adjoint else (out, size)
        # A stride is never taken where there is one output: every such problem is one without a stride.
        axes.append(Axis(result, source, kernel, stride if out > 1 else 1, dilation if kernel > 1 else 1, low, adjoint))
        kept.append(i)
    # One dimension is slid along in registers (height) when the lanes are channels, along the lanes (width) otherwise.
    unit = Axis(1, 1, 1, 1, 1, 0, adjoint)
    if len(axes) == 1 and channel_lanes:
        axes.append(unit)
        kept.append(-1)
    missing = 3 - len(axes)
    depth, height, width = [unit] * missing + axes
    kept = [-1] * missing + kept
    return Geometry(
        batch=problem.batch,
        channels=problem.in_channels if adjoint else problem.out_channels,
        multiplier=problem.out_channels // problem.in_channels,
        adjoint=adjoint,
        channel_lanes=channel_lanes,
        axes=(depth, height, width),
        kept=(kept[0], kept[1], kept[2]),
        itemsize=problem.dtype.itemsize,
        double=problem.dtype == torch.float64,
        wide=wide or problem.needs_int64,
    )


def view_5d(g: Geometry, tensor: Tensor) -> tuple[int, int, int, int, int]:
    """Strides of a tensor (N, C, *space) along batch, channel, depth, height and width."""
    strides = tensor.stride()
    depth, height, width = (strides[2 + i] if i >= 0 else 0 for i in g.kept)
    return (strides[0], strides[1], depth, height, width)


def reach(tensor: Tensor) -> int:
    """Largest offset of an element of a tensor."""
    return sum((size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def needs_wide(*tensors: Tensor) -> bool:
    return any(reach(t) > INT32_MAX for t in tensors)
