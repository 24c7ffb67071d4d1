"""What tests of linear layers share: kernels for small inputs, too."""

from __future__ import annotations

import pytest

import convgrad.models.worth
import convgrad.nn.linear


def take_small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (convgrad.models.worth, convgrad.nn.linear):
        monkeypatch.setattr(room, "linear_gains", lambda elements, *sizes: elements > 0)
