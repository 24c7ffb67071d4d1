"""The one cache of plans: bounded, and emptied whenever choices may change."""

from __future__ import annotations

from typing import Any

from . import table

_MOST = 4096

#: Everything that a call's meaning and choice depend on -> its plan; see `resolver.find`.
plans: dict[Any, Any] = {}
#: How often the cache was emptied: who keeps a plan outside of it compares this with `Plan.generation`.
generation: list[int] = [0]


def remember(key: Any, plan: Any, since: int) -> None:
    """Keep a plan; where there are too many, all others go.

    Args:
        since: the generation in which its making began; one that was made while the cache was emptied is not kept.
    """
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = plan
    if generation[0] != since:
        plans.pop(key, None)


def invalidate() -> None:
    """Empty the cache: a backend came or went, or the default changed, so every choice must be made again."""
    generation[0] += 1
    plans.clear()
    table.clear()
