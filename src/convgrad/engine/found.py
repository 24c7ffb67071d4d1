"""Defects of PyTorch's kernels that `convgrad check --aten` found on this machine, kept in the store and avoided."""

from __future__ import annotations

import platform
from functools import cache
from typing import NamedTuple

import torch

from .._compat import onednn_limit
from ..backends import learn
from ..problem import OUTPUTS, ConvProblem, Output
from .cache import invalidate
from .measure import store

_KIND = "defect"


class Found(NamedTuple):
    """One finding: an output of a problem that PyTorch's kernel got wrong here."""

    problem: ConvProblem
    output: Output
    what: str
    #: A command that shows it again, with PyTorch alone.
    repeat: str


def _machine() -> str:
    """Return the key of a finding: all that decides which kernel runs."""
    limit = onednn_limit() or "any"
    return f"torch {torch.__version__} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {limit}"


def recorded() -> list[Found]:
    """Everything that was found on this machine with this PyTorch."""
    findings = []
    for key, value in store.items(_KIND).items():
        machine, _, rest = key.partition("; ")
        output, _, text = rest.partition("; ")
        try:
            if machine == _machine() and output in OUTPUTS:
                findings.append(Found(ConvProblem.parse(text), output, value["what"], value["repeat"]))
        except (ValueError, KeyError, TypeError):  # of another version of this library
            continue
    return findings


def record(found: Found) -> None:
    """Keep a finding, and avoid PyTorch's kernel there from now on."""
    store.write(_KIND, f"{_machine()}; {found.output}; {found.problem}", {"what": found.what, "repeat": found.repeat})
    learn([found[:3]])
    invalidate()


@cache
def load() -> None:
    """Read what was found, once a process."""
    learn(f[:3] for f in recorded())
