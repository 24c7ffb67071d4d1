"""The exceptions of convgrad. Each class is also the builtin that PyTorch raises for the same rule."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = [
    "BackendError", "CheckError", "CollectiveError", "ConvgradError", "DtypeError", "ShapeError",
    "UnknownNameError", "UnsupportedError",
]  # fmt: skip


class ConvgradError(Exception):
    """Base class of the errors that convgrad raises."""


class ShapeError(ConvgradError, RuntimeError):
    """Sizes, lengths or layouts that do not belong together."""


class DtypeError(ConvgradError, RuntimeError):
    """Operands whose dtypes or devices do not belong together."""


class UnsupportedError(ConvgradError, NotImplementedError):
    """A valid request that no backend can compute."""


class BackendError(ConvgradError, RuntimeError):
    """A backend that was requested by name cannot compute the problem; with every reason."""


class CollectiveError(ConvgradError, RuntimeError):
    """A collective that failed, because one of the processes died or did not answer in time."""


class CheckError(ConvgradError, AssertionError):
    """The result of a backend is wrong; with the first failing problem and how to repeat it."""


class UnknownNameError(ConvgradError, KeyError):
    """A name that is not known; the message suggests similar ones."""

    @classmethod
    def of(cls, what: str, name: object, known: Collection[str]) -> UnknownNameError:
        """The error that names the nearest ones, or where none is near, all."""
        names = [*reversed([*known])]
        by_letters = {part: k for k in names for part in k.lower().split(":") if part} | {k.lower(): k for k in names}
        close = difflib.get_close_matches(str(name).lower(), by_letters, 3, 0.7)
        near = [*dict.fromkeys(by_letters[k] for k in close)]
        more = f", and {len(known) - 24} more" if len(known) > 24 else ""
        there = f"there are {', '.join([*known][:24]) or 'none'}{more}"
        rest = f"did you mean {' or '.join(map(repr, near))}?" if near else there
        return cls(f"{what} {name!r}; {rest}")

    def __str__(self) -> str:
        return str(self.args[0])  # as it is: a KeyError shows its argument in quotes
