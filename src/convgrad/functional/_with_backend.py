"""A convolution with a request for a backend that stays in a compiled graph; see `ops.with_backend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import conv_arguments, transpose_arguments
from ._rows import Layout, as_images, in_one_row

__all__ = ["convolution_with_backend"]


def convolution_with_backend(
    backend: str,
    transposed: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *raw_args: Any,
    layout: Layout = "NCL",
) -> Tensor:
    """The operator with the request as one of its arguments.

    Args:
        raw_args: as the functions take them, (stride, padding, dilation, groups) or, transposed,
            (stride, padding, output_padding, groups, dilation).
        layout: of a sequence.
    """
    normalize = transpose_arguments if transposed else conv_arguments

    def call(input: Tensor, weight: Tensor) -> Tensor:
        d = weight.dim() - 2
        if input.dim() == d + 1:
            return call(input.unsqueeze(0), weight).squeeze(0)
        made = normalize if layout == "NCL" else in_one_row(normalize)
        arguments = made(d, weight.shape, *raw_args)
        return torch.ops.convgrad.convolution.with_backend(input, weight, bias, *arguments, backend=backend)

    return call(input, weight) if layout == "NCL" else as_images(call, input, weight, layout)
