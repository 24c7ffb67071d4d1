"""What tests of batch normalization share: kernels for small inputs, too, and a look at what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import convgrad
from convgrad.backends import _native_library as library
from convgrad.backends.native_norm import LEAST_NORM

NEEDS_KERNELS = pytest.mark.skipif(library.load() is None, reason=library.why_absent())


def take_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEAST_NORM:
        monkeypatch.setitem(LEAST_NORM, name, 0)


def watch(monkeypatch: pytest.MonkeyPatch, name: str, note: Callable[..., None]) -> None:
    """Have ``note`` called with the arguments of each call of a function of `convgrad.nn.batch_norm`."""
    function = getattr(convgrad.nn.batch_norm, name)

    def watched(*args: Any) -> Any:
        note(*args)
        return function(*args)

    monkeypatch.setattr(convgrad.nn.batch_norm, name, watched)
