"""How many positions a kernel spans, and how many a convolution yields, along one dimension."""

from __future__ import annotations

__all__ = ["effective_kernel", "output_length"]


def effective_kernel(kernel: int, dilation: int) -> int:
    """Number of positions that a dilated kernel spans."""
    return dilation * (kernel - 1) + 1


def output_length(size: int, kernel: int, stride: int, low: int, high: int, dilation: int) -> int:
    """Output positions along one dimension; zero or less where the kernel does not fit."""
    return (size + low + high - effective_kernel(kernel, dilation)) // stride + 1
