"""Convolutions: the N-d function, those of 1 to 3 dimensions, and one that requests a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ShapeError
from ..problem import Ints, Padding, all_arguments, conv_geometry, refuse_nested
from ._call import Signature, not_tensors, run, signatures

__all__ = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"]

#: The order of the dimensions of a sequence: batch, channels, length; or batch, length, channels.
Layout = Literal["NCL", "NLC"]


def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Padding | str = 0,
    dilation: Ints = 1, transposed: bool = False, output_padding: Ints = 0, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the N-d convolution of input and weight, or with ``transposed=True`` the N-d transposed convolution.

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
    return run("convolution", input, weight, bias, (stride, padding, dilation, transposed, output_padding, groups))


def conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1, *, layout: Layout = "NCL",
) -> Tensor:  # fmt: skip
    """Return the 1-d convolution of input and weight, as ``torch.nn.functional.conv1d``.

    Args:
        layout: ``"NLC"``: input and result are (N, L, C), or (L, C), and are not copied. (A transposed view without it
            is copied, because results are laid out like PyTorch's, as contiguous (N, C, L).)

    Shape:
        - input: (N, C_in, L) -> (N, C_out, L_out), or both without N
        - weight: (C_out, C_in/groups, k), bias: (C_out,)

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).
        ValueError: another layout.

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(6, 4, 3)
        >>> torch.equal(convgrad.conv1d(x, w, padding=1), torch.nn.functional.conv1d(x, w, padding=1))
        True
        >>> y = convgrad.conv1d(x.transpose(1, 2), w, padding=1, layout="NLC")
        >>> torch.allclose(y.transpose(1, 2), torch.nn.functional.conv1d(x, w, padding=1), atol=1e-5)
        True
    """
    raw = (stride, padding, dilation, groups)
    if layout == "NCL":
        return run("conv1d", input, weight, bias, raw)
    return _channels_last("conv1d", input, weight, bias, raw, layout)


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the 2-d convolution of input and weight, as ``torch.nn.functional.conv2d``.

    Shape:
        - input: (N, C_in, H, W) -> (N, C_out, H_out, W_out), or both without N
        - weight: (C_out, C_in/groups, k_h, k_w), bias: (C_out,)

    Raises:
        ShapeError, DtypeError: operands that do not belong together (both RuntimeError, worded as PyTorch's).

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7), torch.randn(6, 4, 3, 3)
        >>> torch.equal(convgrad.conv2d(x, w, padding=1), torch.nn.functional.conv2d(x, w, padding=1))
        True
    """
    return run("conv2d", input, weight, bias, (stride, padding, dilation, groups))


def conv3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return the 3-d convolution, as ``torch.nn.functional.conv3d``; errors are those of `conv2d`.

    Shape:
        - input: (N, C_in, D, H, W) -> (N, C_out, D_out, H_out, W_out), or both without N
        - weight: (C_out, C_in/groups, k_d, k_h, k_w), bias: (C_out,)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7), torch.randn(6, 4, 3, 3, 3)
        >>> torch.equal(convgrad.conv3d(x, w, padding=1), torch.nn.functional.conv3d(x, w, padding=1))
        True
    """
    return run("conv3d", input, weight, bias, (stride, padding, dilation, groups))


def conv_transpose1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
    *, layout: Layout = "NCL",
) -> Tensor:  # fmt: skip
    """Return the 1-d transposed convolution of input and weight, as ``torch.nn.functional.conv_transpose1d``.

    The layout and the errors are those of `conv1d`.

    Shape:
        - input: (N, C_in, L) -> (N, C_out, L_out), or both without N
        - weight: (C_in, C_out/groups, k), bias: (C_out,)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7), torch.randn(4, 6, 3)
        >>> torch.equal(convgrad.conv_transpose1d(x, w, stride=2), torch.nn.functional.conv_transpose1d(x, w, stride=2))
        True
        >>> y = convgrad.conv_transpose1d(x.transpose(1, 2), w, stride=2, layout="NLC")
        >>> torch.allclose(y.transpose(1, 2), torch.nn.functional.conv_transpose1d(x, w, stride=2), atol=1e-5)
        True
    """
    raw = (stride, padding, output_padding, groups, dilation)
    if layout == "NCL":
        return run("conv_transpose1d", input, weight, bias, raw)
    return _channels_last("conv_transpose1d", input, weight, bias, raw, layout)


def conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:  # fmt: skip
    """Return the 2-d transposed convolution, as ``torch.nn.functional.conv_transpose2d``; errors are those of `conv2d`.

    Shape:
        - input: (N, C_in, H, W) -> (N, C_out, H_out, W_out), or both without N
        - weight: (C_in, C_out/groups, k_h, k_w), bias: (C_out,)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7), torch.randn(4, 6, 3, 3)
        >>> torch.equal(convgrad.conv_transpose2d(x, w, stride=2), torch.nn.functional.conv_transpose2d(x, w, stride=2))
        True
    """
    return run("conv_transpose2d", input, weight, bias, (stride, padding, output_padding, groups, dilation))


def conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Ints = 1, padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
) -> Tensor:  # fmt: skip
    """Return the 3-d transposed convolution, as ``torch.nn.functional.conv_transpose3d``; errors are those of `conv2d`.

    Shape:
        - input: (N, C_in, D, H, W) -> (N, C_out, D_out, H_out, W_out), or both without N
        - weight: (C_in, C_out/groups, k_d, k_h, k_w), bias: (C_out,)

    Equivalent to:
        >>> import torch, convgrad
        >>> x, w = torch.randn(2, 4, 7, 7, 7), torch.randn(4, 6, 3, 3, 3)
        >>> torch.equal(convgrad.conv_transpose3d(x, w, stride=2), torch.nn.functional.conv_transpose3d(x, w, stride=2))
        True
    """
    return run("conv_transpose3d", input, weight, bias, (stride, padding, output_padding, groups, dilation))


# ---- sequences with their channels last: channels_last images of one row, which are not copied ----


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


def _channels_last(
    name: str, input: Tensor, weight: Tensor, bias: Tensor | None, raw: tuple[Any, ...], layout: Layout
) -> Tensor:
    """Return `conv1d` or `conv_transpose1d` of a tensor (N, L, C)."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and isinstance(bias, Tensor | None)):
        return not_tensors(name, input, weight, bias, raw, layout=layout)
    as_image = f"{name}(layout='NLC')"
    return as_images(lambda image, kernel: run(as_image, image, kernel, bias, raw), input, weight, layout)


def convolution_with_backend(
    backend: str, name: str, input: Tensor, weight: Tensor, bias: Tensor | None, *raw: Any, layout: Layout = "NCL"
) -> Tensor:
    """Return the result of a function of this file, with a request for a backend that stays in a compiled graph.

    A module calls it in place of `use_backend`, of whose side effect a strict ``torch.export`` warns.
    """

    def call(input: Tensor, weight: Tensor) -> Tensor:
        if input.dim() == weight.dim() - 1:
            return call(input.unsqueeze(0), weight).squeeze(0)
        read = signatures[name if layout == "NCL" else f"{name}(layout='NLC')"].read
        arguments = read(weight.dim() - 2, weight.shape, *raw)
        return torch.ops.convgrad.convolution.with_backend(input, weight, bias, *arguments, backend=backend)

    return call(input, weight) if layout == "NCL" else as_images(call, input, weight, layout)


#: Kind of function -> its arguments in the order of `all_arguments`.
_READERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "conv": lambda d, size, s, pad, dil, g: all_arguments(d, size, s, pad, dil, False, 0, g),
    "conv_transpose": lambda d, size, s, pad, more, g, dil: all_arguments(d, size, s, pad, dil, True, more, g),
}
for _order, (_kind, _functions) in enumerate(
    (("conv", (conv1d, conv2d, conv3d)), ("conv_transpose", (conv_transpose1d, conv_transpose2d, conv_transpose3d)))
):
    signatures[f"{_kind}1d(layout='NLC')"] = Signature(2, in_one_row(_READERS[_kind]))
    for _d, _function in enumerate(_functions, 1):
        _name = f"{_kind}{_d}d"
        signatures[_name] = Signature(_d, _READERS[_kind], _function, _order, getattr(torch, _name))
signatures["convolution"] = Signature(None, all_arguments, convolution, 2)
