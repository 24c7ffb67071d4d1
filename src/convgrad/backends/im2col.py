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

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import cast

import torch
from torch import Tensor

from .._compat import accumulate_dtype, exact_matmul
from ..errors import DtypeError, ShapeError
from ..problem import OPERANDS, RESULT, ConvProblem, Outputs, Pass, Slot, effective_kernel
from .base import Arithmetic, Backend, Kernel
from .padded_copy import inside, sides

__all__ = ["Im2colBackend", "accumulate_dtype", "columns_size", "forward", "grad_input", "grad_weight"]

#: Bound on the columns and the products of one piece, as long as a single output position fits it.
MAX_BYTES = 64 * 2**20
#: Elements to which every buffer in a workspace is rounded up, so that matrices begin on a cache line.
_ALIGN = 16


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


@lru_cache(maxsize=256)
def _buffers(p: ConvProblem, piece: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the shapes of columns, products and ones of a piece, of the weight and of padded images; and where each
    begins in a workspace, the last number being its end.
    """
    n, padded = prod(piece), [size + low + high for size, (low, high) in zip(p.input_size, sides(p)[0], strict=True)]
    shapes = [(_height(p), n), (p.out_channels, n), (n,), p.weight_shape, (piece[0], p.in_channels, *padded)]
    return shapes, [*accumulate((-(-prod(shape) // _ALIGN) * _ALIGN for shape in shapes), initial=0)]


def piece_shape(p: ConvProblem, positions: int) -> tuple[int, ...]:
    """Return the sizes [n, *box] of a piece: inner dimensions are whole before an outer one is divided."""
    shape: list[int] = []
    for size in (*reversed(p.output_size), p.batch):
        shape.append(min(size, max(1, positions // prod(shape))))
    return tuple(reversed(shape))


def _cut(size: int, n: int) -> list[slice]:
    """Return the pieces of ``n`` positions of a dimension, the last one perhaps smaller."""
    return [slice(i, min(i + n, size)) for i in range(0, size, max(1, n))]


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


def _check_buffer(name: str, t: Tensor, dtype: torch.dtype, least: int, why: str = "") -> None:
    if t.dtype != dtype or not t.is_contiguous() or t.numel() < least:
        raise ValueError(
            f"{name} must be a contiguous tensor of {dtype} with at least {least} elements{why}, "
            f"got {t.dtype} with {t.numel()} elements"
        )


@torch.no_grad()
def _compute(
    p: ConvProblem, pass_: Pass, a: Tensor, b: Tensor, bias: Tensor | None = None, columns: Tensor | None = None,
    ones: Tensor | None = None, workspace: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the result of a pass, in pieces; all memory is the caller's, or of a workspace, or allocated."""
    of: dict[str, Tensor] = dict(zip(OPERANDS[pass_], (a, b), strict=True))
    _check(p, of if bias is None else {**of, "bias": bias})
    dtype, shape, (added, cropped) = accumulate_dtype(p.dtype), piece_shape(p, _most_positions(p)), sides(p)
    if columns is not None:
        why = f" (one output position; {columns_size(p)} for the fewest pieces)"
        _check_buffer("columns", columns, dtype, _height(p), why)
        shape = piece_shape(p, columns.numel() // _height(p))
    if ones is not None and bias is not None:
        _check_buffer("ones", ones, dtype, prod(shape))
    shapes, begins = _buffers(p, shape)
    scratch = None if workspace is None else workspace.view(dtype)

    def memory(i: int, given: Tensor | None = None) -> Tensor:
        """Return the buffer of a shape: the caller's, a part of the workspace, or a new one."""
        if given is None:
            given = None if scratch is None else scratch[begins[i] :]
        if given is None:
            return torch.empty(shapes[i], dtype=dtype, device=a.device)
        return given.view(-1)[: prod(shapes[i])].view(shapes[i])

    whole = p.shape_of(RESULT[pass_])
    result = torch.empty(whole, dtype=p.dtype, device=a.device, memory_format=p.memory_format)
    of[RESULT[pass_]] = result
    weight, input, grad_output = of["weight"], of["input"], of["grad_output"]
    if pass_ == "grad_weight":
        weight = memory(3).zero_()
    elif weight.dtype != dtype or not weight.is_contiguous():
        weight = memory(3).copy_(weight)
    matrix = weight.view(p.groups, p.out_channels // p.groups, -1)
    sums = pass_ == "grad_input"  # of what is read several times
    in_place = not any(map(any, added)) and (not sums or p.dtype is dtype)
    padded = None if in_place else memory(4) if sums else memory(4).zero_()
    read, copy = memory(0, columns).view(-1), memory(1).view(-1)
    row = None if bias is None or sums else memory(2, ones).fill_(1)
    for at in _cut(p.batch, shape[0]):
        images = input[at] if padded is None else padded[: at.stop - at.start]
        if sums:
            images.zero_()
        elif padded is not None:
            inside(images, added).copy_(input[at])
        for box in product(*map(_cut, p.output_size, shape[1:])):
            windows = _windows(p, inside(images, cropped), box)  # [G, C_in/G, *k, n, *box]
            part = grad_output[at][(..., *box)].unflatten(1, (p.groups, -1)).movedim(0, 2)
            made = read[: windows.numel()].view(windows.shape), copy[: part.numel()].view(part.shape)
            _multiply(pass_, matrix, windows, part, *made, bias, row)
        if sums:
            gradient = inside(images, added)
            if bias is not None:
                gradient.add_(bias.view(-1, *(1,) * p.ndim))
            if padded is not None:
                input[at] = gradient
    return result.copy_(weight) if pass_ == "grad_weight" else result


def _multiply(
    pass_: Pass, matrix: Tensor, windows: Tensor, part: Tensor, read: Tensor, copy: Tensor, bias: Tensor | None,
    row: Tensor | None,
) -> None:  # fmt: skip
    """Compute a pass for one piece: of ``windows`` of the images, and a part of the output, [G, C_out/G, n, *box].

    ``read`` and ``copy`` are memory for the columns and a dense part; ``row`` is ones, one a position.
    """
    box = part.dim() - 2
    columns, products = read.flatten(1, -1 - box).flatten(2), copy.flatten(2)  # [G, C_in/G * K or C_out/G, positions]
    if pass_ == "grad_input":
        torch.bmm(matrix.transpose(1, 2), copy.copy_(part).flatten(2), out=columns)
        for k in product(*map(range, windows.shape[2:-box])):  # col2im: one addition for each kernel element
            windows[(slice(None), slice(None), *k)].add_(read[(slice(None), slice(None), *k)])
        return
    read.copy_(windows)
    if pass_ == "grad_weight":
        matrix.baddbmm_(copy.copy_(part).flatten(2), columns.transpose(1, 2))
        return
    if bias is None or row is None:
        torch.bmm(matrix, columns, out=products)
    else:
        torch.outer(bias.to(row.dtype), row[: columns.shape[2]], out=products.flatten(0, 1))
        products.baddbmm_(matrix, columns)
    part.copy_(copy)


def forward(
    problem: ConvProblem, input: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    columns: Tensor | None = None, ones: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return a convolution, with the caller's buffers of im2col. Not differentiable.

    Shape:
        - bias: [C_out] of a plain problem
        - columns: any contiguous shape, of `accumulate_dtype`; `columns_size` elements make the fewest pieces
        - ones: at least one element for every output position of a piece

    Raises:
        ShapeError, DtypeError: operands that are not those of the problem.
        ValueError: a buffer of the wrong dtype, or too small for one output position.

    Equivalent to:
        >>> p = ConvProblem.parse("mb1ic2iw4oc1kw3")
        >>> columns = torch.empty(6)  # one position: twice 2 * 3 elements, in turn
        >>> forward(p, torch.ones(1, 2, 4), torch.ones(1, 2, 3), columns=columns).tolist()
        [[[6.0, 6.0]]]
    """
    return _compute(problem, "forward", input, weight, bias, columns, ones)


def grad_input(
    problem: ConvProblem, grad_output: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    columns: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the input; ``columns``, which PyTorch calls fgrad_input here, and errors as in `forward`.

    Shape:
        - bias: [C_in] of a transposed problem, whose output this is
    """
    return _compute(problem, "grad_input", grad_output, weight, bias, columns)


def grad_weight(
    problem: ConvProblem, grad_output: Tensor, input: Tensor, *, columns: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Return the gradient of the weight; ``columns``, which PyTorch calls finput, and errors as in `forward`."""
    return _compute(problem, "grad_weight", grad_output, input, columns=columns)


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
        pass_: Pass = outputs[0]  # pyright: ignore[reportAssignmentType]
        return lambda a, b, bias=None, workspace=None: _compute(problem, pass_, a, b, bias, workspace=workspace)

    def workspace(self, problem: ConvProblem, outputs: Outputs) -> int:
        _, begins = _buffers(problem, piece_shape(problem, _most_positions(problem)))
        return accumulate_dtype(problem.dtype).itemsize * begins[-1]

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return True

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        narrow = problem.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex32)
        tf32 = device.type == "cuda" and narrow and not exact_matmul("cuda")
        return "tf32" if tf32 else "direct"
