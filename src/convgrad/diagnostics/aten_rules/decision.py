"""`Decision`: what PyTorch decides, with every rule that led there and the value that made it true or false."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .machine import Machine


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule and what came of it.

    Args:
        text: the rule, as a statement.
        holds: whether it is true.
        value: what made it true or false.
        depth: 0 for a rule that decides, 1 and more for the conditions that it consists of.
    """

    text: str
    holds: bool
    value: str = ""
    depth: int = 0

    @property
    def cells(self) -> tuple[str, str, str]:
        """A line of a table."""
        return ("yes" if self.holds else "no", "  " * self.depth + self.text, self.value)


class DecisionLog:
    """The rules in the order in which they are evaluated."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.depth = 0

    def record(self, text: str, holds: bool, value: object = "") -> bool:
        """Note a rule and return whether it holds."""
        self.rules.append(Rule(text, bool(holds), str(value), self.depth))
        return bool(holds)


def recorded(text: str) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Make a predicate ``(log, ...) -> bool`` note itself as one rule, with its conditions below it."""

    def decorate(predicate: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(predicate)
        def evaluate(log: DecisionLog, *args: Any) -> bool:
            place = len(log.rules)
            log.depth += 1
            try:
                holds = bool(predicate(log, *args))
            finally:
                log.depth -= 1
            log.rules.insert(place, Rule(text, holds, "", log.depth))
            return holds

        return evaluate

    return decorate


@dataclass(frozen=True)
class Decision:
    """What PyTorch decides, and why.

    Args:
        kind: what was decided: ``"backend"`` or ``"memory_format"``.
        answer: its name.
        rules: every rule that was evaluated, in PyTorch's order; one that PyTorch does not reach is not there.
        machine: the machine it was decided for.
        notes: what else a reader should know.
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

    def __str__(self) -> str:
        rows = [rule.cells for rule in self.rules]
        width = max((len(text) for _, text, _ in rows), default=0)
        lines = [f"  {holds:<3}  {text:<{width}}  {value}".rstrip() for holds, text, value in rows]
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{self.kind}: {self.answer}", f"machine: {self.machine}", *lines, *notes])
