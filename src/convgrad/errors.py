"""What convgrad raises. Each class is also the builtin that PyTorch raises for the same rule."""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CheckError",
    "ConvgradError",
    "DtypeError",
    "ShapeError",
    "UnsupportedError",
]


class ConvgradError(Exception):
    """Root of everything that convgrad raises on purpose."""


class ShapeError(ConvgradError, RuntimeError):
    """Sizes, lengths or layouts that do not belong together."""


class DtypeError(ConvgradError, RuntimeError):
    """Operands whose dtypes or devices do not belong together."""


class UnsupportedError(ConvgradError, NotImplementedError):
    """A well-formed request that nothing here can compute."""


class BackendError(ConvgradError, RuntimeError):
    """A backend that was asked for by name and cannot do it, with every reason."""


class CheckError(ConvgradError, AssertionError):
    """A backend whose result is wrong: the first failing problem and how to repeat it."""
