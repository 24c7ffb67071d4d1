"""Columns: pieces of an output, the input elements that each position reads, and their adjoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from torch import Tensor

from .._compat import accumulate_dtype
from ..problem import ConvProblem
from ..sizes import Dimension

#: Bound on the columns and the products of one piece, as long as a single output position fits it.
MAX_BYTES = 64 * 2**20


def columns_size(problem: ConvProblem) -> int:
    """Return the number of elements of ``columns`` with which every piece is as large as the bound allows.

    Equivalent to:
        >>> columns_size(ConvProblem.parse("mb1ic2ih4oc8kh3"))
        72
    """
    return column_height(problem) * prod(piece_shape(problem, positions_in_piece(problem)))


# ---- pieces of the output ----------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Some images, and a box of their output positions."""

    images: slice
    box: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in (self.images, *self.box))


def column_height(p: ConvProblem) -> int:
    return p.in_channels * prod(p.kernel_size)


def positions_in_piece(p: ConvProblem, columns: Tensor | None = None) -> int:
    """Return the output positions in a piece: as many as the bound allows, or as the given columns hold."""
    height = column_height(p)
    if columns is None:
        item = accumulate_dtype(p.dtype).itemsize
        return max(1, MAX_BYTES // (item * (height + p.out_channels + 1)))
    if columns.dtype != accumulate_dtype(p.dtype) or not columns.is_contiguous() or columns.numel() < height:
        raise ValueError(
            f"columns must be a contiguous tensor of {accumulate_dtype(p.dtype)} with at least {height} elements "
            f"(one output position; {columns_size(p)} for the fewest pieces), "
            f"got {columns.dtype} with {columns.numel()} elements"
        )
    return columns.numel() // height


def piece_shape(p: ConvProblem, positions: int) -> tuple[int, ...]:
    """Return sizes [n, *box]: inner dimensions are whole before an outer one is divided."""
    shape: list[int] = []
    for size in (*reversed(p.output_size), p.batch):
        shape.append(min(size, max(1, positions // prod(shape))))
    return tuple(reversed(shape))


def pieces(p: ConvProblem, positions: int) -> Iterator[Piece]:
    sizes, steps = (p.batch, *p.output_size), piece_shape(p, positions)
    ranges = [
        [slice(i, min(i + step, size)) for i in range(0, size, step)] for size, step in zip(sizes, steps, strict=True)
    ]
    for images, *box in product(*ranges):
        yield Piece(images, tuple(box))


def _taps(p: ConvProblem, box: tuple[slice, ...]) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield each kernel element, the input positions that it reads, and their positions in the box; without padding."""
    per_dim = [[_tap(dim, k, part) for k in range(dim.kernel)] for dim, part in zip(p.dims, box, strict=True)]
    for index, tap in enumerate(product(*per_dim)):
        if None not in tap:
            yield index, tuple(t[0] for t in tap if t), tuple(t[1] for t in tap if t)


def _tap(dim: Dimension, k: int, box: slice) -> tuple[slice, slice] | None:
    stride, start = dim.stride, k * dim.dilation - dim.low  # output o reads input o * stride + start
    first = max(box.start, -(start // stride))
    last = min(box.stop - 1, (dim.input - 1 - start) // stride)
    if first > last:
        return None
    read = slice(first * stride + start, last * stride + start + 1, stride)
    return read, slice(first - box.start, last - box.start + 1)


# ---- columns -----------------------------------------------------------------------------------


def _grouped(p: ConvProblem, tensor: Tensor) -> Tensor:
    """Return a view of [n, G*C, *size] as [G, C, n, *size]."""
    return tensor.unflatten(1, (p.groups, -1)).movedim(0, 2)


def gather(p: ConvProblem, input: Tensor, piece: Piece, columns: Tensor) -> Tensor:
    """im2col: the columns of a piece, [G, C_in/G * K, positions]."""
    whole = _column_view(p, piece, columns)
    if any(n > 0 for pair in p.padding for n in pair):
        whole.zero_()
    source = _grouped(p, input[piece.images])
    for index, read, write in _taps(p, piece.box):
        whole[(slice(None), slice(None), index, slice(None), *write)] = source[(..., *read)]
    return whole.view(p.groups, -1, prod(piece.shape))


def scatter(p: ConvProblem, columns: Tensor, piece: Piece, grad_input: Tensor) -> None:
    """col2im: add the columns of a piece to the images [n, C_in, *in]; one addition per kernel element, in order.

    Where no input element is read twice, the images still hold the zeros that they began with, and are only written.
    """
    whole = _column_view(p, piece, columns)
    target = _grouped(p, grad_input)
    read_once = all(dim.kernel <= dim.stride // gcd(dim.stride, dim.dilation) for dim in p.dims)
    for index, read, write in _taps(p, piece.box):
        added = whole[(slice(None), slice(None), index, slice(None), *write)]
        if read_once:
            target[(..., *read)] = added
        else:
            target[(..., *read)] += added


def _column_view(p: ConvProblem, piece: Piece, columns: Tensor) -> Tensor:
    """[G, C_in/G, K, n, *box]"""
    height = column_height(p)
    return columns.view(-1)[: height * prod(piece.shape)].view(
        p.groups, p.in_channels // p.groups, prod(p.kernel_size), *piece.shape
    )


def cut(p: ConvProblem, output: Tensor, piece: Piece) -> Tensor:
    """Return the piece of a tensor of output's shape, as a view [G, C_out/G, n, *box]."""
    return _grouped(p, output[piece.images][(..., *piece.box)])
