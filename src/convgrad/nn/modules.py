"""Convolution modules: torch's own, with the computation exchanged and nothing else.

Padding modes other than zeros are read in place by the kernels of ``csrc``; where another backend computes, they are a
pad in front of a zero-padded problem, as in torch. ``padding`` may be all that the functions take: low and high of each
dimension, negative numbers, and in 1-D ``"causal"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import functional
from .._compat import fx_tracing
from ..engine import get_backend, use_backend
from ..errors import ShapeError
from ..functional import Ints, Layout, Padding
from ..problem import pad
from .constructors import dimensions, set_constructor
from .deferred import Deferred
from .padding import Padded, as_pairs, convolve
from .tracing import leaf_of_fx, refuse_scripting

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]

Device = torch.device | str | int | None


class _WithBackend:
    """The computation of a layer by the backend that it asks for, or by the one that is chosen.

    Private names of the modules begin with ``_convgrad``: any other one may be an attribute of a user's class.
    """

    backend: str | None = None
    _convgrad_function: Callable[..., Tensor]
    _convgrad_layout: Any = "NCL"
    _convgrad_backend: Any = property(lambda self: self.backend)

    def _convgrad_compute(self, *args: Any) -> Tensor:
        function, backend, layout = self._convgrad_function, self._convgrad_backend, self._convgrad_layout
        if layout != "NCL":
            function = partial(function, layout=layout)
        if backend is None:
            return function(*args)
        if torch.compiler.is_compiling():
            name = self._convgrad_function.__name__
            return functional.convolution_with_backend(backend, name, *args, layout=layout)
        with use_backend(backend):
            return function(*args)

    __prepare_scriptable__ = refuse_scripting


class _WithLayout:
    """The order of dimensions of the 1-D modules."""

    layout: Layout = "NCL"
    _convgrad_layout = property(lambda self: self.layout)

    def extra_repr(self: Any) -> str:
        shown = super().extra_repr()  # pyright: ignore[reportAttributeAccessIssue]
        return shown if self._convgrad_layout == "NCL" else f"{shown}, layout={self._convgrad_layout}"


class _Conv(_WithBackend):
    """The constructor and the forward of the three convolutions."""

    def __init__(
        self: Any, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
        padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros",
        device: Device = None, dtype: torch.dtype | None = None, *, backend: str | None = None,
    ) -> None:  # fmt: skip
        # torch's constructor refuses the word
        known = 0 if isinstance(padding, str) and padding == "causal" else padding
        shape = (in_channels, out_channels, kernel_size, stride, known, dilation, groups)
        if backend is not None:
            get_backend(backend)
        super().__init__(*shape, bias, padding_mode, device, dtype)  # pyright: ignore[reportCallIssue]
        self.backend = backend
        if len(self.kernel_size) != (d := len(self.stride)):  # torch's constructor does not check it
            raise ShapeError(f"kernel_size is an integer or {d} of them, got {self.kernel_size}")
        if known is not padding:
            self.padding = padding
            (self.padding,) = functional.sides_of(self)
        self._reversed_padding_repeated_twice = [side for pair in reversed(functional.sides_of(self)) for side in pair]

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the convolution of the input, as torch's module does.

        The most frequent call of our own classes is written out, because each function call is a part of a small
        layer's time. `Module.__getattr__` is slow, so parameters are read from the dictionary.
        """
        own = self._parameters
        if (
            self.__class__ in _modules
            and input.__class__ is Tensor
            and self.padding_mode == "zeros"
            and self._convgrad_layout == "NCL"
            and self.backend is None
            and "weight" in own
            and "bias" in own
            and "_conv_forward" not in vars(self)
            and not fx_tracing()
        ):
            arguments = self.stride, self.padding, self.dilation, self.groups
            return self._convgrad_function(input, own["weight"], own["bias"], *arguments)
        if (input.__class__ is not Tensor or fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        return self._conv_forward(input, self.weight, self.bias)

    _convgrad_unpadded = staticmethod(convolve)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stride, dilation, groups, mode = self.stride, self.dilation, self.groups, self.padding_mode
        backend, in_rows = self._convgrad_backend, self._convgrad_layout == "NLC"

        def computed(input: Tensor, padding: Any) -> Tensor:
            return self._convgrad_compute(input, weight, bias, self.stride, padding, self.dilation, groups)

        if isinstance(input, Padded) and mode == "zeros" and not in_rows and not backend:
            call, sides = partial(computed, padding=self.padding), functional.sides_of(self)
            return input.convolved(call, weight, bias, stride, sides, dilation, groups, self._convgrad_unpadded)
        if isinstance(input, Deferred):
            input = input.read()
        if mode == "zeros":
            return computed(input, self.padding)
        sides, kernel = as_pairs(self._reversed_padding_repeated_twice), weight
        if in_rows:  # the image that it is computed as: see `conv1d`
            input, kernel = input.transpose(-1, -2).unsqueeze(-2), weight.unsqueeze(-2)
            sides, stride, dilation = ((0, 0), *sides), (1, *stride), (1, *dilation)
        if not torch.compiler.is_compiling():
            with nullcontext() if backend is None else use_backend(backend):
                output = self._convgrad_unpadded(input, kernel, bias, stride, sides, dilation, groups, mode)
            if output is not None:
                return output.squeeze(-2).transpose(-1, -2).contiguous() if in_rows else output
        input = pad(input, sides, mode)
        if in_rows:
            input = input.squeeze(-2).transpose(-1, -2)
        return computed(input, 0)


class _ConvTranspose(_WithBackend):
    """The constructor and the forward of the three transposed convolutions."""

    def __init__(
        self: Any, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
        padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, bias: bool = True, dilation: Ints = 1,
        padding_mode: str = "zeros", device: Device = None, dtype: torch.dtype | None = None,
        *, backend: str | None = None,
    ) -> None:  # fmt: skip
        shape = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups)
        if backend is not None:
            get_backend(backend)
        super().__init__(*shape, bias, dilation, padding_mode, device, dtype)  # pyright: ignore[reportCallIssue]
        self.backend = backend

    def forward(self: Any, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Apply the module; ``output_size`` selects one of the sizes that the stride makes ambiguous."""
        plain = input.__class__ is Tensor and not fx_tracing()
        if not plain and (traced := leaf_of_fx(self, input, output_size)) is not None:
            return traced
        return self._conv_forward(input, self.weight, self.bias, output_size)

    def _conv_forward(
        self: Any, input: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        if isinstance(input, Deferred):
            input = input.read()
        size, padding, in_rows = output_size, self.padding, self._convgrad_layout == "NLC"
        if size is not None:
            if in_rows and len(size) == input.dim():  # of all dimensions
                size = size[-2:-1]
            # torch's rule knows one padding for both sides: what the high side has more goes into the size it is given.
            sides = functional.sides_of(self)
            more = [0] * (len(size) - len(sides)) + [high - low for low, high in sides]
            size, padding = [n + m for n, m in zip(size, more, strict=False)], [low for low, _ in sides]
        d, stride, dilation = len(self.kernel_size), self.stride, self.dilation
        known = input.transpose(-1, -2) if in_rows else input
        more = self._output_padding(known, size, stride, padding, self.kernel_size, d, dilation)
        return self._convgrad_compute(input, weight, bias, stride, self.padding, more, self.groups, dilation)


class Conv1d(_WithLayout, _Conv, torch.nn.Conv1d):
    """A 1-d convolution: ``torch.nn.Conv1d`` by convgrad; ``backend=`` requests a backend by name.

    With ``layout="NLC"`` it takes and returns (N, L, C), without a copy; another ``layout`` is a ValueError.
    """

    _convgrad_function = staticmethod(functional.conv1d)

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
        padding: Padding | str = 0, dilation: Ints = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros",
        device: Device = None, dtype: torch.dtype | None = None,
        *, backend: str | None = None, layout: Layout = "NCL",
    ) -> None:  # fmt: skip
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups)
        functional.require_layout(layout)
        super().__init__(*shape, bias, padding_mode, device, dtype, backend=backend)
        self.layout: Layout = layout


class Conv2d(_Conv, torch.nn.Conv2d):
    """A 2-d convolution: ``torch.nn.Conv2d`` by convgrad; ``backend=`` requests a backend by name."""

    _convgrad_function = staticmethod(functional.conv2d)


class Conv3d(_Conv, torch.nn.Conv3d):
    """A 3-d convolution: ``torch.nn.Conv3d`` by convgrad; ``backend=`` requests a backend by name."""

    _convgrad_function = staticmethod(functional.conv3d)


class ConvTranspose1d(_WithLayout, _ConvTranspose, torch.nn.ConvTranspose1d):
    """A 1-d transposed convolution: ``torch.nn.ConvTranspose1d`` by convgrad; ``backend=`` requests a backend by name.

    With ``layout="NLC"`` it takes and returns (N, L, C), without a copy; another ``layout`` is a ValueError.
    """

    _convgrad_function = staticmethod(functional.conv_transpose1d)

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Ints, stride: Ints = 1,
        padding: Padding = 0, output_padding: Ints = 0, groups: int = 1, bias: bool = True, dilation: Ints = 1,
        padding_mode: str = "zeros", device: Device = None, dtype: torch.dtype | None = None,
        *, backend: str | None = None, layout: Layout = "NCL",
    ) -> None:  # fmt: skip
        shape = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups)
        functional.require_layout(layout)
        super().__init__(*shape, bias, dilation, padding_mode, device, dtype, backend=backend)
        self.layout: Layout = layout


class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d):
    """A 2-d transposed convolution: ``torch.nn.ConvTranspose2d`` by convgrad; ``backend=`` requests a backend."""

    _convgrad_function = staticmethod(functional.conv_transpose2d)


class ConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d):
    """A 3-d transposed convolution: ``torch.nn.ConvTranspose3d`` by convgrad; ``backend=`` requests a backend."""

    _convgrad_function = staticmethod(functional.conv_transpose3d)


_modules = {Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d}
_DOCSTRING = """{first}

    Shape:
        (N, C_in, *in) -> (N, C_out, *out), or both without N

    Raises:
        KeyError: no backend is registered under the name ``backend``.

    Equivalent to:
        >>> import torch, convgrad
        >>> layer, x = convgrad.nn.{name}(3, 8, 3, padding=1), torch.randn(1, 3{image})
        >>> torch.equal(layer(x), torch.nn.functional.{function}(x, layer.weight, layer.bias, padding=1))
        True
    """
for _layer in _modules:
    if "__init__" not in vars(_layer):
        set_constructor(_layer, _layer.__bases__[0], {})  # whose errors name the layer
    _layer.__doc__ = _DOCSTRING.format(
        first=(_layer.__doc__ or "").rstrip(), name=_layer.__name__, image=", 5" * dimensions(_layer),
        function=_layer._convgrad_function.__name__,
    )  # fmt: skip
