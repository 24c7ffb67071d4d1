"""Convolution as matrix products: im2col, and its adjoint col2im.

Write down, for every output position, the input elements that it reads: a matrix of **columns**,
[C_in/G * K, positions] for each group, K being the number of kernel elements. Then, for each group,

    output      = weight @ columns              weight as [C_out/G, C_in/G * K]
    grad_weight = grad_output @ columns^T       grad_output as [C_out/G, positions]
    columns'    = weight^T @ grad_output        and grad_input sums each element of columns' where it was read

and a bias is the product of a column by a row of **ones**. The columns are K times as large as the input, so they are
made for a piece of the output at a time: as many images, or rows of one image, as fit the bound. ATen's slow
convolution does the same with buffers that it names finput and fgrad_input; here ``columns`` and ``ones`` may be passed
in, and smaller columns only mean more pieces.

16-bit operands are widened to float32 when they enter the columns: every sum is kept in 32 bits and rounded once.

Memory: `MAX_BYTES` for columns, products and ones of a piece, a copy of the weight, and, for 16-bit gradients of
the input, the images of a piece in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from math import prod
from typing import cast

import torch
from torch import Tensor

from .._compat import accumulate_dtype, exact_matmul
from ..errors import DtypeError, ShapeError
from ..problem import ConvProblem, Dimension, Outputs, Pass, Slot
from .base import Arithmetic, Backend, Kernel

__all__ = ["Im2colBackend", "accumulate_dtype", "columns_size", "forward", "grad_input", "grad_weight"]

#: Bound on the columns and the products of one piece, as long as a single output position fits it.
MAX_BYTES = 64 * 2**20
#: Elements to which every buffer in a workspace is rounded up, so that matrices begin on a cache line.
_ALIGN = 16

#: Some images, and a box of their output positions.
Piece = tuple[slice, ...]


def columns_size(problem: ConvProblem) -> int:
    """Return the number of elements of ``columns`` with which every piece is as large as the bound allows.

    Equivalent to:
        >>> columns_size(ConvProblem.parse("mb1ic2ih4oc8kh3"))
        72
    """
    return _height(problem) * prod(piece_shape(problem, _most_positions(problem)))


def _height(p: ConvProblem) -> int:
    return p.in_channels * prod(p.kernel_size)


def _most_positions(p: ConvProblem) -> int:
    return max(1, MAX_BYTES // (accumulate_dtype(p.dtype).itemsize * (_height(p) + p.out_channels + 1)))


def piece_shape(p: ConvProblem, positions: int) -> tuple[int, ...]:
    """Return the sizes [n, *box] of a piece: inner dimensions are whole before an outer one is divided."""
    shape: list[int] = []
    for size in (*reversed(p.output_size), p.batch):
        shape.append(min(size, max(1, positions // prod(shape))))
    return tuple(reversed(shape))


def pieces(p: ConvProblem, shape: Sequence[int]) -> Iterator[Piece]:
    """Yield the pieces of this shape, smaller at the ends, that the output consists of."""
    sizes = zip((p.batch, *p.output_size), shape, strict=True)
    return product(*([slice(i, min(i + n, size)) for i in range(0, size, n)] for size, n in sizes))


class _Call:
    """One call of a pass: its checked operands, its pieces, and scratch tensors, from one workspace if there is one."""

    def __init__(self, p: ConvProblem, columns: Tensor | None, workspace: Tensor | None, **operands: Tensor | None):
        _check(p, operands)
        self.p, self.dtype = p, accumulate_dtype(p.dtype)
        self.device = next(t.device for t in operands.values() if t is not None)
        self.rest = None if workspace is None else workspace.view(self.dtype)
        height, most = _height(p), _most_positions(p)
        if columns is not None:
            self._fits("columns", columns, height, f" (one output position; {columns_size(p)} for the fewest pieces)")
            most = columns.numel() // height
        self.shape = piece_shape(p, most)
        self.positions = prod(self.shape)
        self.columns = self.take(height * self.positions) if columns is None else columns.view(-1)
        self.scratch = self.take(p.out_channels * self.positions)

    def _fits(self, name: str, t: Tensor, least: int, why: str = "") -> None:
        if t.dtype != self.dtype or not t.is_contiguous() or t.numel() < least:
            raise ValueError(
                f"{name} must be a contiguous tensor of {self.dtype} with at least {least} elements{why}, "
                f"got {t.dtype} with {t.numel()} elements"
            )

    def take(self, *shape: int) -> Tensor:
        """Return scratch memory of the accumulate dtype."""
        if self.rest is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        n = prod(shape)
        buffer, self.rest = self.rest[:n], self.rest[n + -n % _ALIGN :]
        return buffer.view(shape)

    def ones(self, given: Tensor | None) -> Tensor:
        """Return a row of ones, in the caller's buffer if there is one."""
        if given is not None:
            self._fits("ones", given, self.positions)
        row = self.take(self.positions) if given is None else given.view(-1)[: self.positions]
        return row.fill_(1)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as [G, C_out/G, C_in/G * K]."""
        if weight.dtype != self.dtype or not weight.is_contiguous():
            weight = self.take(*weight.shape).copy_(weight)
        return weight.view(self.p.groups, self.p.out_channels // self.p.groups, -1)

    def result(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.p.dtype, device=self.device, memory_format=self.p.memory_format)

    def of_output(self, output: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return a piece of the output, a view [G, C_out/G, n, *box], and scratch memory of this shape."""
        part = _grouped(self.p, output[piece[0]][(..., *piece[1:])])
        return part, self.scratch[: part.numel()].view(part.shape)

    def columns_of(self, piece: Piece) -> Tensor:
        """Return the columns of a piece, [G, C_in/G * K, positions]."""
        n = prod(s.stop - s.start for s in piece)
        return self.columns[: _height(self.p) * n].view(self.p.groups, -1, n)

    def gather(self, input: Tensor, piece: Piece) -> Tensor:
        """Return the columns of a piece, filled from the input: im2col."""
        columns = self.columns_of(piece)
        if any(n > 0 for pair in self.p.padding for n in pair):
            columns.zero_()
        for column, read in self._pairs(input[piece[0]], piece):
            column.copy_(read)
        return columns

    def scatter(self, images: Tensor, piece: Piece) -> None:
        """Add the columns of a piece to its images: col2im, one addition for each kernel element, in order."""
        for column, read in self._pairs(images, piece):
            read.add_(column)

    def _pairs(self, images: Tensor, piece: Piece) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each kernel element's part of the columns and of the images, without what lies in the padding."""
        p, box = self.p, piece[1:]
        sizes = [s.stop - s.start for s in piece]
        whole = self.columns_of(piece).view(p.groups, -1, prod(p.kernel_size), *sizes)
        source = _grouped(p, images)
        per_dim = [[_reads(dim, k, part) for k in range(dim.kernel)] for dim, part in zip(p.dims, box, strict=True)]
        for index, reads in enumerate(product(*per_dim)):
            given = [pair for pair in reads if pair]
            if len(given) == len(reads):
                positions, written = zip(*given, strict=True)
                yield whole[(slice(None), slice(None), index, slice(None), *written)], source[(..., *positions)]


def _grouped(p: ConvProblem, tensor: Tensor) -> Tensor:
    """Return a view of [n, G*C, *size] as [G, C, n, *size]."""
    return tensor.unflatten(1, (p.groups, -1)).movedim(0, 2)


def _reads(dim: Dimension, k: int, box: slice) -> tuple[slice, slice] | None:
    """Return the input positions that a box reads through a kernel element, and which of its positions do."""
    stride, start = dim.stride, k * dim.dilation - dim.low  # output o reads input o * stride + start
    first = max(box.start, -(start // stride))
    last = min(box.stop - 1, (dim.input - 1 - start) // stride)
    if first > last:
        return None
    read = slice(first * stride + start, last * stride + start + 1, stride)
    return read, slice(first - box.start, last - box.start + 1)


def _check(p: ConvProblem, operands: dict[str, Tensor | None]) -> None:
    """Check that each operand, by the name of its slot or ``bias``, is of the problem's shape and dtype."""
    devices = {t.device for t in operands.values() if t is not None}
    if len(devices) > 1:
        raise DtypeError(f"Expected all tensors to be on the same device, but found {sorted(map(str, devices))}")
    for name, t in operands.items():
        if t is None:
            continue
        shape = p.result_shape("grad_bias") if name == "bias" else p.shape_of(cast("Slot", name))
        if t.shape != shape:
            raise ShapeError(f"Expected {name} of size {list(shape)} for the problem {p}, but got {list(t.shape)}")
        if t.dtype != p.dtype:
            raise DtypeError(f"Expected {name} of {p.dtype} for the problem {p}, but got {t.dtype}")


@torch.no_grad()
def forward(
    problem: ConvProblem,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    columns: Tensor | None = None,
    ones: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Return a convolution, with the caller's buffers of im2col. Not differentiable.

    Shape:
        - bias: [C_out] of a plain problem
        - columns: any contiguous shape, of `accumulate_dtype`; `columns_size` elements make the fewest pieces
        - ones: at least one element for every output position of a piece
        - workspace: all buffers in one, of as many bytes as the backend says

    Raises:
        ShapeError, DtypeError: operands that are not those of the problem.
        ValueError: a buffer of the wrong dtype, or too small for one output position.

    Equivalent to:
        >>> p = ConvProblem.parse("mb1ic2iw4oc1kw3")
        >>> columns = torch.empty(6)  # one position: twice 2 * 3 elements, in turn
        >>> forward(p, torch.ones(1, 2, 4), torch.ones(1, 2, 3), columns=columns).tolist()
        [[[6.0, 6.0]]]
    """
    p, call = problem, _Call(problem, columns, workspace, input=input, weight=weight, bias=bias)
    matrix = call.matrix(weight)
    row = None if bias is None else call.ones(ones)
    output = call.result(p.output_shape)
    for piece in pieces(p, call.shape):
        gathered = call.gather(input, piece)
        part, scratch = call.of_output(output, piece)
        result = scratch.view(p.groups, -1, gathered.shape[2])  # [G, C_out/G, positions]
        if bias is None or row is None:
            torch.bmm(matrix, gathered, out=result)
        else:
            torch.outer(bias.to(row.dtype), row[: gathered.shape[2]], out=result.view(-1, gathered.shape[2]))
            result.baddbmm_(matrix, gathered)
        part.copy_(scratch)
    return output


@torch.no_grad()
def grad_input(
    problem: ConvProblem,
    grad_output: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    columns: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the input; see `forward` for ``columns``, which PyTorch calls fgrad_input here.

    Shape:
        - bias: [C_in] of a transposed problem, whose output this is

    Raises:
        ShapeError, DtypeError: operands that are not those of the problem.
        ValueError: ``columns`` of the wrong dtype, or too small for one output position.
    """
    p, call = problem, _Call(problem, columns, workspace, grad_output=grad_output, weight=weight, bias=bias)
    matrix = call.matrix(weight).transpose(1, 2)  # [G, C_in/G * K, C_out/G]
    grad_input = call.result(p.input_shape)
    wide = None if grad_input.dtype == call.dtype else call.take(call.shape[0], *p.input_shape[1:])
    for at, boxes in groupby(pieces(p, call.shape), key=lambda piece: piece[0]):
        images = grad_input[at]
        sums = (images if wide is None else wide[: len(images)]).zero_()
        for piece in boxes:
            part, scratch = call.of_output(grad_output, piece)
            columns = call.columns_of(piece)
            torch.bmm(matrix, scratch.copy_(part).view(p.groups, -1, columns.shape[2]), out=columns)
            call.scatter(sums, piece)
        if bias is not None:
            sums += bias.view(-1, *(1,) * p.ndim)
        if wide is not None:
            images.copy_(sums)
    return grad_input


@torch.no_grad()
def grad_weight(
    problem: ConvProblem,
    grad_output: Tensor,
    input: Tensor,
    *,
    columns: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the weight; see `forward` for ``columns``, which PyTorch calls finput.

    Raises:
        ShapeError, DtypeError: operands that are not those of the problem.
        ValueError: ``columns`` of the wrong dtype, or too small for one output position.
    """
    p, call = problem, _Call(problem, columns, workspace, grad_output=grad_output, input=input)
    matrix = call.take(p.groups, p.out_channels // p.groups, prod(p.weight_shape[1:])).zero_()
    for piece in pieces(p, call.shape):
        gathered = call.gather(input, piece).transpose(1, 2)  # [G, positions, C_in/G * K]
        part, scratch = call.of_output(grad_output, piece)
        matrix.baddbmm_(scratch.copy_(part).view(p.groups, -1, gathered.shape[1]), gathered)
    return call.result(p.weight_shape).copy_(matrix.view(p.weight_shape))


class Im2colBackend(Backend):
    """Matrix products over columns, made for a bounded piece of the output at a time."""

    name = "im2col"
    summary = "matrix products over columns of bounded size, on any device"
    layouts = ("strided",)

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        reasons: list[str] = []
        dtype = problem.dtype
        if not (dtype.is_floating_point or dtype.is_complex) and (dtype is torch.bool or device.type != "cpu"):
            reasons.append(f"there is no matrix product of {dtype} on {device.type}")
        if dtype.is_floating_point and dtype.itemsize == 1:
            reasons.append(f"there is no matrix product of {dtype} without scales")
        if device.type == "cpu" and accumulate_dtype(dtype) is torch.float32 and not exact_matmul():
            reasons.append("PyTorch may compute its matrix products in 16 bits here")
        return reasons

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        def one_pass(a: Tensor, b: Tensor, bias: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
            if outputs == ("grad_weight",):
                return grad_weight(problem, a, b, workspace=workspace)
            return (forward if outputs == ("forward",) else grad_input)(problem, a, b, bias, workspace=workspace)

        return one_pass

    def workspace(self, problem: ConvProblem, outputs: Outputs) -> int:
        p, dtype = problem, accumulate_dtype(problem.dtype)
        shape = piece_shape(p, _most_positions(p))
        n = prod(shape)
        sizes = [_height(p) * n, p.out_channels * n, n, prod(p.weight_shape), p.out_channels]
        if "grad_input" in outputs and dtype != p.dtype:
            sizes.append(prod((shape[0], *p.input_shape[1:])))
        return dtype.itemsize * sum(n + -n % _ALIGN for n in sizes)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        narrow = problem.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
        tf32 = device.type == "cuda" and narrow and not exact_matmul("cuda")
        return "tf32" if tf32 else "direct"
