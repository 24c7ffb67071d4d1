"""What every profile is made with: its limits, its reasons, its numbers, and the machine that it was made on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import torch

from .. import __version__
from ..diagnostics import Limits, Machine, limits_of
from ..engine import active, choose
from ..engine.ab_timer import conditions
from ..models import UsageRow
from ..settings import current
from .profile import Cost, Profile, Row, Variant

Stage = Callable[[str], object]

_BUSY = (
    "More than 100 % of the limit: it was measured while this machine was busy, or the operands came from a cache. "
    "convgrad info --measure measures it again."
)


def quiet(_: str) -> None:
    """Nobody waits."""


class KnownLimits:
    """What each device can do at best: known from an earlier measurement, or measured now, once for each dtype."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, torch.dtype], Limits | None] = {}

    def of(self, row: UsageRow) -> Limits | None:
        key = (row.device, row.problem.dtype)
        if key not in self.known:
            try:
                self.known[key] = limits_of(Machine.here(torch.device(row.device)), row.problem.dtype, measured=True)
            except (ValueError, RuntimeError):
                self.known[key] = None
        return self.known[key]

    def found(self) -> tuple[dict[str, Any], ...]:
        return tuple(asdict(limits) for limits in dict.fromkeys(self.known.values()) if limits)


def reasoned(row: UsageRow) -> UsageRow:
    """With the reason for which the engine leaves a call to PyTorch, in place of the plain fact."""
    if row.backend.split(" ")[0] == "aten":
        steps = choose(row.problem, row.outputs, torch.device(row.device), current(), active())
        if [step.backend.name for step in steps] == ["aten"]:
            return replace(row, reason=steps[0].reason)
    return row


def milliseconds_of(seconds: float) -> float:
    return float(f"{seconds * 1e3:.4g}")


def shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def assembled(
    kind: str,
    what: str,
    finding: str,
    milliseconds: float | None,
    variants: Sequence[Variant],
    rows: Sequence[Row],
    costs: Sequence[Cost],
    looked: str,
    notes: Sequence[str],
    device: torch.device | None,
    limits: KnownLimits,
) -> Profile:
    if any((row.of_limit or 0) > 1.05 for row in rows):
        notes = [*notes, _BUSY]
    ordered = sorted(costs, key=lambda cost: -(cost.milliseconds or 0.0))
    return Profile(
        kind, what, finding, milliseconds, tuple(variants), tuple(rows), tuple(ordered), looked, tuple(notes),
        limits.found(), conditions(device or "cpu"), datetime.now(timezone.utc).isoformat(timespec="seconds"),
        __version__,
    )  # fmt: skip
