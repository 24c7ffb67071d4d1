"""The positions of one tensor that a shard of another needs, along one dimension: pure functions of integers.

Along one spatial dimension a convolution couples the input position i with the output position o where

    i = o * stride - low + dilation * t        for one of the kernel's elements t.

Let each shard own a range of inputs and a range of outputs. Every such pair must be computed by exactly one process,
and two choices need no more than a halo: the process of o computes it, which needs all inputs that its outputs couple
with; or that of i, which needs all outputs that its inputs couple with. So one side of the convolution stays
where it is and the other side **moves**: a tensor there that is read is extended by what other processes own, and one
there that is written is computed with the same extension, which is then sent back and added. This is all, for every
pass:

- the forward pass extends the input (or sends parts of the output back);
- the input's gradient sends parts of its result back to their owners (or extends the output's gradient);
- the weight's gradient extends the input, and then needs nothing of the output's gradient (or the other way round);
- a transposed convolution is the same with input and output exchanged.

What travels is, for every shard, the positions of its extended range that it does not own: `Exchange.moved` of them
over all shards, each of (elements of the tensor / its length) elements. No exchange by ranges can send less, since each
of these positions is needed by a process that does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..errors import ShapeError
from ..problem import effective_kernel

#: First position, and the one after the last.
Range = tuple[int, int]


class Piece(NamedTuple):
    """A part of an extended range: positions ``start`` to ``stop`` of the whole, of one process."""

    rank: int
    start: int
    stop: int
    #: Where it lies in the extended range, zeros not counted.
    at: int


class Route(NamedTuple):
    """One shard's part in an exchange."""

    #: Its own range.
    have: Range
    #: What its extended range consists of, in order, and how many zeros lie before and after that.
    pieces: tuple[Piece, ...]
    zeros: tuple[int, int]
    #: For each of the shards, the pieces of that one's range that this one sends.
    sent: tuple[tuple[Piece, ...], ...]
    #: How many positions it receives.
    received: int
    #: Whether anything travels, between any two shards.
    travels: bool


def chunks(length: int, parts: int) -> tuple[Range, ...]:
    """The ranges into which DTensor shards a dimension, by the rule of `torch.chunk`; the last ones may be empty."""
    size = -(-length // parts)
    return tuple((min(r * size, length), min((r + 1) * size, length)) for r in range(parts))


def clipped(start: int, end: int, part: Range) -> Range:
    """Return the part of a range between two positions, counted from the first."""
    return min(max(part[0], start), end) - start, min(max(part[1], start), end) - start


class Exchange(NamedTuple):
    """The range that each shard has, and the range that it needs."""

    #: In order, without gaps, from 0 to the length of the whole.
    have: tuple[Range, ...]
    #: Beyond the ends there are zeros, or where it is circular, the other end.
    want: tuple[Range, ...]
    circular: bool = False

    @classmethod
    def of_halo(
        cls, sizes: Sequence[int], before: int | Sequence[int], after: int | Sequence[int], circular: bool = False
    ) -> Exchange:
        """Shards of these sizes, extended at both ends by one number of positions or one each; a negative one cuts."""
        parts = len(sizes)
        pairs = zip(_each("before", before, parts), _each("after", after, parts), strict=True)
        have, want, start = [], [], 0
        for rank, (size, (low, high)) in enumerate(zip(sizes, pairs, strict=True)):
            if size < 0 or size + low + high < 0:
                raise ShapeError(f"shard {rank} of {size} positions cannot be extended by {low} and {high}")
            have.append((start, start + size))
            want.append((start - low, start + size + high))
            start += size
        if circular and not start and any(b > a for a, b in want):
            raise ShapeError("a dimension without positions has no other end: circular padding needs one")
        return cls(tuple(have), tuple(want), circular)

    @property
    def length(self) -> int:
        """The length of the whole dimension."""
        return self.have[-1][1]

    def route(self, rank: int) -> Route:
        """Return the route of one of the shards."""
        return _routes(self)[rank]

    @property
    def moved(self) -> int:
        """The number of positions that are sent, over all shards."""
        return sum(self.route(rank).received for rank in range(len(self.have)))


@lru_cache(maxsize=1024)
def _routes(exchange: Exchange) -> tuple[Route, ...]:
    parts = range(len(exchange.have))
    pieces = [_cut(exchange, *want) for want in exchange.want]
    sent = [[tuple(p for p in pieces[t] if p.rank == s != t) for t in parts] for s in parts]
    received = [sum(p.stop - p.start for s in parts for p in sent[s][t]) for t in parts]
    n = exchange.length
    zeros = [
        (0, 0) if exchange.circular else (min(max(-a, 0), b - a), min(max(b - n, 0), b - a)) for a, b in exchange.want
    ]
    return tuple(
        Route(exchange.have[r], pieces[r], zeros[r], tuple(sent[r]), received[r], any(received)) for r in parts
    )


def _cut(exchange: Exchange, start: int, stop: int) -> tuple[Piece, ...]:
    found: list[Piece] = []
    n = exchange.length
    if not exchange.circular:
        start, stop = max(start, 0), min(stop, n)
    first = start
    while start < stop:
        turn = start // n * n  # 0, unless it is circular
        other, (_, end) = next((r, own) for r, own in enumerate(exchange.have) if own[0] <= start - turn < own[1])
        end = min(stop, end + turn)
        found.append(Piece(other, start - turn, end - turn, start - first))
        start = end
    return tuple(found)


def _each(name: str, value: int | Sequence[int], parts: int) -> Sequence[int]:
    values = [value] * parts if isinstance(value, int) else list(value)
    if len(values) != parts:
        raise ShapeError(f"expected {name} to be one number or one for each of {parts} shards, but got {values}")
    return values


class Line(NamedTuple):
    """A convolution along one dimension; a transposed one is read from output to input."""

    input: int
    output: int
    kernel: int
    stride: int = 1
    low: int = 0  # padding before the first input
    dilation: int = 1

    def reads(self, outputs: Range) -> Range:
        """The inputs, and beyond the ends the padding, from the first to the last that these outputs read."""
        end = (outputs[1] - 1) * self.stride - self.low + effective_kernel(self.kernel, self.dilation)
        return outputs[0] * self.stride - self.low, end

    def inputs_of(self, outputs: Range) -> Range:
        """The smallest range of inputs that holds all that couple with a range of outputs."""
        pairs = self._coupled((0, self.input), outputs)
        return _hull([o * self.stride + shift for *ends, shift in pairs for o in ends])

    def outputs_of(self, inputs: Range) -> Range:
        """The smallest range of outputs that holds all that couple with a range of inputs."""
        return _hull([o for *ends, _ in self._coupled(inputs, (0, self.output)) for o in ends])

    def _coupled(self, inputs: Range, outputs: Range) -> Iterator[tuple[int, int, int]]:
        """Yield for each element of the kernel its first and last output in a range, and its shift of the input."""
        for shift in range(-self.low, self.dilation * self.kernel - self.low, self.dilation):
            first = max(outputs[0], -((shift - inputs[0]) // self.stride))
            last = min(outputs[1] - 1, (inputs[1] - 1 - shift) // self.stride)
            if first <= last:
                yield first, last, shift

    @lru_cache(maxsize=1024)  # noqa: B019 - of values
    def exchange(self, moves: str, parts: int) -> Exchange:
        """The exchange that extends the side that moves, ``input`` or ``output``, so that the other one stays."""
        inputs, outputs = chunks(self.input, parts), chunks(self.output, parts)
        if moves == "input":
            return Exchange(inputs, tuple(map(self.inputs_of, outputs)))
        return Exchange(outputs, tuple(map(self.outputs_of, inputs)))

    def local(self, inputs: Range, outputs: Range) -> tuple[int, int]:
        """The padding, low and high, of the convolution that has these inputs and yields these outputs."""
        start, end = self.reads(outputs)
        return inputs[0] - start, end - inputs[1]


def _hull(positions: list[int]) -> Range:
    return (min(positions), max(positions) + 1) if positions else (0, 0)
