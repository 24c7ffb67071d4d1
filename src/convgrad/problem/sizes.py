"""The sizes along one dimension: how many positions a kernel spans, and how many a convolution yields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


def effective_kernel(kernel: int, dilation: int) -> int:
    """Number of positions that a dilated kernel spans."""
    return dilation * (kernel - 1) + 1


def output_length(size: int, kernel: int, stride: int, low: int, high: int, dilation: int) -> int:
    """Output positions along one dimension; zero or less where the kernel does not fit."""
    return (size + low + high - effective_kernel(kernel, dilation)) // stride + 1


def readable(sizes: Sequence[int], padding: Sequence[tuple[int, int]], mode: str) -> bool:
    """Whether an input is as large as a padding mode needs: circular reads at most all of it, reflect one less."""
    least = 1 if mode == "reflect" else 0
    return all(
        n > 0 and (mode == "replicate" or max(pair) + least <= n) for n, pair in zip(sizes, padding, strict=True)
    )


class Dimension(NamedTuple):
    """One spatial dimension of a convolution problem."""

    input: int
    output: int
    kernel: int
    stride: int
    low: int
    high: int
    dilation: int

    @property
    def least_high(self) -> int:
        """The least high padding that gives the output size: no kernel element reads further."""
        return (self.output - 1) * self.stride + effective_kernel(self.kernel, self.dilation) - self.input - self.low

    @property
    def padded(self) -> int:
        """Positions of the input with its padding, crops not counted."""
        return self.input + max(self.low, 0) + max(self.high, 0)


def fields_of(dims: Iterable[Dimension]) -> dict[str, Any]:
    """The fields of a `ConvProblem` with these dimensions."""
    inputs, outputs, kernel, stride, lows, highs, dilation = zip(*dims, strict=True)
    return {
        "input_size": inputs, "output_size": outputs, "kernel_size": kernel, "stride": stride,
        "padding": tuple(zip(lows, highs, strict=True)), "dilation": dilation,
    }  # fmt: skip
