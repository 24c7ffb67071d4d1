"""The findings of a check: one result for each property of each output of each problem."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ..backends import COPY
from ..engine import registered
from ..problem import ConvProblem, Output
from ..tables import counted
from .user_backend import without_values

#: "differs": a kernel of PyTorch's does what PyTorch does not promise and what ours may not do; it is no failure.
Status = Literal["passed", "failed", "differs", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """One property of one output of one problem.

    Attributes:
        backend: its name.
        problem: what was computed.
        output: the pass, or ``grad_bias``.
        property_name: what was checked: "exact", "bound", "layouts" ...; "usable" where the backend declines.
        status: "passed", "failed", "differs" or "skipped".
        message: why it failed, differs or was skipped.
        worst: the largest error found, or the number of differing elements where none may differ.
        bound: what ``worst`` may be.
        seed: of the operands.
        device: where it ran.
        operands: shapes and strides of what the kernel was called with last.
    """

    backend: str
    problem: ConvProblem
    output: Output
    property_name: str
    status: Status
    message: str = ""
    worst: float = 0.0
    bound: float = 0.0
    seed: int = 0
    device: str = "cpu"
    operands: str = ""

    @property
    def command(self) -> str:
        """The command that repeats it, or the call if no command knows the backend."""
        known = registered().get(self.backend.removesuffix(COPY))
        return self.repeat(None if known is None else known.source)

    def repeat(self, source: str | None) -> str:
        """Return the call that repeats it, or the command if ``--kernels`` loads ``source`` (empty: built in)."""
        text, elsewhere = str(self.problem.replace(name="")), self.device != "cpu"
        if source is None:
            device = f', device="{self.device}"' if elsewhere else ""
            seed = f", seed={self.seed}" if self.seed else ""
            only = f', properties=["{self.property_name}"]'
            return f'convgrad.testing.check_problem("{self.backend}", "{text}", "{self.output}"{device}{seed}{only})'
        words = ["--kernels", source] if source else []
        words += ["check", text, "--backend", self.backend, "--output", self.output, "--property", self.property_name]
        words += ["--device", self.device] if elsewhere else []
        return shlex.join(["convgrad", *words, *(["--seed", str(self.seed)] if self.seed else [])])

    def __str__(self) -> str:
        line = f"{self.status}: {self.backend} {self.output} of {self.problem}: {self.property_name}"
        if self.message:
            line += f": {self.message}"
        if self.status in ("failed", "differs"):
            line += f"\n  worst {self.worst:.6g}, allowed {self.bound:.6g}, seed {self.seed}\n  repeat: {self.command}"
        return line


@dataclass(frozen=True)
class CheckReport:
    """Every result of a check, in the order in which they were found.

    Attributes:
        finished: whether every problem was reached in the time given.
    """

    backend: str
    results: tuple[CheckResult, ...]
    finished: bool = True

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        return tuple(r for r in self.results if r.status == "failed")

    @property
    def differences(self) -> tuple[CheckResult, ...]:
        return tuple(r for r in self.results if r.status == "differs")

    @property
    def first_failure(self) -> CheckResult | None:
        return next(iter(self.failures), None)

    @property
    def passed(self) -> int:
        return sum(r.status == "passed" for r in self.results)

    @property
    def ok(self) -> bool:
        """Nothing failed, and something was checked."""
        return not self.failures and self.passed > 0

    def raise_if_failed(self) -> None:
        """Do nothing if `ok`.

        Raises:
            AssertionError: something failed, or nothing could be checked; it says what and how to repeat it.
        """
        if not self.ok:
            raise AssertionError(str(self))

    @property
    def counts(self) -> str:
        """Return how many checks passed, failed and differ, in words."""
        differ = len(self.differences)
        text = f"{counted(self.passed, 'check')} passed, {len(self.failures)} failed"
        return f"{text}, {differ} differ in what PyTorch does not promise" if differ else text

    def reasons(self, most: int = 5) -> list[str]:
        """Return why problems were not checked, the most frequent reasons first."""
        declined = [r for r in self.results if r.property_name == "usable"]
        counts = Counter(f"{r.backend} {r.output}: {without_values(r.message)}" for r in declined)
        return [f"not checked: {message} (x{n})" for message, n in counts.most_common(most)]

    def __str__(self) -> str:
        lines = [f"{self.backend}: {self.counts}, on {len({r.problem for r in self.results})} problems"]
        if not self.finished:
            lines[0] += " (stopped when the time was up)"
        if self.first_failure is not None:
            names = Counter(f"{r.output} {r.property_name}" for r in self.failures)
            lines.append("failures: " + ", ".join(f"{name} x{n}" for name, n in names.most_common()))
            lines.append(f"first {self.first_failure}")
        elif not self.passed:
            lines += ["nothing could be checked", *self.reasons()]
        return "\n".join(lines)
