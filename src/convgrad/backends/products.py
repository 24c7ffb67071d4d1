"""Convolutions that are one product of matrices: pointwise ones, and those whose kernels do not overlap.

Where kernels read no padding and do not overlap, each result is the product of one patch of the input. So are patch
embeddings of images and videos, and transposed convolutions with kernel = stride, which are ``grad_input`` of such a
problem. PyTorch calls its convolutions for them, which on a GPU may have no fast kernel (3-D in 16 bits). Here the
patches are written as rows, in one copy of the input (none where a patch is a pixel, or all of it), and multiplied.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from .._compat import exact_matmul
from ..problem import ConvProblem, Outputs, Pass
from ..settings import cudnn_allows_tf32
from .base import Arithmetic, Backend, Kernel


class AtenPatchesBackend(Backend):
    """A convolution with kernel = stride as PyTorch's matrix product of its patches."""

    name = "aten:patches"
    summary = "PyTorch's matrix product of patches, for kernels that do not overlap"
    from_pytorch = True
    layouts = ("strided",)

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        if not of_patches(problem):
            return ["it computes kernels of more than one element with stride = kernel, without padding and groups"]
        if not problem.dtype.is_floating_point or problem.dtype.itemsize == 1:
            return [f"it computes floating-point numbers of 16 bits and more, got {problem.dtype}"]
        if device.type == "cpu":
            return [] if exact_matmul() else ["PyTorch may compute its matrix products in 16 bits here"]
        rounded = self.arithmetic(problem, "forward", device) == "tf32"
        return ["it would multiply in TF32, which is forbidden here"] if rounded and not cudnn_allows_tf32() else []

    def arithmetic(self, problem: ConvProblem, pass_: Pass, device: torch.device) -> Arithmetic:
        if problem.dtype.itemsize == 2:
            return "low-precision accumulation"
        narrow = problem.dtype is torch.float32 and device.type == "cuda" and not exact_matmul("cuda")
        return "tf32" if narrow else "direct"

    def fuses_bias(self, problem: ConvProblem) -> bool:
        return problem.bias_pass == "forward" or prod(problem.kernel_size) == 1

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        p = problem
        covered = [out * k for out, k in zip(p.output_size, p.kernel_size, strict=True)]
        left_over = [n - size for n, size in zip(p.input_size, covered, strict=True)]
        wide = [k for k in p.kernel_size if k > 1]
        size = p.in_channels * prod(wide)  # of a patch
        # A split input is [N, C, out, k, out, k, ...] without each k of 1. A patch is [C, *k], or [*k, C] in
        # channels_last.
        outs = [2 + i + sum(k > 1 for k in p.kernel_size[:i]) for i in range(p.ndim)]
        patch = [1, *(i + 1 for i, k in zip(outs, p.kernel_size, strict=True) if k > 1)]
        in_patch = [p.in_channels, *wide]
        if p.channels_last:
            patch, in_patch = patch[1:] + patch[:1], in_patch[1:] + in_patch[:1]
        # Else one product for each image, whose result is then in its layout.
        in_rows = p.channels_last or prod(p.output_size) == 1
        order = (0, *outs, *patch) if in_rows else (0, *patch, *outs)
        back = [order.index(i) for i in range(len(order))]

        def split(x: Tensor) -> Tensor:
            if not wide and not any(left_over):
                return x
            for i, out, k in zip(outs, p.output_size, p.kernel_size, strict=True):
                x = x.narrow(i, 0, out * k) if x.shape[i] != out * k else x
                x = x.unflatten(i, (out, k)) if k > 1 else x
            return x

        def joined(split: Tensor) -> Tensor:
            """Return the input from its parts, in its layout, with zeros that no patch has read."""
            if p.channels_last:
                whole = split.movedim(1, -1).reshape(p.batch, *covered, p.in_channels).movedim(-1, 1)
            else:
                whole = split.reshape(p.batch, p.in_channels, *covered)
            if any(left_over):
                whole = F.pad(whole, [side for n in reversed(left_over) for side in (0, n)])
            return whole.contiguous(memory_format=p.memory_format)

        def rows(x: Tensor) -> Tensor:  # [N * pixels, size]
            return split(x).permute(0, *outs, *patch).reshape(-1, size)

        def images(x: Tensor) -> Tensor:  # [N, size, pixels]
            return (split(x).permute(0, *patch, *outs) if wide else split(x)).reshape(p.batch, size, -1)

        def pixels(t: Tensor) -> Tensor:  # [N * pixels, C_out]
            return t.movedim(1, -1).reshape(-1, p.out_channels)

        def matrix(weight: Tensor) -> Tensor:  # [C_out, size]
            return (weight.movedim(1, -1) if p.channels_last else weight).reshape(p.out_channels, size)

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            if in_rows:
                found = _product(rows(x), matrix(weight).t(), bias)
                return found.view(p.batch, *p.output_size, p.out_channels).movedim(-1, 1)
            return _products(matrix(weight), images(x), bias).view(p.output_shape)

        def grad_input(g: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            if in_rows:
                found = _product(pixels(g), matrix(weight), bias).view(p.batch, *p.output_size, *in_patch)
            else:
                found = _products(matrix(weight).t(), g.reshape(p.batch, p.out_channels, -1), bias)
                found = found.view(p.batch, *in_patch, *p.output_size)
            return joined(found.permute(back))

        def grad_weight(g: Tensor, x: Tensor, bias: object = None, workspace: object = None) -> Tensor:
            if wide or in_rows:
                found = pixels(g).t() @ rows(x)
            else:  # without a copy
                per_image = g.reshape(p.batch, p.out_channels, -1), images(x).transpose(1, 2)
                found = torch.addbmm(g.new_empty(p.out_channels, size), *per_image, beta=0)
            if p.channels_last:
                return found.view(p.out_channels, *p.kernel_size, p.in_channels).movedim(-1, 1)
            return found.view(p.weight_shape)

        passes: dict[str, Kernel] = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}
        return passes[outputs[0]]


class AtenMatmulBackend(AtenPatchesBackend):
    """A pointwise convolution as PyTorch's matrix products on the uncopied tensors; a linear layer calls them, too.

    In channels_last that is one product of all pixels' rows of channels, otherwise one for each image.
    """

    name = "aten:matmul"
    summary = "PyTorch's matrix product, for pointwise convolutions"
    layouts = ("contiguous", "channels_last")

    def reasons_against(self, problem: ConvProblem, outputs: Outputs, device: torch.device) -> list[str]:
        if not problem.matrix_product or problem.groups > 1:
            return ["it computes pointwise convolutions without groups, stride and padding"]
        if device.type != "cpu" or not problem.dtype.is_floating_point or problem.dtype.itemsize == 1:
            return [f"it computes floating-point numbers on a CPU, got {problem.dtype} on {device.type}"]
        return [] if exact_matmul() else ["PyTorch may compute its matrix products in 16 bits here"]


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _products(matrix: Tensor, images: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of a matrix by each image, plus the bias of each row."""
    matrices = matrix.expand(len(images), -1, -1)
    return torch.bmm(matrices, images) if bias is None else torch.baddbmm(bias.view(-1, 1), matrices, images)


def of_patches(p: ConvProblem) -> bool:
    """Return whether kernels of more than one element do not overlap, and read no padding; without groups."""
    apart = all(
        low == high == 0 and (stride == k or out == 1) and (dilation == 1 or k == 1)
        for _, out, k, stride, low, high, dilation in p.dims
    )
    return apart and p.groups == 1 and prod(p.kernel_size) > 1
