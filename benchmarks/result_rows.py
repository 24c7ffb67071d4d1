"""Shared by the benchmarks: where they ran, and a file of results that grows row by row."""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import convgrad
from convgrad.cli.models import MODELS
from convgrad.engine.measure import conditions, keep_memory, surroundings

#: Columns that say where a row comes from.
CONDITIONS = ("processor", "threads", "torch", "convgrad", "commit", "memory", "busy")


def conditions_here(busy: bool = False) -> dict[str, Any]:
    """A value for each of `CONDITIONS`."""
    here = surroundings("cpu")
    return {
        "processor": here["processor"],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "convgrad": convgrad.__version__,
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
        columns: of each row.
        key: columns that say what a row is about: with ``resume``, what the file holds already is `done`.
        resume: add to a file that exists.

    Raises:
        SystemExit: the file exists, and holds something else or is not to be resumed.
    """

    def __init__(self, path: Path, columns: Sequence[str], key: Sequence[str], resume: bool = False) -> None:
        self.path, self.columns, self._key = path, tuple(columns), tuple(key)
        self.rows: list[dict[str, str]] = []
        self._done: set[tuple[str, ...]] = set()
        if path.exists() and path.stat().st_size:
            if not resume:
                raise SystemExit(f"{path} exists: --resume adds what is missing; or remove it")
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a row that was being written when the process was killed
            reader = csv.DictReader(whole.decode("utf-8").splitlines())
            if tuple(reader.fieldnames or ()) != self.columns:
                raise SystemExit(f"{path} has other columns: it is of another command or version")
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
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(text)

    def _of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in self._key)


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


def options_of(what: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark of models takes."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="where the rows go")
    parser.add_argument("models", nargs="*", help="models, module:factory, or files of problems; all models by default")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--layout", default="", choices=("contiguous", "channels_last", "auto"))
    parser.add_argument("--seconds", type=float, default=seconds, help="for each comparison")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many; 0: no limit")
    parser.add_argument("--busy", action="store_true", help="run another process on each core")
    parser.add_argument("--resume", action="store_true", help="add the missing rows to the file")
    return parser


def models_named(names: Sequence[str], known: Sequence[str] = tuple(MODELS)) -> list[str]:
    """Return the models that are meant, the user's own and files last; all that are known where none is named.

    Raises:
        SystemExit: there is none of this name.
    """
    own = [name for name in names if ":" in name or Path(name).is_file()]
    unknown = [name for name in names if name not in known and name not in own]
    if unknown:
        raise SystemExit(f"there is no model {unknown[0]!r}: one of {', '.join(known)}, or module:factory")
    return [*(name for name in known if name in names or not names), *dict.fromkeys(own)]


def shape_of(name: str, batch: int, size: int) -> str:
    """Return the shape of the input of a model: images of size x size, or sequences of the model's own length."""
    sample = MODELS[name].input if name in MODELS else (3, size, size)
    return "x".join(map(str, (batch, 3, size, size) if len(sample) == 3 else (batch, *sample)))


#: Columns that say what a row is about, and a function that finds the others.
Row = tuple[dict[str, str], Callable[[], dict[str, Any]]]


def run_rows(
    options: argparse.Namespace,
    columns: Sequence[str],
    key: Sequence[str],
    wanted: Callable[[], Sequence[Row]],
    show: Callable[[Sequence[dict[str, str]]], None],
) -> int:
    """Time every row that the file lacks, print all, and return the exit status.

    Args:
        columns, key: as for `Results`.
        show: prints the rows.
    """
    results = Results(options.csv, columns, key, options.resume)
    prepare(options.threads)
    todo, where, status = wanted(), conditions_here(options.busy), 0

    def missing() -> list[Row]:
        return [row for row in todo if not results.done(**{**where, **row[0]})]

    with busy_cores(options.busy):
        try:
            end = deadline(options.minutes)
            for number, (about, timed) in enumerate(missing()):
                if time.perf_counter() >= end:
                    break
                results.add({**dict.fromkeys(columns, ""), **about, **timed(), **where})
                print(f"\r{number + 1} rows", end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            status = 130
    print(file=sys.stderr)
    rows = [r for r in results.rows if (r["threads"], r["busy"]) == (str(where["threads"]), str(where["busy"]))]
    show(rows)
    print(conditions())
    if left := len(missing()):
        print(f"{left} of {len(todo)} are left; --resume goes on", file=sys.stderr)
    return status or int(any(row["note"].startswith("wrong") for row in rows))
