"""A script as it runs, and a table that was written: made into profiles."""

from __future__ import annotations

import io
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..models import Usage, known_limits, run_script
from .assembled import Stage, assembled, quiet, reasoned, rounded
from .costs import costs_of_rows
from .page import shown
from .profile import Profile, Variant
from .rows import read_table, row_of


def profile_script(
    script: str, args: Sequence[str] = (), *, stock: bool = False, seconds: float = 10.0, stage: Stage = quiet
) -> tuple[Profile, int]:
    """A script run unmodified, with every convolution taken over, and its exit status.

    Args:
        stock: take nothing over.
        seconds: about how long the rest may take after the script has ended.
        stage: called with a description of each stage.

    Raises:
        FileNotFoundError: there is no such script.
        ValueError: it computed no convolution.
    """
    usage, start = Usage(), time.perf_counter()
    with usage:
        status = run_script(script, args, stock=stock, measure=False, out=io.StringIO())
    wall = time.perf_counter() - start
    if not usage.rows:
        hint = "; convgrad's own options stand before the script" if status and args else ""
        raise ValueError(f"{script} computed no convolution (its exit status is {status}{hint})")
    stage("measuring what this machine can do at best")
    seen = usage.rows if stock else [*map(reasoned, usage.rows)]
    limits = known_limits(seen)
    rows = sorted(map(row_of, seen, limits), key=lambda row: -row.total)
    stage("timing other backends for the most expensive convolutions")
    until = time.perf_counter() + 0.9 * seconds
    tune = shlex.join(["convgrad", "tune", script, *args])
    costs, looked = costs_of_rows(rows, wall * 1e3, until, tune, layout=True, stock=stock)
    who = "the script" if stock else "convgrad"
    finding = (
        f"{shown(wall)} in all, {shown(usage.seconds)} of it ({usage.seconds / wall:.0%}) in "
        f"{sum(row.calls for row in rows)} calls of convolutions, by {who}'s choice of kernels."
    )
    notes = [
        "One run tells nothing about its spread. Run it again with --stock, and compare the two with --against.",
        "A row's time for one call is the median of its last hundred calls.",
        *([f"The script's exit status was {status}."] if status else []),
    ]
    milliseconds = rounded(wall * 1e3)
    profile = assembled(
        rows, costs, notes, limits, rows[0].device, kind="run", what=script, finding=finding, looked=looked,
        milliseconds=milliseconds, variants=(Variant(who, milliseconds),),
    )  # fmt: skip
    return profile, status


def profile_table(path: str | Path) -> Profile:
    """The profile in a CSV file that ``convgrad run``, `convgrad.trace` or ``convgrad bench`` wrote, or in the JSON of
    ``convgrad run`` or of an earlier report.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file.
    """
    if str(path).endswith(".json"):
        with suppress(ValueError):
            return Profile.read(path)
    rows = read_table(path)
    total = sum(row.total for row in rows)
    calls = sum(row.calls for row in rows)
    finding = f"{calls} calls of convolutions, {shown(total * 1e-3)} in all."
    notes = ["A table does not say what its machine can do at best, so the roofline has no roof."]
    return assembled(rows, notes=notes, kind="table", what=str(path), finding=finding, conditions="not in the file")
