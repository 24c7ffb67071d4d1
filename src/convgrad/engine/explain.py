"""`explain`: for each output, every backend, whether it was chosen or why not, in which layout, with how much workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import settings
from ..problem import OUTPUTS, ConvProblem, Output
from .choice import choose
from .registry import backends, reasons_against
from .request import active

__all__ = ["Explanation", "Row", "explain_problem"]


@dataclass(frozen=True)
class Row:
    """One backend's answer for one output."""

    output: Output
    backend: str
    chosen: bool
    reasons: tuple[str, ...]
    layout: str
    workspace: int


@dataclass(frozen=True)
class Explanation:
    """What would run for a problem, and what would not and why. ``str()`` is a table."""

    problem: ConvProblem
    device: torch.device
    rows: tuple[Row, ...]

    def chosen(self) -> dict[Output, str]:
        """The backend of each output."""
        return {r.output: r.backend for r in self.rows if r.chosen}

    def __str__(self) -> str:
        head = ("output", "backend", "", "layout", "workspace", "reason")
        lines = [
            (r.output, r.backend, "chosen" if r.chosen else "", r.layout, f"{r.workspace:,} B", "; ".join(r.reasons))
            for r in self.rows
        ]
        return f"{self.problem} on {self.device}\n{_table([head, *lines])}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def explain_problem(
    problem: ConvProblem,
    outputs: Sequence[Output] | None = None,
    device: torch.device | str = "cpu",
) -> Explanation:
    """Ask every backend about every output of a problem, on a device that need not be here.

    Raises:
        BackendError: a backend that was asked for by name cannot.
    """
    device = torch.device(device)
    asked = tuple(o for o in OUTPUTS if o in (outputs or OUTPUTS))
    forward = tuple(o for o in asked if o == problem.bias_pass)
    backward = tuple(o for o in asked if o != problem.bias_pass)
    flags, rows = settings.current(), []
    for together in (forward, backward):
        steps = () if problem.empty else choose(problem, together, device, flags, active())
        reason = {o: s for s in steps for o in s.outputs}
        for output in together:
            step = reason.get(output)
            if step is None:
                rows.append(Row(output, "engine", True, ("a sum over batch and space",), "as it lies", 0))
                continue
            for backend in backends().values():
                chosen = backend is step.backend
                against = [] if output == "grad_bias" else reasons_against(backend, problem, (output,), device, flags)
                if output == "grad_bias" and not chosen:
                    continue
                why = [step.reason] if chosen else against or ["usable, expected to be slower"]
                space = 0 if against else backend.workspace(problem, step.outputs if chosen else (output,))
                layout = "as they lie" if "strided" in backend.layouts else _layout_name(problem)
                rows.append(Row(output, backend.name, chosen, tuple(why), layout, space))
    return Explanation(problem, device, tuple(rows))


def _layout_name(problem: ConvProblem) -> str:
    return "channels_last" if problem.channels_last else "contiguous"
