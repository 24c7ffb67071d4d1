"""`Decision`: an answer together with every rule that was asked on the way to it, in order."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .machine import Machine

__all__ = ["Decision", "Rule", "Trail", "question"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule and what came of it.

    Args:
        text: the rule, as a statement.
        holds: whether it is true.
        value: what made it true or false.
        depth: 0 for a question that decides, 1 and more for the conditions that it consists of.
    """

    text: str
    holds: bool
    value: str = ""
    depth: int = 0


class Trail:
    """Collects rules in the order in which they are asked."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.depth = 0

    def ask(self, text: str, holds: bool, value: object = "") -> bool:
        """Note a rule and return whether it holds."""
        self.rules.append(Rule(text, bool(holds), str(value), self.depth))
        return bool(holds)


def question(text: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Make a predicate ``(trail, ...) -> bool`` note itself as one rule, with its conditions below it."""

    def decorate(predicate: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(predicate)
        def asked(trail: Trail, *args: Any) -> bool:
            place = len(trail.rules)
            trail.depth += 1
            try:
                holds = bool(predicate(trail, *args))
            finally:
                trail.depth -= 1
            trail.rules.insert(place, Rule(text, holds, "", trail.depth))
            return holds

        return asked

    return decorate


@dataclass(frozen=True)
class Decision:
    """What PyTorch decides, and why.

    Args:
        kind: what was decided: ``"backend"`` or ``"memory_format"``.
        answer: the name of it.
        rules: every rule that was asked, in PyTorch's order; a rule that PyTorch does not reach is not there.
        machine: the machine it was decided for.
        notes: what a reader should know besides.
        value: the answer as PyTorch's own value (the number of a backend, a `torch.memory_format`).
    """

    kind: str
    answer: str
    rules: tuple[Rule, ...]
    machine: Machine
    notes: tuple[str, ...] = ()
    value: Any = field(default=None, compare=False)

    @property
    def backend(self) -> str:
        """The backend's name, where a backend was decided."""
        return self._value_of_kind("backend", self.answer)

    @property
    def memory_format(self) -> torch.memory_format:
        """The layout, where a layout was decided."""
        return self._value_of_kind("memory_format", self.value)

    def _value_of_kind(self, kind: str, value: Any) -> Any:
        if self.kind != kind:
            raise AttributeError(f"this decision is about a {self.kind}, not a {kind}")
        return value

    @property
    def because(self) -> tuple[Rule, ...]:
        """The deciding questions only, without their conditions."""
        return tuple(rule for rule in self.rules if rule.depth == 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for json."""
        return {
            self.kind: self.answer,
            "machine": str(self.machine),
            "rules": [{"rule": r.text, "holds": r.holds, "value": r.value, "depth": r.depth} for r in self.rules],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.answer}", f"machine: {self.machine}"]
        width = max((2 * r.depth + len(r.text) for r in self.rules), default=0)
        for r in self.rules:
            text = "  " * r.depth + r.text
            lines.append(f"  {'yes' if r.holds else 'no ':<3}  {text:<{width}}  {r.value}".rstrip())
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'yes' if r.holds else 'no'}</td>"
            f"<td style='text-align:left;padding-left:{1.2 * r.depth + 0.4}em'>{html.escape(r.text)}</td>"
            f"<td style='text-align:left'>{html.escape(r.value)}</td></tr>"
            for r in self.rules
        )
        notes = "".join(f"<p>{html.escape(n)}</p>" for n in self.notes)
        return (
            f"<p><b>{self.kind}: {html.escape(self.answer)}</b><br>{html.escape(str(self.machine))}</p>"
            f"<table><tr><th></th><th>rule</th><th>value</th></tr>{rows}</table>{notes}"
        )
