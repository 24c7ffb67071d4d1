"""Shared by the benchmarks: where they ran, and a file of results that grows row by row."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import __version__
from ..engine.measure import conditions, keep_memory, surroundings
from .app import fail, progress, say

#: Columns that say where a row comes from.
CONDITIONS = ("processor", "threads", "torch", "convgrad", "commit", "memory", "busy")


def conditions_here(busy: bool = False) -> dict[str, Any]:
    """A value for each of `CONDITIONS`."""
    here = surroundings("cpu")
    return {
        "processor": here["processor"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "convgrad": __version__,
        "commit": _commit(),
        "memory": here["memory"],
        "busy": (os.cpu_count() or 1) if busy else 0,
    }


def _commit() -> str:
    """Return the commit of the checkout that holds this package; empty where it was installed from a wheel."""
    here = Path(__file__).resolve()
    if not any((folder / ".git").exists() for folder in here.parents[:5]):
        return ""
    command = ["git", "-C", str(here.parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Results:
    """A CSV file that grows row by row, so that a run that is cut off goes on from there.

    Args:
        path: where; None writes nothing.
        columns: of each row.
        key: columns that say what a row is about: with ``resume``, what the file holds already is `done`.
        resume: add to a file that exists.
    """

    def __init__(self, path: Path | None, columns: Sequence[str], key: Sequence[str], resume: bool = False) -> None:
        self.path, self.columns, self._key = path, tuple(columns), tuple(key)
        self.rows: list[dict[str, str]] = []
        self._done: set[tuple[str, ...]] = set()
        if path is None:
            if resume:
                raise fail("--resume adds to a file of rows, and none is named", "--csv names it")
            return
        if path.exists() and path.stat().st_size:
            if not resume:
                raise fail(f"{path} exists", "--resume adds what is missing; or remove it")
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a row that was being written when the process was killed
            reader = csv.DictReader(whole.decode("utf-8").splitlines())
            if tuple(reader.fieldnames or ()) != self.columns:
                raise fail(f"{path} has other columns: it is of another command or version", "another file")
            self.rows = list(reader)
            self._done = {self._of(row) for row in self.rows}
            os.truncate(path, len(whole))
        else:
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(self.columns)

    def done(self, **key: Any) -> bool:
        """Whether there is a row about this."""
        return self._of(key) in self._done

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row, at once; numbers to four digits."""
        text = {c: f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for c, v in row.items()}
        self.rows.append(text)
        self._done.add(self._of(row))
        if self.path is not None:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self.columns, lineterminator="\n").writerow(text)

    def _of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in self._key)


def plain(row: Mapping[str, str]) -> dict[str, str | float | None]:
    """A row with its numbers as numbers, and None where there is nothing."""
    texts = {"problem", "models", "model", "layout", "choice", "output", "pytorch_best", "rules", "measured", "note"}
    texts |= {*CONDITIONS} - {"threads", "busy"}
    counts = {"batch", "size", "replaced", "convolutions", "threads", "busy"}
    return {c: v if c in texts else (int if c in counts else float)(v) if v else None for c, v in row.items()}


def deadline(minutes: float) -> float:
    """When the time for measuring that begins now is over, by `time.perf_counter`; 0 minutes: no end."""
    return time.perf_counter() + (60 * minutes or float("inf"))


@contextmanager
def busy_cores(busy: bool) -> Generator[list[subprocess.Popen[bytes]], None, None]:
    """Another process on each core, which computes without end, while the block runs."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100000))"  # not beyond this one's end
    command = [sys.executable, "-c", program]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range((os.cpu_count() or 1) if busy else 0)]
    try:
        yield others
    finally:
        for other in others:
            other.kill()
            other.wait()


def prepare(threads: int) -> None:
    """Set the number of threads, and let both sides keep freed memory."""
    if threads:
        torch.set_num_threads(threads)
    keep_memory()


# ---- a benchmark of many rows ------------------------------------------------------------------------


class Given(NamedTuple):
    """The options that every benchmark of models takes."""

    models: list[str]
    threads: int
    layout: str
    seconds: float
    minutes: float
    busy: bool
    csv: Path | None
    resume: bool


#: Columns that say what a row is about, and a function that finds the others.
Row = tuple[dict[str, str], Callable[[], dict[str, Any]]]


def run_rows(
    what: str,
    given: Given,
    columns: Sequence[str],
    key: Sequence[str],
    wanted: Callable[[], Sequence[Row]],
    show: Callable[[Sequence[dict[str, str]]], None],
) -> tuple[int, dict[str, Any]]:
    """Time every row that the file lacks, and print all; the exit status, and all as plain data.

    Args:
        what: the rows are, as the data calls them.
        columns, key: as for `Results`.
        show: prints the rows.
    """
    results = Results(given.csv, columns, key, given.resume)
    prepare(given.threads)
    todo, where, status = wanted(), conditions_here(given.busy), 0

    def missing() -> list[Row]:
        return [row for row in todo if not results.done(**{**where, **row[0]})]

    with busy_cores(given.busy), progress(what, len(missing())) as advance:
        try:
            end = deadline(given.minutes)
            for about, timed in missing():
                if time.perf_counter() >= end:
                    break
                results.add({**dict.fromkeys(columns, ""), **about, **timed(), **where})
                advance()
        except KeyboardInterrupt:
            status = 130
    rows = [r for r in results.rows if (r["threads"], r["busy"]) == (str(where["threads"]), str(where["busy"]))]
    show(rows)
    say(conditions())
    left = len(missing())
    if left:
        say(f"{left} of {len(todo)} are left" + ("; --resume goes on" if given.csv else ""), sys.stderr)
    data = {"conditions": conditions(), what: [plain(row) for row in rows], "left": left}
    return status or int(any(row["note"].startswith("wrong") for row in rows)), data
