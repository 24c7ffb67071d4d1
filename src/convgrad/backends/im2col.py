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

from itertools import groupby
from math import prod
from typing import cast

import torch
from torch import Tensor

from .._compat import accumulate_dtype, exact_matmul
from ..errors import DtypeError, ShapeError
from ..problem import ConvProblem, Outputs, Pass, Slot
from .base import Arithmetic, Backend, Kernel
from .columns import column_height, columns_size, cut, gather, piece_shape, pieces, positions_in_piece, scatter

__all__ = ["Im2colBackend", "accumulate_dtype", "columns_size", "forward", "grad_input", "grad_weight"]

#: Elements to which every buffer in a workspace is rounded up, so that matrices begin on a cache line.
_ALIGN = 16


class _Buffers:
    """Scratch tensors of the accumulate dtype, cut from one workspace where there is one."""

    def __init__(self, p: ConvProblem, device: torch.device, workspace: Tensor | None = None) -> None:
        self.dtype, self.device = accumulate_dtype(p.dtype), device
        self.rest = None if workspace is None else workspace.view(self.dtype)

    def take(self, *shape: int) -> Tensor:
        if self.rest is None:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        n = prod(shape)
        buffer, self.rest = self.rest[:n], self.rest[n + -n % _ALIGN :]
        return buffer.view(shape)


def _bytes(p: ConvProblem, outputs: Outputs) -> int:
    """Return the bytes that the passes need of `_Buffers`, which they use one after another."""
    positions = prod(piece_shape(p, positions_in_piece(p)))
    sizes = [column_height(p) * positions, p.out_channels * positions, positions, prod(p.weight_shape), p.out_channels]
    if "grad_input" in outputs and accumulate_dtype(p.dtype) != p.dtype:
        sizes.append(piece_shape(p, positions_in_piece(p))[0] * p.in_channels * prod(p.input_size))
    return accumulate_dtype(p.dtype).itemsize * sum(n + -n % _ALIGN for n in sizes)


def _check(p: ConvProblem, **operands: Tensor | None) -> None:
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


def _matrix(p: ConvProblem, weight: Tensor, buffers: _Buffers) -> Tensor:
    """Return the weight as [G, C_out/G, C_in/G * K]."""
    if weight.dtype == buffers.dtype and weight.is_contiguous():
        return weight.view(p.groups, p.out_channels // p.groups, -1)
    return buffers.take(*weight.shape).copy_(weight).view(p.groups, p.out_channels // p.groups, -1)


def _ones(ones: Tensor | None, positions: int, buffers: _Buffers) -> Tensor:
    if ones is None:
        return buffers.take(positions).fill_(1)
    if ones.dtype != buffers.dtype or not ones.is_contiguous() or ones.numel() < positions:
        raise ValueError(
            f"ones must be a contiguous tensor of {buffers.dtype} with at least {positions} elements, "
            f"got {ones.dtype} with {ones.numel()} elements"
        )
    return ones.view(-1)[:positions].fill_(1)


def _setup(p: ConvProblem, columns: Tensor | None, buffers: _Buffers) -> tuple[int, Tensor, Tensor]:
    """Positions in a piece, the columns, and a matrix for output's side of a piece, [C_out * positions]."""
    positions = prod(piece_shape(p, positions_in_piece(p, columns)))
    if columns is None:
        columns = buffers.take(column_height(p) * positions)
    return positions, columns, buffers.take(p.out_channels * positions)


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
    _check(problem, input=input, weight=weight, bias=bias)
    p, buffers = problem, _Buffers(problem, input.device, workspace)
    positions, columns, scratch = _setup(p, columns, buffers)
    matrix = _matrix(p, weight, buffers)
    row = None if bias is None else _ones(ones, positions, buffers)
    output = _result(p, p.output_shape, input)
    for piece in pieces(p, positions):
        n = prod(piece.shape)
        gathered = gather(p, input, piece, columns)
        result = scratch[: p.out_channels * n].view(p.groups, -1, n)  # [G, C_out/G, positions]
        if bias is None or row is None:
            torch.bmm(matrix, gathered, out=result)
        else:
            torch.outer(bias.to(row.dtype), row[:n], out=result.view(-1, n))
            result.baddbmm_(matrix, gathered)
        cut(p, output, piece).copy_(result.view(p.groups, -1, *piece.shape))
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
    _check(problem, grad_output=grad_output, weight=weight, bias=bias)
    p, buffers = problem, _Buffers(problem, grad_output.device, workspace)
    positions, columns, scratch = _setup(p, columns, buffers)
    matrix = _matrix(p, weight, buffers).transpose(1, 2)  # [G, C_in/G * K, C_out/G]
    grad_input = _result(p, p.input_shape, grad_output)
    widened = grad_input.dtype != buffers.dtype
    images = piece_shape(p, positions)[0]
    wide = buffers.take(images, *p.input_shape[1:]) if widened else grad_input
    for at, boxes in groupby(pieces(p, positions), key=lambda piece: piece.images):
        target = (wide[: at.stop - at.start] if widened else grad_input[at]).zero_()
        for piece in boxes:
            n = prod(piece.shape)
            given = scratch[: p.out_channels * n].view(p.groups, -1, *piece.shape).copy_(cut(p, grad_output, piece))
            product_ = columns.view(-1)[: column_height(p) * n].view(p.groups, -1, n)
            torch.bmm(matrix, given.view(p.groups, -1, n), out=product_)
            scatter(p, columns, piece, target)
        if bias is not None:
            target += bias.view(-1, *(1,) * p.ndim)
        if widened:
            grad_input[at] = target
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
    _check(problem, grad_output=grad_output, input=input)
    p, buffers = problem, _Buffers(problem, input.device, workspace)
    positions, columns, scratch = _setup(p, columns, buffers)
    matrix = buffers.take(p.groups, p.out_channels // p.groups, prod(p.weight_shape[1:])).zero_()
    for piece in pieces(p, positions):
        n = prod(piece.shape)
        gathered = gather(p, input, piece, columns).transpose(1, 2)  # [G, positions, C_in/G * K]
        given = scratch[: p.out_channels * n].view(p.groups, -1, *piece.shape).copy_(cut(p, grad_output, piece))
        matrix.baddbmm_(given.view(p.groups, -1, n), gathered)
    return _result(p, p.weight_shape, input).copy_(matrix.view(p.weight_shape))


def _result(p: ConvProblem, shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=p.dtype, device=like.device, memory_format=p.memory_format)


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
        return _bytes(problem, outputs)

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        narrow = problem.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
        tf32 = device.type == "cuda" and narrow and not exact_matmul("cuda")
        return "tf32" if tf32 else "direct"
