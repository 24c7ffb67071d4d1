"""One call of ``torch.convolution`` without any memory: what PyTorch's choice reads of its operands and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..._compat import channels_last_of, suggests_channels_last, usual_strides
from ...errors import DtypeError
from ...problem import INT32_MAX, ConvProblem, Geometry, conv_geometry, convolution_shape

Ints = int | Sequence[int]


def short(value: torch.dtype | torch.memory_format) -> str:
    """The name of a dtype or layout without its module: ``float32``, ``channels_last``, ``contiguous``."""
    return str(value).removeprefix("torch.").removesuffix("_format")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Sizes, strides, dtype and device type of a tensor that need not exist."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()  # in elements; contiguous where not given
    dtype: torch.dtype = torch.float32
    device_type: str = "cpu"  # or "cuda" (also ROCm), "xpu", "mps", "meta", ...
    requires_grad: bool = False
    mkldnn: bool = False  # it is an opaque oneDNN tensor (Tensor.to_mkldnn())

    def __post_init__(self) -> None:
        if not self.strides:
            object.__setattr__(self, "strides", usual_strides(self.shape, False))
        if len(self.strides) != len(self.shape):
            raise ValueError(f"a tensor of shape {self.shape} has {len(self.shape)} strides, got {self.strides}")

    @classmethod
    def of(cls, tensor: Tensor | TensorSpec) -> TensorSpec:
        """Describe a tensor; its memory is not touched."""
        if isinstance(tensor, TensorSpec):
            return tensor
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a Tensor or a TensorSpec, got {type(tensor).__name__}")
        mkldnn = tensor.layout == torch._mkldnn  # pyright: ignore[reportAttributeAccessIssue]
        strides = () if mkldnn else tuple(tensor.stride())
        return cls(tuple(tensor.shape), strides, tensor.dtype, tensor.device.type, tensor.requires_grad, mkldnn)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, as if they were dense."""
        return prod(self.shape) * self.dtype.itemsize

    def _meta(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the elements lie densely in this order; size-1 dimensions may have any stride."""
        return self._meta().is_contiguous(memory_format=memory_format)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> TensorSpec:
        """Return the result of ``Tensor.contiguous(memory_format=...)``: itself if it already is."""
        return replace(self, strides=tuple(self._meta().contiguous(memory_format=memory_format).stride()))

    def unsqueezed(self) -> TensorSpec:
        """Return the result of ``Tensor.unsqueeze(2)``."""
        view = self._meta().unsqueeze(2)
        return replace(self, shape=tuple(view.shape), strides=tuple(view.stride()))

    def suggest_memory_format(self, exact_strides: bool = False) -> torch.memory_format:
        """The layout that PyTorch reads out of the strides.

        The strides of size-1 dimensions count, so a tensor can be contiguous in both orders and still be taken for
        channels_last. With ``exact_strides`` they must be those of a new channels_last tensor (MPS wants that).
        """
        if self.mkldnn or not suggests_channels_last(self._meta()):
            return torch.contiguous_format
        if exact_strides and self.strides != usual_strides(self.shape, True):
            return torch.contiguous_format
        return channels_last_of(self.ndim - 2)

    def fits_32bit_index(self) -> bool:
        """Whether offsets fit into 32 bits (ATen's canUse32BitIndexMath)."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return prod(self.shape) < INT32_MAX and (last < INT32_MAX or 0 in self.shape)

    def __str__(self) -> str:
        fmt = self.suggest_memory_format()
        layout = "mkldnn" if self.mkldnn else short(fmt)
        dense = self.mkldnn or self.is_contiguous(fmt)
        shape = "x".join(map(str, self.shape))
        return f"{shape} {short(self.dtype)} {layout}{'' if dense else f' strides {self.strides}'}"


@dataclass(frozen=True, slots=True)
class ConvCall:
    """One call of ``torch.convolution``, with one entry (padding: one pair) per spatial dimension in each argument."""

    input: TensorSpec
    weight: TensorSpec
    bias: TensorSpec | None
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    need_backward: bool = False

    @classmethod
    def of(
        cls,
        input: TensorSpec | Tensor,
        weight: TensorSpec | Tensor,
        bias: TensorSpec | Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        transposed: bool = False,
        output_padding: Ints = 0,
        groups: int = 1,
        need_backward: bool | None = None,
    ) -> ConvCall:
        """Describe operands and arguments, and check them as every convolution of this library does.

        Raises:
            ShapeError, DtypeError: operands that do not belong together.
        """
        x, w, b = TensorSpec.of(input), TensorSpec.of(weight), None if bias is None else TensorSpec.of(bias)
        lists = [(v,) if isinstance(v, int) else tuple(v) for v in (stride, padding, dilation, output_padding)]
        g = conv_geometry(w.shape, lists[0], lists[1], lists[2], bool(transposed), lists[3], groups)
        convolution_shape(x.shape, w.shape, None if b is None else b.shape, g)
        for name, t in (("weight", w), ("bias", b)):
            if t is not None and t.dtype != x.dtype and not x.mkldnn:
                raise DtypeError(f"Input type ({x.dtype}) and {name} type ({t.dtype}) should be the same")
        if need_backward is None:
            need_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (x, w, b) if t is not None)
        return cls(x, w, b, *g, need_backward)  # pyright: ignore[reportCallIssue]

    @property
    def geometry(self) -> Geometry:
        """The arguments, as `convgrad.problem` takes them."""
        return Geometry(self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return convolution_shape(self.input.shape, self.weight.shape, None, self.geometry)

    def on(self, device_type: str) -> ConvCall:
        """Return the call with its operands on another kind of device."""
        operands = {"input": self.input, "weight": self.weight, "bias": self.bias}
        return replace(self, **{name: t and replace(t, device_type=device_type) for name, t in operands.items()})

    def symmetric(self) -> tuple[ConvCall, tuple[str, ...]]:
        """The call that PyTorch gets, which knows one padding for both sides, and what is done around it.

        For any other padding the input is padded (or cropped) first; a transposed convolution computes the larger
        output and crops it.
        """
        if all(low == high >= 0 for low, high in self.padding):
            return self, ()
        both = tuple((max(0, min(pair)),) * 2 for pair in self.padding)
        if self.transposed:
            note = "PyTorch pads symmetrically: it computes the larger output and the caller crops it"
            return replace(self, padding=both), (note,)
        sizes = zip(self.input.shape[2:], self.padding, both, strict=True)
        shape = (*self.input.shape[:2], *(n + sum(pair) - sum(rest) for n, pair, rest in sizes))
        channels_last = self.input.suggest_memory_format() is not torch.contiguous_format
        padded = replace(self.input, shape=shape, strides=usual_strides(shape, channels_last))
        note = f"PyTorch pads symmetrically: it first makes a padded copy of the input, {padded}"
        return replace(self, input=padded, padding=both), (note,)

    def view_1d_as_2d(self) -> ConvCall:
        """The 2-D call that a 1-D one becomes: height 1, and the input copied to contiguous if it is not.

        oneDNN tensors and XPU tensors stay 1-D.
        """
        if self.weight.ndim != 3 or self.input.mkldnn or self.input.device_type == "xpu":
            return self
        x, w = self.input.contiguous().unsqueezed(), self.weight.unsqueezed()
        return ConvCall(
            x, w, self.bias, (1, *self.stride), ((0, 0), *self.padding), (1, *self.dilation), self.transposed,
            (0, *self.output_padding), self.groups, self.need_backward,
        )  # fmt: skip


def call_of_problem(p: ConvProblem, device_type: str, need_backward: bool) -> ConvCall:
    """The call that a PyTorch user writes for a problem."""

    def spec(shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(shape, usual_strides(shape, p.channels_last and len(shape) > 3), p.dtype, device_type)

    # of a transposed one, the input positions behind the last one that the kernel reaches
    output_padding = tuple(d.high - d.least_high if p.transposed else 0 for d in p.dims)
    input = spec(p.output_shape if p.transposed else p.input_shape)
    bias = spec((p.shape_of(p.bias_slot)[1],)) if p.has_bias else None
    return ConvCall(
        input, spec(p.weight_shape), bias, p.stride, p.padding, p.dilation, p.transposed, output_padding, p.groups,
        need_backward,
    )  # fmt: skip
