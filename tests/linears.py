"""What tests of linear layers share: our kernels by rule on any processor, for small inputs, too."""

from __future__ import annotations

import pytest

import convgrad.diagnostics.capture
import convgrad.models.worth
import convgrad.nn.linear
from convgrad.engine import rules


def take_small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "mkl_at_its_best", lambda: False)
    for room in (convgrad.diagnostics.capture, convgrad.models.worth, convgrad.nn.linear):
        monkeypatch.setattr(room, "linear_gains", lambda elements, *sizes: elements > 0)
