"""A store of its own for the tests that measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad.engine import cache, get_backend, register, registry, store

from .measuring import Fake, fresh


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of its own, nothing measured so far, only fakes beside ATen, and all flags as they were."""
    monkeypatch.setenv("CONVGRAD_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_unwritten", {})
    fresh(monkeypatch)
    none = ("im2col", "aten:channels_last", "aten:padded", "aten:mkldnn")
    entries = {name: registry.Registered(get_backend(name), candidate=False, source="") for name in none}
    monkeypatch.setattr(registry, "_registered", registry._registered | entries)
    yield tmp_path
    cache.invalidate()


@pytest.fixture
def quick(folder: Path) -> Fake:
    """The fastest of all, registered."""
    fake = Fake("quick", cheats=True)
    register(fake)
    return fake
