"""Bounded caches that all forget together when the set of backends changes."""

from __future__ import annotations

from typing import Any

__all__ = ["BoundedCache", "epoch", "forget"]

_caches: list[BoundedCache] = []
#: Counts how often everything was forgotten, for those who keep a plan outside of a cache.
epoch: list[int] = [0]


class BoundedCache(dict[Any, Any]):
    """A dict that drops its oldest entry when full.

    A look-up is a plain ``dict.get``; only an insertion pays for the bound.
    """

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self.limit = limit
        _caches.append(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        while len(self) >= self.limit:
            try:
                self.pop(next(iter(self)), None)
            except (StopIteration, RuntimeError):  # another thread was faster
                break
        super().__setitem__(key, value)


def forget() -> None:
    """Empty every cache: a backend came, went or was banned, so every choice must be made again."""
    epoch[0] += 1
    for cache in _caches:
        cache.clear()
