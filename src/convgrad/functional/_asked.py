"""A convolution with a request for a backend that stays in a compiled graph; see `ops.asked`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import conv_arguments, transpose_arguments

__all__ = ["call_asking"]


def call_asking(
    backend: str, transposed: bool, input: Tensor, weight: Tensor, bias: Tensor | None, *written: Any
) -> Tensor:
    """The operator with the request as one of its arguments.

    Args:
        written: as the functions take them, (stride, padding, dilation, groups) or, transposed,
            (stride, padding, output_padding, groups, dilation).
    """
    d = weight.dim() - 2
    if input.dim() == d + 1:
        return call_asking(backend, transposed, input.unsqueeze(0), weight, bias, *written).squeeze(0)
    complete = transpose_arguments if transposed else conv_arguments
    arguments = complete(d, weight.shape, *written)
    return torch.ops.convgrad.convolution.asked(input, weight, bias, *arguments, asked=backend)
