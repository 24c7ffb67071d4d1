"""How fast a kernel was when it was registered, in figures and in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Timing", "in_words"]


class Timing(NamedTuple):
    """How many times as fast as another backend, for some outputs of a problem."""

    problem: str
    outputs: tuple[str, ...]
    other: str
    speed: float
    low: float
    high: float

    def __str__(self) -> str:
        ratio = f"{self.speed:.2g}x [{self.low:.2g}, {self.high:.2g}]"
        return f"{'+'.join(self.outputs)} of {self.problem}: {ratio} as fast as {self.other}"


def in_words(timings: Sequence[Timing]) -> str:
    """One sentence for all that was timed.

    Equivalent to:
        >>> in_words([Timing("", ("forward",), "aten", 2, 1, 3), Timing("", ("forward",), "aten", 0.5, 0.4, 0.6)])
        'forward 0.5x to 2x as fast as aten'
    """
    parts = []
    for outputs in dict.fromkeys(t.outputs for t in timings):
        of = [t for t in timings if t.outputs == outputs]
        low, high = (f"{which(t.speed for t in of):.2g}x" for which in (min, max))
        others = " and ".join(dict.fromkeys(t.other for t in of))
        parts.append(f"{'+'.join(outputs)} {low if low == high else f'{low} to {high}'} as fast as {others}")
    return ", ".join(parts)
