"""A convolution with a request for a backend that stays in a compiled graph; see `ops.with_backend`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import conv_arguments, transpose_arguments

__all__ = ["convolution_with_backend"]


def convolution_with_backend(
    backend: str, transposed: bool, input: Tensor, weight: Tensor, bias: Tensor | None, *raw_args: Any
) -> Tensor:
    """The operator with the request as one of its arguments.

    Args:
        raw_args: as the functions take them, (stride, padding, dilation, groups) or, transposed,
            (stride, padding, output_padding, groups, dilation).
    """
    d = weight.dim() - 2
    if input.dim() == d + 1:
        return convolution_with_backend(backend, transposed, input.unsqueeze(0), weight, bias, *raw_args).squeeze(0)
    normalize = transpose_arguments if transposed else conv_arguments
    arguments = normalize(d, weight.shape, *raw_args)
    return torch.ops.convgrad.convolution.with_backend(input, weight, bias, *arguments, backend=backend)
