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

Memory: `MAX_BYTES` for columns, products and ones of a piece, a copy of the weight, and the images of a piece with
their padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product
from math import prod
from typing import cast

import torch
from torch import Tensor

from .._compat import accumulate_dtype, exact_matmul
from ..errors import DtypeError, ShapeError
from ..problem import ConvProblem, Outputs, Pass, Slot, effective_kernel
from .base import Arithmetic, Backend, Kernel
from .padding import inside, sides

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


def _padded_shape(p: ConvProblem, images: int) -> tuple[int, ...]:
    added = zip(p.input_size, sides(p)[0], strict=True)
    return (images, p.in_channels, *(n + low + high for n, (low, high) in added))


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


def _windows(p: ConvProblem, images: Tensor, box: Sequence[slice]) -> Tensor:
    """Return a view [G, C_in/G, *k, n, *box] of what each output position of a box reads of padded images."""
    d = p.ndim
    for i, (dim, part) in enumerate(zip(p.dims, box, strict=True), start=2):
        images = images.unfold(i, effective_kernel(dim.kernel, dim.dilation), dim.stride)
        images = images[(slice(None),) * i + (part,)][..., :: dim.dilation]
    images = images.unflatten(1, (p.groups, -1))  # [n, G, C_in/G, *box, *k]
    return images.permute(1, 2, *range(3 + d, 3 + 2 * d), 0, *range(3, 3 + d))


def _check(p: ConvProblem, given: dict[str, Tensor]) -> None:
    """Check that each operand, by the name of its slot or ``bias``, is of the problem's shape and dtype."""
    if len(devices := {str(t.device) for t in given.values()}) > 1:
        raise DtypeError(f"Expected all tensors to be on the same device, but found {sorted(devices)}")
    for name, t in given.items():
        shape = p.result_shape("grad_bias") if name == "bias" else p.shape_of(cast("Slot", name))
        if t.shape != shape:
            raise ShapeError(f"Expected {name} of size {list(shape)} for the problem {p}, but got {list(t.shape)}")
        if t.dtype != p.dtype:
            raise DtypeError(f"Expected {name} of {p.dtype} for the problem {p}, but got {t.dtype}")


class _Call:
    """One call of a pass: its checked operands, its pieces, and scratch tensors, from one workspace if there is one."""

    def __init__(self, p: ConvProblem, columns: Tensor | None, workspace: Tensor | None, **operands: Tensor | None):
        given = {name: t for name, t in operands.items() if t is not None}
        _check(p, given)
        self.p, self.dtype, self.device = p, accumulate_dtype(p.dtype), next(iter(given.values())).device
        self.rest = None if workspace is None else workspace.view(self.dtype)
        height, most = _height(p), _most_positions(p)
        if columns is not None:
            self._fits("columns", columns, height, f" (one output position; {columns_size(p)} for the fewest pieces)")
            most = columns.numel() // height
        self.shape = piece_shape(p, most)
        self.columns = self.take(height * prod(self.shape)) if columns is None else columns.view(-1)
        self.copies = self.take(p.out_channels * prod(self.shape))

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
        n = prod(self.shape)
        if given is not None:
            self._fits("ones", given, n)
        return (self.take(n) if given is None else given.view(-1)[:n]).fill_(1)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight as [G, C_out/G, C_in/G * K]."""
        if weight.dtype != self.dtype or not weight.is_contiguous():
            weight = self.take(*weight.shape).copy_(weight)
        return weight.view(self.p.groups, self.p.out_channels // self.p.groups, -1)

    def result(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self.p.dtype, device=self.device, memory_format=self.p.memory_format)

    def by_images(self) -> Iterator[tuple[slice, Iterator[Piece]]]:
        """Yield images, and the pieces of their output."""
        return groupby(pieces(self.p, self.shape), key=lambda piece: piece[0])

    def tensors(self, images: Tensor, output: Tensor, piece: Piece) -> tuple[Tensor, ...]:
        """Return two pairs: what a piece reads of padded images, [G, C_in/G, *k, n, *box], and memory for its columns;
        its part of the output, [G, C_out/G, n, *box], and memory for a copy.
        """
        windows = _windows(self.p, images, piece[1:])
        part = output[piece[0]][(..., *piece[1:])].unflatten(1, (self.p.groups, -1)).movedim(0, 2)
        columns, copy = self.columns[: windows.numel()], self.copies[: part.numel()]
        return windows, columns.view(windows.shape), part, copy.view(part.shape)

    def gathered(self, input: Tensor, output: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each piece's columns, [G, C_in/G * K, positions], filled (im2col), and the last two of `tensors`."""
        added, cropped = sides(self.p)
        padded = self.take(*_padded_shape(self.p, self.shape[0])).zero_() if any(map(any, added)) else None
        for at, of_these in self.by_images():
            images = input[at]
            if padded is not None:
                images = padded[: len(images)]
                inside(images, added).copy_(input[at])
            for piece in of_these:
                windows, columns, part, copy = self.tensors(inside(images, cropped), output, piece)
                yield _matrices(columns.copy_(windows), self.p), part, copy


def _matrices(columns: Tensor, p: ConvProblem) -> Tensor:
    """Return columns of a piece as [G, C_in/G * K, positions]."""
    return columns.flatten(1, 1 + p.ndim).flatten(2)


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
    call = _Call(problem, columns, workspace, input=input, weight=weight, bias=bias)
    matrix, output = call.matrix(weight), call.result(problem.output_shape)
    row = None if bias is None else call.ones(ones)
    for unfolded, part, copy in call.gathered(input, output):
        products = copy.flatten(2)  # [G, C_out/G, positions]
        if bias is None or row is None:
            torch.bmm(matrix, unfolded, out=products)
        else:
            torch.outer(bias.to(row.dtype), row[: unfolded.shape[2]], out=products.flatten(0, 1))
            products.baddbmm_(matrix, unfolded)
        part.copy_(copy)
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
        ShapeError, DtypeError, ValueError: as in `forward`.
    """
    call = _Call(problem, columns, workspace, grad_output=grad_output, weight=weight, bias=bias)
    matrix, grad_input = call.matrix(weight).transpose(1, 2), call.result(problem.input_shape)
    added, cropped = sides(problem)
    in_place = call.dtype is problem.dtype and not any(map(any, added))
    padded = None if in_place else call.take(*_padded_shape(problem, call.shape[0]))
    for at, of_these in call.by_images():
        images = (grad_input[at] if padded is None else padded[: at.stop - at.start]).zero_()
        for piece in of_these:
            windows, unfolded, part, copy = call.tensors(inside(images, cropped), grad_output, piece)
            torch.bmm(matrix, copy.copy_(part).flatten(2), out=_matrices(unfolded, problem))
            for k in product(*map(range, problem.kernel_size)):  # col2im: one addition for each kernel element
                windows[(slice(None), slice(None), *k)].add_(unfolded[(slice(None), slice(None), *k)])
        sums = inside(images, added)
        if bias is not None:
            sums.add_(bias.view(-1, *(1,) * problem.ndim))
        if padded is not None:
            grad_input[at] = sums
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
        ShapeError, DtypeError, ValueError: as in `forward`.
    """
    call = _Call(problem, columns, workspace, grad_output=grad_output, input=input)
    grad_weight = call.take(*problem.weight_shape).zero_()
    for unfolded, part, copy in call.gathered(input, grad_output):
        call.matrix(grad_weight).baddbmm_(copy.copy_(part).flatten(2), unfolded.transpose(1, 2))
    return call.result(problem.weight_shape).copy_(grad_weight)


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
        passes: dict[str, Kernel] = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}
        compute = partial(passes[outputs[0]], problem)
        if outputs == ("grad_weight",):
            return lambda a, b, bias=None, workspace=None: compute(a, b, workspace=workspace)
        return lambda a, b, bias=None, workspace=None: compute(a, b, bias, workspace=workspace)

    def workspace(self, problem: ConvProblem, outputs: Outputs) -> int:
        p = problem
        shape = piece_shape(p, _most_positions(p))
        n = prod(shape)
        sizes = _height(p) * n, p.out_channels * n, n, prod(p.weight_shape), prod(_padded_shape(p, shape[0]))
        return accumulate_dtype(p.dtype).itemsize * sum(n + -n % _ALIGN for n in sizes)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        narrow = problem.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
        tf32 = device.type == "cuda" and narrow and not exact_matmul("cuda")
        return "tf32" if tf32 else "direct"
