"""The rules of shape, and the validation of a convolution by them, as pure functions.

Every function takes plain or symbolic integers: a plain condition that is false raises at once, a symbolic one
becomes a `torch._check`. Messages are PyTorch's where PyTorch has one, followed by the actual values.
All checks run before any backend, so no backend ever sees an invalid problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import channels_last_of, suggests_channels_last
from ..errors import ShapeError
from .problem import ConvProblem
from .sizes import effective_kernel, output_length

Shape = Sequence[int]


class Geometry(NamedTuple):
    """The arguments of a convolution, complete: one entry (padding: one pair) for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def require(condition: bool | torch.SymBool, message: str, *values: Any) -> None:
    """Raise a ``ShapeError`` unless a condition holds; a symbolic one is left to `torch._check`.

    The message has a place ``{}`` for each value, as the compiler cannot print sizes; a list is shown as ``2 x 3``.
    """

    def text() -> str:
        shown = (
            list(v) if isinstance(v, tuple) else " x ".join(map(str, v)) if isinstance(v, list) else v for v in values
        )
        return message.format(*shown)

    if isinstance(condition, torch.SymBool):
        torch._check(condition, text)
    elif not condition:
        raise ShapeError(text())


# ---- arguments -----------------------------------------------------------------------------------


def conv_geometry(
    weight_shape: Shape,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    transposed: bool,
    output_padding: Shape,
    groups: int,
) -> Geometry:
    """Complete and check everything that does not depend on the other operands."""
    require(len(weight_shape) >= 3, "weight should have at least three dimensions")
    d = len(weight_shape) - 2
    require(
        d <= 3, "Expected a weight with 1, 2 or 3 spatial dimensions, but got weight of size {}", tuple(weight_shape)
    )
    stride = _expand("stride", stride, d)
    pairs = padding_pairs(padding, d)
    dilation = _expand("dilation", dilation, d)
    output_padding = _expand("output_padding", output_padding, d)
    if len(padding) != 2 * d:
        _each(padding, 0, "negative padding is not supported, but got padding={}", tuple(padding))
    _each(output_padding, 0, "negative output_padding is not supported, but got output_padding={}", output_padding)
    _each(stride, 1, "non-positive stride is not supported, but got stride={}", stride)
    said = "non-positive dilation is not supported: dilation should be greater than zero, but got dilation={}"
    _each(dilation, 1, said, dilation)
    require(groups > 0, "non-positive groups is not supported, but got groups={}", groups)
    return Geometry(stride, pairs, dilation, transposed, output_padding, groups)


def _each(values: Shape, least: int, message: str, *said: Any) -> None:
    for value in values:
        require(value >= least, message, *said)


def _expand(name: str, values: Shape, d: int) -> tuple[int, ...]:
    values = (values,) if isinstance(values, int) else tuple(values)
    more = f" (or {2 * d}: low and high of each dimension in turn)" if name == "padding" else ""
    require(
        len(values) in (1, d),
        "expected {} to be a single integer value or a list of {} values to match the convolution dimensions{}, "
        "but got {}={}",
        name, d, more, name, values,
    )  # fmt: skip
    return values * d if len(values) == 1 else values


def padding_pairs(values: Shape, d: int) -> tuple[tuple[int, int], ...]:
    """1 or D entries: both sides of each dimension; 2D entries: low and high of each dimension in turn."""
    values = tuple(values)
    if len(values) == 2 * d:
        return tuple((values[2 * i], values[2 * i + 1]) for i in range(d))
    return tuple((p, p) for p in _expand("padding", values, d))


# ---- shapes --------------------------------------------------------------------------------------

#: A process can address 2**47 bytes.
_MOST_ELEMENTS = 2**45
#: PyTorch holds no padding, but kernels that do compute the bytes of it, up to 128 an element, with 64-bit integers.
_MOST_PADDED_ELEMENTS = 2**55


def convolution_shape(
    input_shape: Shape, weight_shape: Shape, bias_shape: Shape | None, g: Geometry, *, as_onednn: bool = False
) -> tuple[int, ...]:
    """Shape of the output, after checking input, weight and bias against each other.

    As in ATen, an input without channels gives an output without channels, and where there is no batch or no channel,
    sizes may be 0 that otherwise may not; for ``as_onednn`` also the output of a transposed convolution.
    """
    check_rank(input_shape, weight_shape)
    _check_groups(weight_shape, g)
    channels = weight_shape[0] if g.transposed else weight_shape[1] * g.groups
    require(
        input_shape[1] == channels,
        "Given {}={}, weight of size {}, expected input{} to have {} channels, but got {} channels instead",
        *given(weight_shape, g), tuple(input_shape), channels, input_shape[1],
    )  # fmt: skip
    out_channels = channels_of_output(weight_shape, g.transposed, g.groups)
    if bias_shape is not None:
        require(
            len(bias_shape) == 1 and bias_shape[0] == out_channels,
            "Given {}weight of size {}, expected bias to be 1-dimensional with {} elements, but got bias of size {} "
            "instead",
            "transposed=1, " if g.transposed else "", tuple(weight_shape), out_channels, tuple(bias_shape),
        )  # fmt: skip
    spatial = _output_size(input_shape, weight_shape, g, as_onednn)
    if isinstance(input_shape[1], int) and input_shape[1] == 0:
        out_channels = 0
    shape = (input_shape[0], out_channels, *spatial)
    data, what = (shape, "an output with its padding") if g.transposed else (input_shape, "a padded input")
    extents = [n + max(low, 0) + max(high, 0) for n, (low, high) in zip(data[2:], g.padding, strict=True)]
    padded = (*data[:2], *extents)
    for most, named, size in ((_MOST_ELEMENTS, "an output", shape), (_MOST_PADDED_ELEMENTS, what, padded)):
        if all(isinstance(n, int) for n in size):
            require(prod(size) < most, "{} of size {} does not fit in any memory", named, size)
    return shape


def channels_of_output(weight_shape: Shape, transposed: bool, groups: int) -> int:
    """The channels of the output, as many as a bias has elements."""
    return weight_shape[1] * groups if transposed else weight_shape[0]


def given(weight_shape: Shape, g: Geometry) -> tuple[str, int, Shape]:
    """Return what messages begin with: "Given {}={}, weight of size {}"."""
    return "transposed" if g.transposed else "groups", 1 if g.transposed else g.groups, tuple(weight_shape)


def check_rank(input_shape: Shape, weight_shape: Shape) -> None:
    """Check that weight is a weight and input has as many dimensions."""
    n = len(weight_shape)
    require(n >= 3, "weight should have at least three dimensions")
    require(
        len(input_shape) == n,
        "Expected {}-dimensional input for {}-dimensional weight {}, but got {}-dimensional input of size {} instead",
        n, n, tuple(weight_shape), len(input_shape), tuple(input_shape),
    )  # fmt: skip


def _check_groups(weight_shape: Shape, g: Geometry) -> None:
    message = "Given {}={}, expected weight to be {} {} at dimension {}, but got weight of size {} instead"
    first, groups = weight_shape[0], g.groups
    require(first >= groups, message, "groups", groups, "at least", groups, 0, tuple(weight_shape))
    require(first % groups == 0, message, "groups", groups, "divisible by", groups, 0, tuple(weight_shape))
    if g.transposed:
        require(weight_shape[1] > 0, message, "transposed", 1, "at least", 1, 1, tuple(weight_shape))


def _output_size(input_shape: Shape, weight_shape: Shape, g: Geometry, as_onednn: bool) -> tuple[int, ...]:
    sizes, kernel = tuple(input_shape[2:]), tuple(weight_shape[2:])
    dims = tuple(zip(sizes, kernel, g.stride, g.padding, g.dilation, g.output_padding, strict=True))
    least = 0 if any(isinstance(n, int) and n == 0 for n in input_shape[:2]) else 1
    said = "kernel size should be greater than zero, but got weight of size {}"
    _each(kernel, least, said, tuple(weight_shape))
    if g.transposed:
        for _, _, s, _, dil, op in dims:
            require(
                least == 0 or op < s or op < dil,
                "output padding must be smaller than either stride or dilation, but got output_padding={}, stride={}, "
                "dilation={}",
                g.output_padding, g.stride, g.dilation,
            )  # fmt: skip
        out = tuple((n - 1) * s - low - high + effective_kernel(k, dil) + op for n, k, s, (low, high), dil, op in dims)
    else:
        padded = [n + low + high for n, (low, high) in zip(sizes, g.padding, strict=True)]
        spans = [effective_kernel(k, dil) for k, dil in zip(kernel, g.dilation, strict=True)]
        for have, span in zip(padded, spans, strict=True):
            require(
                have >= span,
                "Calculated padded input size per channel: ({}). Kernel size: ({}). Kernel size can't be greater than "
                "actual input size",
                padded, spans,
            )  # fmt: skip
        out = tuple(output_length(n, k, s, low, high, dil) for n, k, s, (low, high), dil, _ in dims)
    said = "Only zero batch or zero channel inputs are supported, but got input shape: {}"
    _each(sizes, least, said, tuple(input_shape))
    said = "Calculated output size per channel: ({}). Output size is too small"
    if g.transposed:
        said = f"Given input size per channel: ({{}}). {said}"
    _each(out, 0 if as_onednn and g.transposed else least, said, *([list(sizes)] * g.transposed), list(out))
    return out


# ---- problems ------------------------------------------------------------------------------------


def problem_of(
    input_shape: Shape,
    weight_shape: Shape,
    output_shape: Shape,
    g: Geometry,
    *,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
    has_bias: bool = False,
) -> ConvProblem:
    """The canonical problem of checked operands; of a transposed one, the plain problem with the roles exchanged."""
    data, result, padding = tuple(input_shape), tuple(output_shape), g.padding
    in_channels = data[1]
    if g.transposed:
        data, result = result, data
        in_channels = weight_shape[1] * g.groups
        # A padded position that only output_padding reaches is read by no kernel element.
        padding = tuple((low, high - more) for (low, high), more in zip(padding, g.output_padding, strict=True))
    return ConvProblem(
        batch=data[0],
        in_channels=in_channels,
        out_channels=weight_shape[0],
        groups=g.groups,
        input_size=data[2:],
        kernel_size=tuple(weight_shape[2:]),
        stride=g.stride,
        padding=padding,
        dilation=g.dilation,
        output_size=result[2:],
        dtype=dtype,
        memory_format=memory_format,
        has_bias=has_bias,
        origin="transposed" if g.transposed else "plain",
    ).canonical()


def layout_of(input: Tensor, weight: Tensor, g: Geometry) -> torch.memory_format:
    """The layout in which PyTorch would return the results of this convolution; in 1-d that is contiguous.

    Source: aten/src/ATen/native/Convolution.cpp, determine_backend_memory_format. It takes one padding for both sides.
    """
    ndim = len(g.stride)
    if ndim == 1:
        return torch.contiguous_format
    if "meta" in (input.device.type, weight.device.type):
        last = suggests_channels_last(input) or suggests_channels_last(weight)
        return channels_last_of(ndim) if last else torch.contiguous_format
    wider = min if g.transposed else max
    one: Any = g._replace(padding=tuple(max(wider(low, high), 0) for low, high in g.padding))
    backend = torch._C._select_conv_backend(input, weight, None, *one)
    return torch._C._conv_determine_backend_memory_format(input, weight, backend)
