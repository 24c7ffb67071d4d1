"""Kernels that do not overlap and read no padding: each result is a product of one patch, a pass a product of matrices.

So are patch embeddings of images and videos, and transposed convolutions with kernel = stride, which are ``grad_input``
of such a problem. PyTorch calls its convolutions for them, which on a GPU may have no fast kernel (3-D in 16 bits).
Here the patches are written as rows, in one copy of the input (none where a patch is all of it), and multiplied.
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
        return problem.bias_pass == "forward"

    def bind(self, problem: ConvProblem, outputs: Outputs) -> Kernel:
        p, d = problem, problem.ndim
        covered = [out * k for out, k in zip(p.output_size, p.kernel_size, strict=True)]
        left_over = [n - size for n, size in zip(p.input_size, covered, strict=True)]
        size = p.in_channels * prod(p.kernel_size)  # of a patch
        # A split input is [N, C, out, k, out, k, ...]. A patch is [C, *k], or [*k, C] in channels_last.
        outs, ks = range(2, 2 + 2 * d, 2), range(3, 3 + 2 * d, 2)
        patch = (*ks, 1) if p.channels_last else (1, *ks)
        in_patch = [*p.kernel_size, p.in_channels] if p.channels_last else [p.in_channels, *p.kernel_size]
        # Else one product for each image, whose result then lies as it should.
        in_rows = p.channels_last or prod(p.output_size) == 1
        order = (0, *outs, *patch) if in_rows else (0, *patch, *outs)
        back = [order.index(i) for i in range(2 + 2 * d)]

        def split(x: Tensor) -> Tensor:
            for i, (out, k) in enumerate(zip(p.output_size, p.kernel_size, strict=True)):
                x = x.narrow(2 + 2 * i, 0, out * k).unflatten(2 + 2 * i, (out, k))
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

        def pixels(t: Tensor) -> Tensor:  # [N * pixels, C_out]
            return t.movedim(1, -1).reshape(-1, p.out_channels)

        def matrix(weight: Tensor) -> Tensor:  # [C_out, size]
            return (weight.movedim(1, -1) if p.channels_last else weight).reshape(p.out_channels, size)

        def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None, workspace: object = None) -> Tensor:
            if in_rows:
                given, other = rows(x), matrix(weight).t()
                found = given @ other if bias is None else torch.addmm(bias, given, other)
                return found.view(p.batch, *p.output_size, p.out_channels).movedim(-1, 1)
            images = split(x).permute(order).reshape(p.batch, size, -1)
            matrices = matrix(weight).expand(p.batch, -1, -1)
            if bias is None:
                return torch.bmm(matrices, images).view(p.output_shape)
            return torch.baddbmm(bias.view(-1, 1), matrices, images).view(p.output_shape)

        def grad_input(g: Tensor, weight: Tensor, bias: object = None, workspace: object = None) -> Tensor:
            if in_rows:
                found = (pixels(g) @ matrix(weight)).view(p.batch, *p.output_size, *in_patch)
            else:
                matrices = matrix(weight).t().expand(p.batch, -1, -1)
                images = g.reshape(p.batch, p.out_channels, -1)
                found = torch.bmm(matrices, images).view(p.batch, *in_patch, *p.output_size)
            return joined(found.permute(back))

        def grad_weight(g: Tensor, x: Tensor, bias: object = None, workspace: object = None) -> Tensor:
            found = (pixels(g).t() @ rows(x)).view(p.out_channels, *in_patch)
            return found.movedim(-1, 1) if p.channels_last else found

        passes: dict[str, Kernel] = {"forward": forward, "grad_input": grad_input, "grad_weight": grad_weight}
        return passes[outputs[0]]


def of_patches(p: ConvProblem) -> bool:
    """Return whether kernels of more than one element do not overlap, and read no padding; without groups."""
    apart = all(
        low == high == 0 and (stride == k or out == 1) and (dilation == 1 or k == 1)
        for _, out, k, stride, low, high, dilation in p.dims
    )
    return apart and p.groups == 1 and prod(p.kernel_size) > 1
