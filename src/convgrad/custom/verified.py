"""What is remembered of a kernel's verification: the problems that passed, under a digest of the kernel and versions.

So a script that registers a kernel pays for its check once, on this machine, until something changes: the kernel, what
its code refers to, convgrad, PyTorch, Python or the processor. A check that ran out of time goes on at the next
registration, as long as too few problems have passed or more time is given.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .._version import __version__
from ..check import outputs_of
from ..engine import store
from ..problem import ConvProblem, Output, Outputs
from ..tables import counted
from .backend import CustomBackend
from .source import fingerprint

#: A kernel with fewer problems of an output is not verified.
FLOOR: Final = 30
_KIND: Final = "verified"
#: What does not change the results of a backend.
_ASIDE = ("name", "summary", "source", "verified", "note", "timings", "version", "preferred", "capture_safe")


def parts_of(backend: CustomBackend) -> list[Any]:
    """The functions and options that a backend consists of."""
    return [value for name, value in sorted(vars(backend).items()) if name not in _ASIDE]


@dataclass
class Verified:
    """What is known of a backend on a type of device."""

    outputs: Outputs
    device: str
    #: Of the backend in the store; None where nothing identifies it, and nothing is remembered.
    key: str | None = None
    #: "output problem" of each that passed.
    passed: dict[str, None] = field(default_factory=dict)
    #: Problems that the user named.
    named: list[str] = field(default_factory=list)
    #: Whether every problem that was found was checked.
    complete: bool = False
    #: Seconds.
    spent: float = 0.0
    #: Why it was checked in this process and not in a child; empty if it was in a child.
    alone: str = ""

    @classmethod
    def remembered(cls, backend: CustomBackend, device: str) -> Verified:
        """What is in the store, or nothing yet."""
        gpu = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
        versions = (__version__, torch.__version__, platform.python_version(), platform.machine(), gpu, device)
        key = fingerprint([parts_of(backend), versions])
        found = store.read(_KIND, key) if key else None
        if not isinstance(found, dict):
            return cls(outputs_of(backend), device, key)
        return cls(outputs_of(backend), device, key, **{**found, "passed": dict.fromkeys(found["passed"])})

    def remember(self) -> None:
        if self.key:
            names = ("named", "complete", "spent", "alone")
            store.write(_KIND, self.key, {"passed": [*self.passed], **{n: getattr(self, n) for n in names}})

    def has(self, output: Output, problem: ConvProblem) -> bool:
        return f"{output} {problem}" in self.passed

    def add(self, output: Output, problem: ConvProblem) -> None:
        self.passed[f"{output} {problem}"] = None

    def enough(self, named: Sequence[ConvProblem], seconds: float) -> bool:
        """Whether nothing is left to check, of these problems and in this time."""
        done = self.complete or (self.spent >= seconds and not self._fewest()[1])
        return done and {*map(str, named)} <= {*self.named}

    def sentence(self, seconds: float) -> str:
        """What was checked, in words that begin with "verified" or "not verified"."""
        n, few = len(self.passed), self._fewest()
        rest = f"; it was checked in this process: {self.alone}" if self.alone else ""
        if few[1]:
            why = "it accepts no more that could be found" if self.complete else f"no more fitted into {seconds:g} s"
            right = counted(few[0]) + (f" of {few[1]}" if len(self.outputs) > 1 else "")
            return f"not verified: {right} passed, {FLOOR} are needed; {why}{rest}"
        more = "" if self.complete else f"; more did not fit into {seconds:g} s"
        return f"verified on {n} problems{more}{rest}"

    def _fewest(self) -> tuple[int, str]:
        """The least number of problems of an output that passed, and that output if they are too few (else "")."""
        counts = Counter(key.partition(" ")[0] for key in self.passed)
        fewest = min(self.outputs, key=lambda o: counts[o])
        return counts[fewest], fewest if counts[fewest] < FLOOR else ""
