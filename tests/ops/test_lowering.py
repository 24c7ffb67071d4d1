"""Subclasses whose rules come with a module that is imported when one is first met."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad.ops import loaders, rules_of, with_rules


def test_rules_that_could_not_be_loaded_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        pass

    def described() -> None: ...

    def load() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise ImportError("not yet")
        with_rules[Foreign] = described

    tries: list[int] = []
    monkeypatch.setitem(loaders, Foreign.__module__, load)
    try:
        with pytest.raises(ImportError, match="not yet"):
            rules_of(Foreign)
        assert rules_of(Foreign) is described
        assert rules_of(Foreign) is described
    finally:
        with_rules.pop(Foreign, None)
    assert len(tries) == 2
