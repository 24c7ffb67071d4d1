"""``convgrad check --aten``: what PyTorch's own kernels get wrong on this machine, and what was found before."""

from __future__ import annotations

import sys

from ..backends import DEFECTS
from ..check import search_aten
from ..engine import record, recorded

__all__ = ["defects_here", "search"]


def search(seconds: float, seed: int) -> int:
    """Search, print and keep what is found; the exit status: 0 where nothing new was."""
    terminal, done, count = sys.stderr.isatty(), 0, 0

    def progress(share: float, problems: int, findings: int) -> None:
        nonlocal done
        done = problems
        if terminal:
            print(f"\r{share:4.0%}, {problems} problems, {findings} found", end="", file=sys.stderr, flush=True)

    for found in search_aten(seconds, seed, progress):
        count += 1
        record(found)
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr)
        print(f"PyTorch's kernel is wrong here: {found.output} of {found.problem}: {found.what}")
        print(f"  to report it: {found.repeat}", flush=True)
    if terminal:
        print("\r\x1b[K", end="", file=sys.stderr)
    avoided = "; ATen is not chosen there from now on, whatever the batch and the channels" if count else ""
    beyond = "beyond what is known (convgrad info)"
    print(f"PyTorch's kernels on {done} problems with poisoned memory: {count} found wrong {beyond}{avoided}")
    return int(count > 0)


def defects_here() -> dict[str, str]:
    """What is known to be wrong in PyTorch's kernels on this machine: from the table, and found here."""
    known = {d.name: f"{d.happens}: {d.when}" for d in DEFECTS if d.here}
    return known | {f"{f.output} of {f.problem}": f"{f.what} (found here)" for f in recorded()}
