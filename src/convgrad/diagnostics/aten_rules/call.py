"""One call of ``torch.convolution`` without any memory: what PyTorch's choice reads of its operands and arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..._compat import channels_last_of, suggests_channels_last, usual_strides
from ...errors import DtypeError
from ...problem import INT32_MAX, ConvProblem, Geometry, Ints, Padding, all_arguments, conv_geometry, convolution_shape


def short(value: torch.dtype | torch.memory_format) -> str:
    """The name of a dtype or layout without its module: ``float32``, ``channels_last``, ``contiguous``."""
    return str(value).removeprefix("torch.").removesuffix("_format")


@dataclass(frozen=True)
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
    def meta(self) -> Tensor:
        """The tensor, on the meta device."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def suggested(t: Tensor, exact_strides: bool = False) -> torch.memory_format:
    """Return the layout that PyTorch reads out of a tensor's strides.

    The strides of size-1 dimensions count, so a tensor can be contiguous in both orders and still be taken for
    channels_last. With ``exact_strides`` they must be those of a new channels_last tensor (MPS wants that).
    """
    if not suggests_channels_last(t) or (exact_strides and t.stride() != usual_strides(t.shape, True)):
        return torch.contiguous_format
    return channels_last_of(t.dim() - 2)


def fits_32bit_index(t: Tensor) -> bool:
    """Whether offsets fit into 32 bits (ATen's canUse32BitIndexMath)."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.numel() < INT32_MAX and (last < INT32_MAX or 0 in t.shape)


def told(t: Tensor, opaque: bool = False) -> str:
    """Return the shape, the dtype and the layout of a tensor for people."""
    fmt = suggested(t)
    layout = "mkldnn" if opaque else short(fmt)
    strides = "" if opaque or t.is_contiguous(memory_format=fmt) else f" strides {t.stride()}"
    return f"{'x'.join(map(str, t.shape))} {short(t.dtype)} {layout}{strides}"


class ConvCall(NamedTuple):
    """One call of ``torch.convolution``, checked; its operands are on the meta device."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    geometry: Geometry
    device: str = "cpu"  # for which it is meant
    opaque: tuple[bool, bool] = (False, False)  # whether input and weight are in oneDNN's own layout
    need_backward: bool = False

    @classmethod
    def of(
        cls, input: TensorSpec | Tensor, weight: TensorSpec | Tensor, bias: TensorSpec | Tensor | None = None,
        stride: Ints = 1, padding: Padding | str = 0, dilation: Ints = 1, transposed: bool = False,
        output_padding: Ints = 0, groups: int = 1, need_backward: bool | None = None,
    ) -> ConvCall:  # fmt: skip
        """Describe operands and arguments, and check them as every convolution of this library does.

        Raises:
            ShapeError, DtypeError: operands that do not belong together.
        """
        x, w, b = TensorSpec.of(input), TensorSpec.of(weight), None if bias is None else TensorSpec.of(bias)
        form = (stride, padding, dilation, transposed, output_padding, groups)
        g = conv_geometry(w.shape, *all_arguments(len(w.shape) - 2, w.shape, *form))
        convolution_shape(x.shape, w.shape, None if b is None else b.shape, g)
        for name, t in (("weight", w), ("bias", b)):
            if t is not None and t.dtype != x.dtype and not x.mkldnn:
                raise DtypeError(f"Input type ({x.dtype}) and {name} type ({t.dtype}) should be the same")
        if need_backward is None:
            need_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (x, w, b) if t is not None)
        return cls(x.meta, w.meta, b and b.meta, g, x.device_type, (x.mkldnn, w.mkldnn), need_backward)

    @classmethod
    def of_problem(cls, p: ConvProblem, device: str, need_backward: bool) -> ConvCall:
        """Return the call that a PyTorch user writes for a problem."""
        # of a transposed one, the input positions behind the last one that the kernel reaches
        output_padding = tuple(d.high - d.least_high if p.transposed else 0 for d in p.dims)
        bias = (p.shape_of(p.bias_slot)[1],) if p.has_bias else ()
        input, weight, *biases = (
            torch.empty_strided(shape, usual_strides(shape, p.channels_last and len(shape) > 3), dtype=p.dtype,
                                device="meta")
            for shape in (p.output_shape if p.transposed else p.input_shape, p.weight_shape, bias) if shape
        )  # fmt: skip
        g = Geometry(p.stride, p.padding, p.dilation, p.transposed, output_padding, p.groups)
        return cls(input, weight, next(iter(biases), None), g, device, need_backward=need_backward)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return convolution_shape(self.input.shape, self.weight.shape, None, self.geometry)

    def symmetric(self) -> tuple[ConvCall, tuple[str, ...]]:
        """Return the call that PyTorch gets, which has one padding for both sides, and what is done around it.

        For any other padding the input is padded (or cropped) first; a transposed convolution computes the larger
        output and crops it.
        """
        x, padding = self.input, self.geometry.padding
        if all(low == high >= 0 for low, high in padding):
            return self, ()
        both = tuple((max(0, min(pair)),) * 2 for pair in padding)
        call = self._replace(geometry=self.geometry._replace(padding=both))
        if self.geometry.transposed:
            return call, ("PyTorch pads symmetrically: it computes the larger output and the caller crops it",)
        sizes = [n + sum(pair) - sum(rest) for n, pair, rest in zip(x.shape[2:], padding, both, strict=True)]
        padded = torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device="meta", memory_format=suggested(x))
        note = f"PyTorch pads symmetrically: it first makes a padded copy of the input, {told(padded)}"
        return call._replace(input=padded), (note,)

    def view_1d_as_2d(self) -> ConvCall:
        """Return the 2-D call that a 1-D one becomes: height 1, and the input copied to contiguous if it is not.

        oneDNN tensors and XPU tensors stay 1-D.
        """
        if self.weight.dim() != 3 or self.opaque[0] or self.device == "xpu":
            return self
        (stride, padding, dilation, transposed, output_padding, groups) = self.geometry
        g = Geometry((1, *stride), ((0, 0), *padding), (1, *dilation), transposed, (0, *output_padding), groups)
        return self._replace(input=self.input.contiguous().unsqueeze(2), weight=self.weight.unsqueeze(2), geometry=g)
