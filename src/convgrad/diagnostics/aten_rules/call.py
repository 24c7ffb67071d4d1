"""`Call`: one call of ``torch.convolution`` as PyTorch's pipeline sees it, and PyTorch's checks of it.

Modelled after ``_convolution``, ``check_shape_forward`` and ``expand_param_if_needed`` of ATen, in their order and with
their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...errors import ShapeError
from ...problem import ConvProblem
from .tensors import TensorSpec, dense_strides

__all__ = ["Call", "call_of_problem", "make_call", "validate"]

Ints = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Call:
    """Operands and parameters of one convolution, with one entry per spatial dimension in every parameter."""

    input: TensorSpec
    weight: TensorSpec
    bias: TensorSpec | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    need_backward: bool = False

    @property
    def ndim(self) -> int:
        """Number of spatial dimensions."""
        return self.weight.ndim - 2

    @property
    def strided(self) -> bool:
        return any(s != 1 for s in self.stride)

    @property
    def dilated(self) -> bool:
        return any(d != 1 for d in self.dilation)

    @property
    def output_padding_big(self) -> bool:
        return any(p >= s for p, s in zip(self.output_padding, self.stride, strict=True))

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        n, spatial = self.input.shape[0], self.input.shape[2:]
        size = []
        for i, length in enumerate(spatial):
            effective = self.dilation[i] * (self.weight.shape[i + 2] - 1) + 1
            if self.transposed:
                grown = (length - 1) * self.stride[i] - 2 * self.padding[i] + effective + self.output_padding[i]
                size.append(grown)
            else:
                size.append((length + 2 * self.padding[i] - effective) // self.stride[i] + 1)
        channels = self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]
        return (n, channels, *size)

    def view_1d_as_2d(self) -> Call:
        """The 2-D call that a 1-D one becomes: height 1, and the input copied to contiguous if it is not.

        oneDNN tensors and XPU tensors stay 1-D.
        """
        if self.weight.ndim != 3 or self.input.mkldnn or self.input.device_type == "xpu":
            return self
        return replace(
            self,
            input=self.input.contiguous().view_1d_as_2d(),
            weight=self.weight.view_1d_as_2d(),
            stride=(1, *self.stride),
            padding=(0, *self.padding),
            dilation=(1, *self.dilation),
            output_padding=(0, *self.output_padding),
        )


def _expand(value: Ints, name: str, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ShapeError(
            f"expected {name} to be a single integer value or a list of {count} values to match the convolution "
            f"dimensions, but got {name}={list(values)}"
        )
    return values


def make_call(
    input: TensorSpec | torch.Tensor,
    weight: TensorSpec | torch.Tensor,
    bias: TensorSpec | torch.Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    need_backward: bool | None = None,
) -> Call:
    """Describe the operands, expand the parameters, and check everything as PyTorch does.

    Raises:
        ShapeError: with PyTorch's own message.
    """
    x, w = (t if isinstance(t, TensorSpec) else TensorSpec.of(t) for t in (input, weight))
    b = bias if bias is None or isinstance(bias, TensorSpec) else TensorSpec.of(bias)
    if w.ndim < 3:
        raise ShapeError("weight should have at least three dimensions")
    if groups <= 0:
        raise ShapeError("non-positive groups is not supported")
    dim = w.ndim - 2
    if need_backward is None:
        grad = any(t is not None and t.requires_grad for t in (x, w, b))
        need_backward = torch.is_grad_enabled() and grad
    call = Call(
        x, w, b,
        _expand(stride, "stride", dim), _expand(padding, "padding", dim), _expand(dilation, "dilation", dim),
        bool(transposed), _expand(output_padding, "output_padding", dim), groups, need_backward,
    )  # fmt: skip
    validate(call)
    return call


def validate(call: Call) -> None:
    """PyTorch's ``check_shape_forward``: the first rule that is broken raises.

    Raises:
        ShapeError: with PyTorch's own message.
    """
    x, w, groups = list(call.input.shape), list(call.weight.shape), call.groups
    _require(all(p >= 0 for p in call.padding), "negative padding is not supported")
    _require(all(p >= 0 for p in call.output_padding), "negative output_padding is not supported")
    _require(all(s > 0 for s in call.stride), "non-positive stride is not supported")
    # PyTorch lets a dilation of zero through here, and every kernel refuses it later.
    _require(all(d >= 0 for d in call.dilation), "dilation should be greater than zero")
    _require(groups > 0, f"expected groups to be greater than 0, but got groups={groups}")
    _require(
        len(w) == len(x),
        f"Expected {len(w)}-dimensional input for {len(w)}-dimensional weight {w}, but got {len(x)}-dimensional "
        f"input of size {x} instead",
    )
    _require(
        w[0] >= groups,
        f"Given groups={groups}, expected weight to be at least {groups} at dimension 0, but got weight of size {w} "
        "instead",
    )
    _require(
        w[0] % groups == 0,
        f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, but got weight of size "
        f"[{w}] instead",
    )
    for i, p in enumerate(call.padding):
        _require(
            2 * p < 2**63,
            f"Given padding={p} at dimension {i} , expected padding to be at most {(2**63 - 1) // 2}",
        )
    if call.transposed:
        _validate_transposed(call, x, w)
    else:
        _validate_plain(call, x, w)


def _validate_plain(call: Call, x: list[int], w: list[int]) -> None:
    groups = call.groups
    _require(
        x[1] == w[1] * groups,
        f"Given groups={groups}, weight of size {w}, expected input{x} to have {w[1] * groups} channels, but got "
        f"{x[1]} channels instead",
    )
    _require(
        call.bias is None or call.bias.shape == (w[0],),
        f"Given weight of size {w}, expected bias to be 1-dimensional with {w[0]} elements, but got bias of size "
        f"{list(call.bias.shape) if call.bias else []} instead",
    )
    padded = [size + 2 * p for size, p in zip(x[2:], call.padding, strict=True)]
    kernel = [d * (k - 1) + 1 for k, d in zip(w[2:], call.dilation, strict=True)]
    _require(
        all(p >= k for p, k in zip(padded, kernel, strict=True)),
        f"Calculated padded input size per channel: ({' x '.join(map(str, padded))}). "
        f"Kernel size: ({' x '.join(map(str, kernel))}). Kernel size can't be greater than actual input size",
    )


def _validate_transposed(call: Call, x: list[int], w: list[int]) -> None:
    _require(
        x[1] == w[0],
        f"Given transposed=1, weight of size {w}, expected input{x} to have {w[0]} channels, but got {x[1]} channels "
        "instead",
    )
    channels = w[1] * call.groups
    _require(
        call.bias is None or call.bias.shape == (channels,),
        f"Given transposed=1, weight of size {w}, expected bias to be 1-dimensional with {channels} elements, but got "
        f"bias of size {list(call.bias.shape) if call.bias else []} instead",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ShapeError(message)


def call_of_problem(problem: ConvProblem, device_type: str, need_backward: bool) -> tuple[Call, tuple[str, ...]]:
    """The call that a PyTorch user writes for a problem, and what PyTorch does around it.

    PyTorch knows symmetric padding only: for any other, the input is padded (or cropped) first; a transposed
    convolution computes the larger output and crops it.
    """
    low = tuple(max(0, min(pair)) for pair in problem.padding)
    extra = tuple(a + b - 2 * p for (a, b), p in zip(problem.padding, low, strict=True))
    notes: tuple[str, ...] = ()
    fmt = problem.memory_format

    def spec(shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(shape, dense_strides(shape, fmt), problem.dtype, device_type)

    weight = spec(problem.weight_shape)
    output_padding = (0,) * problem.ndim
    if problem.transposed:
        grown = tuple(size + e for size, e in zip(problem.input_size, extra, strict=True))
        output_padding = tuple(
            g - ((o - 1) * s - 2 * p + d * (k - 1) + 1)
            for g, o, s, p, d, k in zip(
                grown, problem.output_size, problem.stride, low, problem.dilation, problem.kernel_size, strict=True
            )
        )
        input, channels = spec(problem.output_shape), problem.in_channels
        if any(extra):
            notes = ("PyTorch pads symmetrically: it computes the larger output and the caller crops it",)
    else:
        padded = tuple(size + e for size, e in zip(problem.input_size, extra, strict=True))
        input, channels = spec((*problem.input_shape[:2], *padded)), problem.out_channels
        if any(extra):
            notes = (f"PyTorch pads symmetrically: it first makes a padded copy of the input, {input}",)
    bias = TensorSpec((channels,), (1,), problem.dtype, device_type) if problem.has_bias else None
    call = Call(
        input, weight, bias, problem.stride, low, problem.dilation, problem.transposed, output_padding,
        problem.groups, need_backward,
    )  # fmt: skip
    return call, notes
