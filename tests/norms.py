"""What tests of batch normalization share: whether its kernels are here, and a look at what they are called with."""

from collections.abc import Callable
from typing import Any

import pytest

import convgrad
from convgrad.backends import _native_library as library

NEEDS_KERNELS = pytest.mark.skipif(library.load() is None, reason=library.why_absent())


def watch(monkeypatch: pytest.MonkeyPatch, name: str, note: Callable[..., None]) -> None:
    """Have ``note`` called with the arguments of each call of a function of `convgrad.nn.normalization`."""
    function = getattr(convgrad.nn.normalization, name)

    def watched(*args: Any) -> Any:
        note(*args)
        return function(*args)

    monkeypatch.setattr(convgrad.nn.normalization, name, watched)
