"""``convgrad check --aten``: what PyTorch's own kernels get wrong on this machine, and what was found before."""

from __future__ import annotations

from .app import progress, say


def search(seconds: float, seed: int) -> list[dict[str, str]]:
    """Search, print, keep and return what is found."""
    from ..check import search_aten
    from ..engine import record

    done = 0
    findings: list[dict[str, str]] = []
    with progress("searching", 100) as advance:
        before = 0.0

        def look(share: float, problems: int) -> None:
            nonlocal before, done
            advance(100 * (share - before))
            before, done = share, problems

        for found in search_aten(seconds, seed, look):
            record(found)
            findings.append({"problem": str(found.problem), "output": found.output, "what": found.what,
                             "repeat": found.repeat})  # fmt: skip
            say(f"PyTorch's kernel is wrong here: {found.output} of {found.problem}: {found.what}")
            print(f"  to report it: {found.repeat}", flush=True)  # in one line, to be copied
    count = len(findings)
    avoided = "; ATen is not chosen there from now on, whatever the batch and the channels" if count else ""
    beyond = "beyond what is known (convgrad info --all)"
    say(f"PyTorch's kernels on {done} problems with poisoned memory: {count} found wrong {beyond}{avoided}")
    return findings


def defects_here() -> list[dict[str, str]]:
    """What is known to be wrong in PyTorch's kernels on this machine: from the table, and found here."""
    from ..backends import DEFECTS
    from ..engine import recorded

    known = [{"name": d.name, "what": d.happens, "when": d.when} for d in DEFECTS if d.here()]
    return known + [{"name": f"{f.output} of {f.problem}", "what": f.what, "when": "found here"} for f in recorded()]
