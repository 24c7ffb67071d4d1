"""What is remembered of a kernel's verification: the problems that passed, under a digest of the kernel and versions.

So a script that registers a kernel pays for its check once, on this machine, until something changes: the kernel, what
its code refers to, convgrad, PyTorch, Python or the processor. A check that ran out of time goes on at the next
registration, until every problem is checked or the others do not fit into the time given.
"""

from __future__ import annotations

import platform
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
_KEPT: Final = ("passed", "named", "left", "tried", "alone")
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
    #: How many problems were found that were not checked; None where nobody knows.
    left: int | None = None
    #: In so many seconds no further problem could be checked.
    tried: float = 0.0
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
        kept = {n: found[n] for n in _KEPT if n in found}
        return cls(outputs_of(backend), device, key, **{**kept, "passed": dict.fromkeys(found["passed"])})

    def remember(self) -> None:
        if self.key:
            store.write(_KIND, self.key, {n: getattr(self, n) for n in _KEPT} | {"passed": [*self.passed]})

    def has(self, output: Output, problem: ConvProblem) -> bool:
        return f"{output} {problem}" in self.passed

    def add(self, output: Output, problem: ConvProblem) -> None:
        self.passed[f"{output} {problem}"] = None

    def few(self, output: Output) -> bool:
        """Whether too few problems of an output have passed."""
        return self._count(output) < FLOOR

    def enough(self, named: Sequence[ConvProblem], seconds: float, goes_on: bool) -> bool:
        """Whether nothing is left to check, of these problems and in this time, or for now what has passed will do.

        Args:
            goes_on: whether a check that ran out of time goes on here although enough problems have passed.
        """
        done = self.left == 0 or not (any(map(self.few, self.outputs)) or (goes_on and seconds > self.tried))
        return done and {*map(str, named)} <= {*self.named}

    def sentence(self, seconds: float) -> str:
        """What was checked, in words that begin with "verified" or "not verified"."""
        n, fewest = len(self.passed), min(self.outputs, key=self._count)
        rest = f"; it was checked in this process: {self.alone}" if self.alone else ""
        if self.few(fewest):
            why = f"no more fitted into {seconds:g} s" if self.left != 0 else "it accepts no more that could be found"
            right = counted(self._count(fewest)) + (f" of {fewest}" if len(self.outputs) > 1 else "")
            return f"not verified: {right} passed, {FLOOR} are needed; {why}{rest}"
        if self.left:
            return f"verified on {n} of {n + self.left} problems; more did not fit into {seconds:g} s{rest}"
        return f"verified on {n} problems{rest}"

    def _count(self, output: Output) -> int:
        return sum(key.startswith(f"{output} ") for key in self.passed)
