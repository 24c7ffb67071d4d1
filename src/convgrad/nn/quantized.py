"""Layers with quantized weights: those of torch, with a scheme between the parameters and the computation.

The parameters are the float shadow weights under torch's names, so a float model's state_dict fits and an optimizer
updates them. What the convolution uses is computed from them in each forward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .constructors import dimensions, set_constructor
from .linear import Linear, linear
from .modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from .schemes import Binary, Scheme, Ternary, Xnor, quantized
from .shift import ShiftPS, ShiftQ
from .tracing import leaf_of_fx

__all__ = [  # noqa: RUF022
    "BinaryConv1d", "BinaryConv2d", "BinaryConv3d", "BinaryConvTranspose1d", "BinaryConvTranspose2d",
    "BinaryConvTranspose3d", "BinaryLinear",
    "XnorConv1d", "XnorConv2d", "XnorConv3d", "XnorConvTranspose1d", "XnorConvTranspose2d", "XnorConvTranspose3d",
    "XnorLinear",
    "TernaryConv1d", "TernaryConv2d", "TernaryConv3d", "TernaryConvTranspose1d", "TernaryConvTranspose2d",
    "TernaryConvTranspose3d", "TernaryLinear",
    "Conv1dShift", "Conv2dShift", "Conv3dShift", "ConvTranspose1dShift", "ConvTranspose2dShift",
    "ConvTranspose3dShift", "LinearShift",
    "Conv1dShiftQ", "Conv2dShiftQ", "Conv3dShiftQ", "ConvTranspose1dShiftQ", "ConvTranspose2dShiftQ",
    "ConvTranspose3dShiftQ", "LinearShiftQ",
]  # fmt: skip

#: (scheme, torch's class or convgrad's) -> the layer that is both.
layers: dict[tuple[type[Scheme], type[nn.Module]], type[Quantized]] = {}


class Quantized:
    """The base of all quantized layers; ``scheme=`` in a class statement makes one."""

    scheme: Scheme
    _scheme: type[Scheme]
    _base: type[nn.Module]

    def __init_subclass__(cls, scheme: type[Scheme] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if scheme is not None:
            cls._scheme, cls._base = scheme, cls.__bases__[-1]
            layers[scheme, cls._base] = layers[scheme, getattr(nn, cls._base.__name__)] = cls
            layer: Any = cls  # torch.fx would trace an output_size as more than None, so most layers take none
            layer.forward = cls._forward_to_size if hasattr(cls, "_output_padding") else cls._forward
            options = {"check_grad": False} if "check_grad" in scheme._leading else {}
            options |= {f.name: f.default for f in dataclasses.fields(scheme)}
            set_constructor(cls, cls._base, options, scheme._leading)
            parameters, d = " and ".join(f"``{n}``" for n in (*scheme.names, "bias")), dimensions(cls._base)
            cls.__doc__ = _DOCSTRING.format(
                base=cls._base.__name__, scheme=scheme.__name__, parameters=parameters, name=cls.__name__,
                kernel=", 3" if d else "", image=", 5" * d,
            )  # fmt: skip

    def __init__(self: Any, *_: Any, check_grad: bool = False, **given: Any) -> None:
        options = [field.name for field in dataclasses.fields(self._scheme)]
        if check_grad and "act_fraction_bits" in options:
            given.setdefault("act_fraction_bits", None)  # numerical gradients would see that inputs are rounded
        scheme = self._scheme(**{name: given.pop(name) for name in options if name in given})
        if check_grad:
            if given.setdefault("dtype", torch.float64) not in (torch.float64, None):
                raise ValueError(f"check_grad=True means float64 parameters, but dtype is {given['dtype']}")
            given["dtype"] = torch.float64
        if given.get("padding_mode") == "circular_split":
            padding = _split(given.get("padding", 0), dimensions(self._base))
            given.update(padding_mode="circular", padding=padding)
        super().__init__(**given)
        self.adopt(scheme, {})
        if scheme.names != ("weight",):
            self.reset_parameters()

    def adopt(self: Any, scheme: Scheme, made: dict[Tensor, dict[str, nn.Parameter]]) -> None:
        """Take a scheme; the weight makes room for the parameters that the scheme keeps in its place.

        ``made`` has those that other layers got for the weights that they had, so that tied weights stay tied.
        """
        if self.weight.dtype.is_complex:
            raise TypeError(f"{type(self).__name__} quantizes real weights, got {self.weight.dtype}")
        self.scheme = scheme
        if scheme.names != ("weight",):
            weight = self.weight
            del self.weight
            if weight not in made:
                made[weight] = {
                    name: nn.Parameter(original, weight.requires_grad and not getattr(scheme, f"freeze_{name}", False))
                    for name, original in zip(scheme.names, scheme.originals(weight.detach()), strict=True)
                }
            for name, parameter in made[weight].items():
                self.register_parameter(name, parameter)

    def originals(self) -> tuple[Tensor, ...]:
        """The float parameters from which the weight is computed."""
        return tuple(getattr(self, name) for name in self.scheme.names)

    def quantized_weight(self: Any) -> Tensor:
        """The weight that the layer computes with; differentiable."""
        transposed, groups = getattr(self, "transposed", False), getattr(self, "groups", 1)
        return quantized(self.scheme, transposed, groups, self.training, *self.originals())

    def reset_parameters(self: Any) -> None:
        """Start again: as torch does, or as the scheme does that has other parameters."""
        if "weight" in self._parameters or self._scheme.names == ("weight",):  # which may be pruned or parametrized
            return super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            self.scheme.reset_(*self.originals())
            if self.bias is not None:
                fan_in = self.originals()[0][0].numel()  # as in torch's reset_parameters
                bound = fan_in**-0.5 if fan_in > 0 else 0
                self.bias.uniform_(-bound, bound)

    def _forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""
        return self._forward_to_size(input)

    def _forward_to_size(self: Any, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply the layer; ``output_size`` selects one of the sizes that the stride makes ambiguous."""
        rest = () if output_size is None else (output_size,)
        if (traced := leaf_of_fx(self, input, *rest)) is not None:
            return traced
        weight, bias, seen = self.quantized_weight(), self.scheme.bias(self.bias), self.scheme.input(input)
        compute = linear if isinstance(self, Linear) else self._conv_forward
        if not (isinstance(self.scheme, Xnor) and self.scheme.scale_input):
            return compute(seen, weight, bias, *rest)
        # K of XNOR-Net (arXiv:1603.05279, section 3.2), in each group of channels by itself
        kernel, groups = getattr(self, "kernel_size", ()), getattr(self, "groups", 1)
        in_rows = getattr(self, "_convgrad_layout", "NCL") == "NLC"
        channels = -1 if in_rows else -1 - len(kernel)  # the dimension of the channels
        magnitude = input.abs().unflatten(channels, (groups, -1)).mean(channels)  # [N, groups, *in]
        ones = magnitude.new_ones(groups, 1, *kernel)
        scale = compute(magnitude, ones, None, *rest)  # [N, groups, *out]
        if getattr(self, "transposed", False):
            scale = scale / compute(torch.ones_like(magnitude), ones, None, *rest).clamp(min=1)
        else:
            scale = scale / math.prod(kernel)
        output = compute(seen, weight, None, *rest).unflatten(channels, (groups, -1)) * scale.unsqueeze(channels)
        output = output.flatten(channels - 1, channels)  # the bias comes after K, which is of the input alone
        return output if bias is None else output + bias.to(output.dtype).view(-1, *[1] * (-1 - channels))

    def extra_repr(self: Any) -> str:
        return ", ".join(filter(None, (super().extra_repr(), str(self.scheme))))  # pyright: ignore[reportAttributeAccessIssue]


# ---- arguments and docstrings --------------------------------------------------------------------------------------


def _split(padding: Any, d: int) -> tuple[int, ...]:
    """Low and high of each dimension where both together have ``padding``: circular padding in PyTorch before 1.5."""
    each = (padding,) * d if isinstance(padding, int) else tuple(padding)
    if isinstance(padding, str) or len(each) != d or not all(isinstance(p, int) and p >= 0 for p in each):
        raise ValueError(f"circular_split takes one non-negative integer for each dimension, got padding={padding!r}")
    return tuple(side for p in each for side in ((p + 1) // 2, p // 2))


_DOCSTRING = """``torch.nn.{base}`` with the weights of `{scheme}`, whose arguments it takes too.

    Its parameters are {parameters}, in float; it computes with ``quantized_weight()``. Shapes are those of
    ``torch.nn.{base}``; an argument that it or `{scheme}` refuses is a ValueError or TypeError.

    Equivalent to:
        >>> import torch, convgrad
        >>> layer, x = convgrad.nn.{name}(4, 6{kernel}), torch.randn(2, 4{image})
        >>> scheme, plain = layer.scheme, torch.nn.{base}(4, 6{kernel})
        >>> plain.weight.data, plain.bias.data = layer.quantized_weight(), scheme.bias(layer.bias)
        >>> torch.allclose(layer(x), plain(scheme.input(x)), rtol=1e-4, atol=1e-4)
        True
    """


# ---- the layers: each is a layer of torch, computed by convgrad, and a scheme -----------------------------------


# fmt: off
class BinaryConv1d(Quantized, Conv1d, scheme=Binary): ...
class BinaryConv2d(Quantized, Conv2d, scheme=Binary): ...
class BinaryConv3d(Quantized, Conv3d, scheme=Binary): ...
class BinaryConvTranspose1d(Quantized, ConvTranspose1d, scheme=Binary): ...
class BinaryConvTranspose2d(Quantized, ConvTranspose2d, scheme=Binary): ...
class BinaryConvTranspose3d(Quantized, ConvTranspose3d, scheme=Binary): ...
class BinaryLinear(Quantized, Linear, scheme=Binary): ...

class XnorConv1d(Quantized, Conv1d, scheme=Xnor): ...
class XnorConv2d(Quantized, Conv2d, scheme=Xnor): ...
class XnorConv3d(Quantized, Conv3d, scheme=Xnor): ...
class XnorConvTranspose1d(Quantized, ConvTranspose1d, scheme=Xnor): ...
class XnorConvTranspose2d(Quantized, ConvTranspose2d, scheme=Xnor): ...
class XnorConvTranspose3d(Quantized, ConvTranspose3d, scheme=Xnor): ...
class XnorLinear(Quantized, Linear, scheme=Xnor): ...

class TernaryConv1d(Quantized, Conv1d, scheme=Ternary): ...
class TernaryConv2d(Quantized, Conv2d, scheme=Ternary): ...
class TernaryConv3d(Quantized, Conv3d, scheme=Ternary): ...
class TernaryConvTranspose1d(Quantized, ConvTranspose1d, scheme=Ternary): ...
class TernaryConvTranspose2d(Quantized, ConvTranspose2d, scheme=Ternary): ...
class TernaryConvTranspose3d(Quantized, ConvTranspose3d, scheme=Ternary): ...
class TernaryLinear(Quantized, Linear, scheme=Ternary): ...

class Conv1dShift(Quantized, Conv1d, scheme=ShiftPS): ...
class Conv2dShift(Quantized, Conv2d, scheme=ShiftPS): ...
class Conv3dShift(Quantized, Conv3d, scheme=ShiftPS): ...
class ConvTranspose1dShift(Quantized, ConvTranspose1d, scheme=ShiftPS): ...
class ConvTranspose2dShift(Quantized, ConvTranspose2d, scheme=ShiftPS): ...
class ConvTranspose3dShift(Quantized, ConvTranspose3d, scheme=ShiftPS): ...
class LinearShift(Quantized, Linear, scheme=ShiftPS): ...

class Conv1dShiftQ(Quantized, Conv1d, scheme=ShiftQ): ...
class Conv2dShiftQ(Quantized, Conv2d, scheme=ShiftQ): ...
class Conv3dShiftQ(Quantized, Conv3d, scheme=ShiftQ): ...
class ConvTranspose1dShiftQ(Quantized, ConvTranspose1d, scheme=ShiftQ): ...
class ConvTranspose2dShiftQ(Quantized, ConvTranspose2d, scheme=ShiftQ): ...
class ConvTranspose3dShiftQ(Quantized, ConvTranspose3d, scheme=ShiftQ): ...
class LinearShiftQ(Quantized, Linear, scheme=ShiftQ): ...
# fmt: on
