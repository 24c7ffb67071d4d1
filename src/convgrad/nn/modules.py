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
from ..padding_modes import pad
from .constructors import set_constructor
from .deferred import Deferred, stop_watching
from .padding import Padded, as_pairs, convolve
from .tracing import leaf_of_fx, refuse_scripting

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"]


class _WithBackend:
    """The ``backend`` keyword: the name of a backend that this module asks for, or None.

    Private names of the modules begin with ``_convgrad``: any other one may be an attribute of a user's class.
    """

    backend: str | None = None

    def __init__(self, *args: Any, backend: str | None = None, **kwargs: Any) -> None:
        if backend is not None:
            get_backend(backend)
        super().__init__(*args, **kwargs)
        self.backend = backend

    _convgrad_function: Callable[..., Tensor]
    _convgrad_layout: Any = "NCL"

    @property
    def _convgrad_backend(self) -> str | None:
        return self.backend

    def _convgrad_compute(self, *args: Any) -> Tensor:
        function, backend, layout = self._convgrad_function, self._convgrad_backend, self._convgrad_layout
        if layout != "NCL":
            function = partial(function, layout=layout)
        if backend is None:
            return function(*args)
        if torch.compiler.is_compiling():
            of_transposed = isinstance(self, _ConvTranspose)
            return functional.convolution_with_backend(backend, of_transposed, *args, layout=layout)
        with use_backend(backend):
            return function(*args)

    __prepare_scriptable__ = refuse_scripting


class _WithLayout:
    """The ``layout`` keyword of the 1-D modules."""

    layout: functional.Layout = "NCL"

    def __init__(self, *args: Any, layout: functional.Layout = "NCL", **kwargs: Any) -> None:
        functional.require_layout(layout)
        super().__init__(*args, **kwargs)
        self.layout = layout

    @property
    def _convgrad_layout(self) -> functional.Layout:
        return self.layout

    def extra_repr(self: Any) -> str:
        """Torch's, and the layout where it is not torch's."""
        shown = super().extra_repr()  # pyright: ignore[reportAttributeAccessIssue]
        return shown if self._convgrad_layout == "NCL" else f"{shown}, layout={self._convgrad_layout}"


class _Conv(_WithBackend):
    """What the three convolutions share."""

    def __init__(self: Any, *, padding: Any = 0, **kwargs: Any) -> None:
        # torch's constructor refuses the word
        known = 0 if isinstance(padding, str) and padding == "causal" else padding
        super().__init__(padding=known, **kwargs)
        if len(self.kernel_size) != (d := len(self.stride)):  # which torch's constructor takes
            raise ShapeError(f"kernel_size is an integer or {d} of them, got {self.kernel_size}")
        if known is not padding:
            self.padding = padding
            (self.padding,) = functional.sides_of(self)
        self._reversed_padding_repeated_twice = [side for pair in reversed(functional.sides_of(self)) for side in pair]

    def forward(self: Any, input: Tensor) -> Tensor:
        """As torch's. For our own classes the parameters are read directly, because `Module.__getattr__` is slow."""
        if (input.__class__ is not Tensor or fx_tracing()) and (traced := leaf_of_fx(self, input)) is not None:
            return traced
        own = self._parameters
        if self.__class__ in _modules and "weight" in own and "bias" in own:
            return self._conv_forward(input, own["weight"], own["bias"])
        return self._conv_forward(input, self.weight, self.bias)

    _convgrad_unpadded = staticmethod(convolve)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stride, dilation, groups, mode = self.stride, self.dilation, self.groups, self.padding_mode
        plain = mode == "zeros" and self._convgrad_layout == "NCL" and not self._convgrad_backend
        if isinstance(input, Padded):
            stop_watching()
        if isinstance(input, Padded) and plain:
            sides, compute = functional.sides_of(self), self._convgrad_unpadded
            output = input.convolve(weight, bias, stride, sides, dilation, groups, compute)
            if output is not None:
                return output
            input, saving = input.operand()
            with saving:
                return self._convgrad_compute(input, weight, bias, stride, self.padding, dilation, groups)
        if isinstance(input, Deferred):
            input = input.read()
        if mode == "zeros":
            return self._convgrad_compute(input, weight, bias, stride, self.padding, dilation, groups)
        sides, kernel, backend = as_pairs(self._reversed_padding_repeated_twice), weight, self._convgrad_backend
        in_rows = self._convgrad_layout == "NLC"
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
        return self._convgrad_compute(input, weight, bias, self.stride, 0, self.dilation, groups)


class _ConvTranspose(_WithBackend):
    """The forward that the three transposed convolutions share."""

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
        size, padding = output_size, self.padding
        if size is not None:
            # torch's rule knows one padding for both sides: what the high side has more goes into the size it is given.
            sides = functional.sides_of(self)
            more = [0] * (len(size) - len(sides)) + [high - low for low, high in sides]
            size, padding = [n + m for n, m in zip(size, more, strict=False)], [low for low, _ in sides]
        d, stride, dilation = len(self.kernel_size), self.stride, self.dilation
        known = input if self._convgrad_layout == "NCL" else input.transpose(-1, -2)
        more = self._output_padding(known, size, stride, padding, self.kernel_size, d, dilation)
        return self._convgrad_compute(input, weight, bias, stride, self.padding, more, self.groups, dilation)


_DOCSTRING = """A {d}-d {what}: ``torch.nn.{name}`` computed by convgrad; ``backend=`` requests a backend by name.
{layout}
    Shape:
        (N, C_in, {size}) -> (N, C_out, {out}), or both without N

    Raises:
        KeyError: no backend is registered under the name ``backend``.{raises}

    Equivalent to:
        >>> import torch, convgrad
        >>> ours, theirs = convgrad.nn.{name}(3, 8, 3, padding=1), torch.nn.{name}(3, 8, 3, padding=1)
        >>> _ = ours.load_state_dict(theirs.state_dict())
        >>> x = torch.randn(1, 3{x5})
        >>> torch.equal(ours(x), theirs(x)), repr(ours) == repr(theirs)
        (True, True)
    """


_LAYOUT = """
    With ``layout="NLC"`` it takes and returns (N, L, C), without a copy.
"""


def _as_in_torch(module: type[_WithBackend]) -> None:
    """Give a module its function, its docstring and torch's constructor with our keywords."""
    name = module.__name__
    known = functional.docstring_words(name)
    one_d = known["d"] == 1
    module._convgrad_function = staticmethod(getattr(functional, known["function"]))
    module.__doc__ = _DOCSTRING.format(
        **known, layout=_LAYOUT if one_d else "", raises="\n        ValueError: another ``layout``." if one_d else ""
    )
    set_constructor(module, getattr(torch.nn, name), {"backend": None, **({"layout": "NCL"} if one_d else {})})


# fmt: off
class Conv1d(_WithLayout, _Conv, torch.nn.Conv1d): ...
class Conv2d(_Conv, torch.nn.Conv2d): ...
class Conv3d(_Conv, torch.nn.Conv3d): ...
class ConvTranspose1d(_WithLayout, _ConvTranspose, torch.nn.ConvTranspose1d): ...
class ConvTranspose2d(_ConvTranspose, torch.nn.ConvTranspose2d): ...
class ConvTranspose3d(_ConvTranspose, torch.nn.ConvTranspose3d): ...
# fmt: on

_modules = {Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d}
for _module in _modules:
    _as_in_torch(_module)
