"""The N-d convolution, and one that requests a backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._arguments import Ints, Padding, all_arguments, conv_arguments, transpose_arguments
from ._call import ORDERS, Signature, run, signatures
from ._rows import Layout, as_images, in_one_row


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Padding | str = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
) -> Tensor:
    """An N-d convolution, or with ``transposed=True`` an N-d transposed convolution.

    Args:
        padding: integers, ``"same"``, ``"valid"`` or, in 1-D, ``"causal"`` (all of it on the low side), or the low
            and the high side of each dimension: ``(1, 0, 2, 1)`` or ``((1, 0), (2, 1))``. Negative numbers crop.

    Shape:
        - input: (N, C_in, *in) with D = 1, 2 or 3 spatial dimensions
        - weight: (C_out, C_in/groups, *k); transposed: (C_in, C_out/groups, *k)
        - bias: (C_out,)
        - result: (N, C_out, *out)

    Raises:
        ShapeError: sizes that do not belong together (a RuntimeError, worded as PyTorch's).
        DtypeError: operands of different dtypes or devices (a RuntimeError).
        BackendError: a backend that was requested cannot compute it (a RuntimeError).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 9), torch.randn(6, 4, 3)
        >>> torch.equal(convgrad.convolution(x, w), torch.nn.functional.conv1d(x, w))
        True
    """
    raw = (stride, padding, dilation, transposed, output_padding, groups)
    return run("convolution", input, weight, bias, raw)


signatures["convolution"] = Signature(None, all_arguments, convolution, ORDERS["convolution"])


def convolution_with_backend(
    backend: str,
    transposed: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *raw_args: Any,
    layout: Layout = "NCL",
) -> Tensor:
    """A convolution with a request for a backend that stays in a compiled graph; see `ops.with_backend`.

    A module calls this in place of `use_backend`, whose side effect a strict ``torch.export`` warns of.

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
