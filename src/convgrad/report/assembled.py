"""What every profile is made with: its limits, its reasons, its numbers, and the machine that it was made on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import torch

from .. import __version__
from ..diagnostics import BEYOND, TOO_LOW, Limits
from ..engine import active, choose
from ..engine.ab_timer import conditions
from ..models import UsageRow
from .profile import Cost, Profile, Row

Stage = Callable[[str], object]


def quiet(_: str) -> None:
    """Tell nobody what is being done."""


def reasoned(row: UsageRow) -> UsageRow:
    """With the reason for which the engine leaves a call to PyTorch, in place of the plain fact."""
    if row.backend.split(" ")[0] == "aten":
        steps = choose(row.problem, row.outputs, torch.device(row.device), active())
        if [step.backend.name for step in steps] == ["aten"]:
            return replace(row, reason=steps[0].reason)
    return row


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def assembled(
    rows: Sequence[Row],
    costs: Sequence[Cost] = (),
    notes: Sequence[str] = (),
    limits: Sequence[Limits | None] = (),
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Profile:
    """A profile, its costs in order, with what is known of where and when it was made; the rest are its fields."""
    if any((row.of_limit or 0) > BEYOND for row in rows):
        notes = [*notes, TOO_LOW]
    return Profile(
        rows=tuple(rows),
        costs=tuple(sorted(costs, key=lambda cost: -cost.milliseconds)),
        notes=tuple(notes),
        limits=tuple(asdict(one) for one in dict.fromkeys(limits) if one),
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        convgrad=__version__,
        **{"conditions": conditions(device), **rest},
    )
