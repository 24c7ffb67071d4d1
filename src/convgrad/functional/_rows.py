"""Sequences with their channels last, (N, L, C): computed without a copy, as channels_last images of one row.

A 1-D convolution returns contiguous (N, C, L) tensors, as PyTorch's does, so a transposed view given to it is copied
element by element. The same memory seen as an image (N, C, 1, L) is channels_last, for which there are kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ..errors import ShapeError
from ..problem import conv_geometry, refuse_nested

#: The order of the dimensions of a sequence: batch, channels, length; or batch, length, channels.
Layout = Literal["NCL", "NLC"]


def require_layout(layout: object) -> None:
    """Refuse a layout that is neither NCL nor NLC."""
    if layout not in ("NCL", "NLC"):
        raise ValueError(f"layout is 'NCL' or 'NLC', got {layout!r}")


def as_images(call: Callable[[Tensor, Tensor], Tensor], input: Tensor, weight: Tensor, layout: Layout) -> Tensor:
    """Compute a 1-D convolution of (N, L, C) or (L, C) by one of an image [N, C, 1, L] and a weight [.., .., 1, k]."""
    require_layout(layout)
    refuse_nested(input, weight)
    if weight.dim() != 3 or input.dim() not in (2, 3):
        raise ShapeError(
            "layout='NLC' takes an input (N, L, C) or (L, C) and a weight with 3 dimensions, "
            f"got input of size {list(input.shape)} and weight of size {list(weight.shape)}"
        )
    if input.shape[-2] == 0:  # PyTorch's words, of the sequence and not of the image
        raise ShapeError(f"Only zero batch or zero channel inputs are supported, but got input shape: {[*input.shape]}")
    batch = input if input.dim() == 3 else input.unsqueeze(0)
    try:
        output = call(batch.transpose(1, 2).unsqueeze(2), weight.unsqueeze(2))  # [N, C_out, 1, L_out]
    except ShapeError as error:
        read = f"layout='NLC' reads the input {[*input.shape]} as (N, L, C), an image of one row"
        raise ShapeError(f"{error} ({read})") from None
    sequence = output.squeeze(2).transpose(1, 2).contiguous()
    return sequence if input.dim() == 3 else sequence.squeeze(0)


def in_one_row(normalize: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a reader of a sequence's arguments, made from ``normalize``, for the image of one row that replaces it."""

    def normalized(d: int, weight_size: Any, *raw: Any) -> tuple[Any, ...]:
        # checked here, so that messages speak of one dimension.
        g = conv_geometry((1, 1, 1), *normalize(1, (*weight_size[:2], weight_size[3]), *raw))
        (sides,) = g.padding
        padding = (0, sides[0]) if sides[0] == sides[1] >= 0 else (0, 0, *sides)
        return ((1, *g.stride), padding, (1, *g.dilation), g.transposed, (0, *g.output_padding), g.groups)

    return normalized
