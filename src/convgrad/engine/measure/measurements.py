"""Measurements of problems on this machine: reading them, merging new ones, and the choice that follows.

A **way** to compute some outputs is the names of backends: one, for a single pass or for several outputs in one call;
or one for each pass, joined by commas. Times are relative to the first way of a measurement (ATen's, where it can), for
these survive a machine that was shared; each further measurement adds one, and the median decides.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from ...backends import Backend
from ...foreign import read_as
from ...problem import ConvProblem, Output, Outputs, output_length, passes_of
from ...settings import measured
from ..cache import clear_table
from ..registry import backends, computed_at_once, registered
from . import store
from .environment import environment, kind_of_machine

#: So many measurements, taken at different times, make a choice for good.
SETTLED = 3
KIND = "choice"
_MOST_TIMES = 7  # of each way, the newest
#: A way must be this much faster than the first one to be taken instead: less is noise.
_CLEAR = 0.98
_LONGEST = 2000  # characters of a text


@dataclass
class Measurement:
    """The times of each way, relative to the first one's, newest last; and the ways that were wrong."""

    times: dict[str, tuple[float, ...]] = field(default_factory=dict)
    #: Way -> what was wrong with its result, or that it raised; never taken.
    wrong: dict[str, str] = field(default_factory=dict)

    # Of one that was looked up, and no part of what is stored: it is of this problem, not of one like it; it has every
    # kernel that a user registered to be measured.
    same = True
    complete = True

    def checked(self, *more: str) -> Measurement:
        """Return it, which another program may have written, or raise a ValueError; with texts that belong to it."""
        if not self.times or not all(times and min(times) > 0 for times in self.times.values()):
            raise ValueError("a measurement has no times, or one that is not above 0")
        if any(len(text) > _LONGEST for text in (*self.times, *self.wrong, *self.wrong.values(), *more)):
            raise ValueError(f"a measurement has a text of more than {_LONGEST} characters")
        return self

    def to_json(self) -> dict[str, Any]:
        times = {way: [float(f"{t:.4g}") for t in times] for way, times in self.times.items()}
        return {"times": times, **({"wrong": self.wrong} if self.wrong else {})}

    def merged(self, newer: Measurement) -> Measurement:
        """Both, and of each way's times the newest; only the newer one where a kernel has changed since."""
        other_base = [*self.times][:1] != [*newer.times][:1]  # relative to something else
        if other_base or _differ(self.times, newer.times):
            return newer
        ways, wrong = dict.fromkeys((*self.times, *newer.times)), self.wrong | newer.wrong
        times = {w: (*self.times.get(w, ()), *newer.times.get(w, ()))[-_MOST_TIMES:] for w in ways if w not in wrong}
        return Measurement(times, wrong)

    @property
    def count(self) -> int:
        """The number of times it was measured."""
        return len(next(iter(self.times.values()), ()))

    def ranked(self) -> list[tuple[str, float]]:
        """Ways with their median times, the fastest first; the first way before those that are hardly faster.

        One that was timed in fewer than half of the measurements is left out: the best passes are not always the same.
        """
        medians = {way: statistics.median(t) for way, t in self.times.items() if 2 * len(t) >= self.count}
        first = next(iter(medians), "")
        return sorted(medians.items(), key=lambda item: item[1] * (_CLEAR if item[0] == first else 1))

    def reason(self, way: str) -> str:
        """Return why this way is taken, as a sentence."""
        medians, first = dict(self.ranked()), next(iter(self.times))
        often = {1: "once", 2: "twice"}.get(self.count, f"{self.count} times")
        said = f"measured {often} on this machine" + ("" if self.same else ", a similar problem")
        if way != first:
            return f"{said}: {medians[first] / medians[way]:.2f}x as fast as {_in_words(first)}"
        if other := next((w for w in medians if w != way), ""):
            return f"{said}: the next, {_in_words(other)}, takes {medians[other] / medians[way]:.2f}x as long"
        return f"{said}: the only one that can"


def _in_words(way: str) -> str:
    """The backends of a way: ``aten``; ``native and aten``; ``aten in 2 calls``."""
    names = [name for name, _ in parts_of(way)]
    return f"{names[0]} in {len(names)} calls" if len(names) > len({*names}) else " and ".join(names)


def label(backend: Backend) -> str:
    """Return what a way calls a backend: its name, and the version of its kernel where it has one."""
    return f"{backend.name}@{backend.version}" if backend.version else backend.name


def parts_of(way: str) -> list[tuple[str, str]]:
    """Return the backends of a way, each with the version of its kernel: this alone reads the text."""
    return [(name, version) for name, _, version in (part.partition("@") for part in way.split(", "))]


def _differ(ways: Iterable[str], now: Iterable[str]) -> bool:
    """Whether ways name another version of a backend than those of now: what was slower may be the fastest."""
    before, after = (dict(part for way in some for part in parts_of(way)) for some in (ways, now))
    return any(after.get(name, version) != version for name, version in before.items())


# ---- of one problem --------------------------------------------------------------------------------


def key_of(problem: ConvProblem, outputs: Collection[Output], where: str, about: bool = False) -> str:
    """Return all that changes the answer (no gradient of a bias does), of a problem or of all ``about`` like it."""
    problem = similar(problem) if about else problem.replace(name="") if problem.name else problem
    return f"{where} | {'about ' if about else ''}{'+'.join(passes_of(outputs))} | {problem}"


@lru_cache(256)
def similar(problem: ConvProblem) -> ConvProblem:
    """One problem that stands for many: the batch a power of two, sizes above 8 a power of the square root of two."""
    sizes = tuple(n if n <= 8 else round(2 ** (round(2 * math.log2(n)) / 2)) for n in problem.input_size)
    batch = 2 ** round(math.log2(problem.batch)) if problem.batch else 0
    dims = zip(sizes, problem.dims, strict=True)
    outputs = tuple(output_length(n, d.kernel, d.stride, d.low, d.high, d.dilation) for n, d in dims)
    if min(outputs) < 1:
        sizes, outputs = problem.input_size, problem.output_size
    return problem.replace(batch=batch, input_size=sizes, output_size=outputs, name="").canonical()


def find(problem: ConvProblem, outputs: Outputs, device: torch.device, fresh: bool = False) -> Measurement | None:
    """Return what was measured of a problem with the present kernels, or of one like it; ``fresh``: by others, too."""
    where = environment(device)
    known = _snapshot(store.folder(), where)
    for about in (False, True) if known or fresh else ():
        key = key_of(problem, outputs, where, about)
        value = store.read(KIND, key) if fresh else known.get(key)
        if value is not None:
            known[key] = value
        found = _read(value)
        if found.times and not _differ(found.times, map(label, backends().values())):
            found.same = not about
            found.complete = not any(computed_at_once(b, problem, outputs, device) for b in _unmeasured(found))
            return found
    return None


def add(problem: ConvProblem, outputs: Outputs, device: torch.device, new: Measurement) -> Measurement:
    """Add a measurement to those of the problem and to those of the ones like it; return what is known now."""
    where, found = environment(device), new
    for about in (True, False):
        key = key_of(problem, outputs, where, about)
        found = _read(store.read(KIND, key))  # not of the snapshot: another process may have measured it too
        compared_others = any(label(b) in new.times for b in _unmeasured(found))
        found = new if compared_others else found.merged(new)
        store.write(KIND, key, value := found.to_json())
        _snapshot(store.folder(), where)[key] = value
    measured[0] += 1
    clear_table()
    return found


def _unmeasured(known: Measurement) -> list[Backend]:
    """Return the kernels that a user registered with ``prefer="measured"`` and that a measurement does not have."""
    mine = [entry.backend for entry in registered().values() if entry.candidate and entry.source != ""]
    return [b for b in mine if label(b) not in known.times and label(b) not in known.wrong]


def _read(value: Any) -> Measurement:
    """Return a value of the store; one without times where there is none, or another version's."""
    try:
        return read_as(Measurement, value, "a measurement").checked()
    except ValueError:
        return Measurement()


def reload() -> None:
    """Look into the store again when next asked."""
    _snapshot.cache_clear()


@cache
def _snapshot(_: Path | None, where: str) -> dict[str, Any]:
    """Key -> what the store in a folder held of a machine when it was first asked, and what was added since."""
    return {key: value for key, value in store.items(KIND).items() if key.startswith(f"{where} | ")}


# ---- all of them -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Exported(Measurement):
    """An item of what `exported` returns."""

    machine: str
    outputs: str
    problem: str


def exported() -> list[dict[str, Any]]:
    """Return every measurement that the store holds as plain data, for another machine of the same kind, too."""
    rows = ((key.split(" | "), value) for key, value in store.items(KIND).items())
    names = ("machine", "outputs", "problem")
    return [dict(zip(names, key, strict=True), **value) for key, value in rows if len(key) == 3 and _read(value).times]


def summary(rows: Iterable[dict[str, Any]] | None = None) -> dict[str, int]:
    """Machine and settings -> of how many problems there are rows (by default of the store), with or without bias."""
    rows = exported() if rows is None else rows
    found = {(r["machine"], r["problem"].replace(" bias", "")) for r in rows if not r["outputs"].startswith("about ")}
    return dict(Counter(machine for machine, _ in sorted(found)))


def forget() -> int:
    """Remove every measurement; return of how many problems there were some."""
    reload()
    count = sum(summary().values())
    return count if store.forget(KIND) else 0


def imported(rows: Any) -> tuple[int, int]:
    """Keep what was exported where less is known, or raise ValueError; count the problems, all and of this machine."""
    never = {name for name, entry in registered().items() if not entry.candidate}
    found: dict[str, _Exported] = {}
    for row in read_as(tuple[_Exported, ...], rows, "choices"):
        where, named, text = row.machine, row.outputs, row.problem
        row.checked(where, named, text)
        about = named.startswith("about ")
        passes: Any = named.removeprefix("about ").split("+")
        key = key_of(ConvProblem.parse(text), passes, where, about)
        if key != f"{where} | {named} | {text}" or key.count(" | ") != 2 or not key.isprintable():
            raise ValueError(f"these are no outputs of a problem: {named!r} of {text!r}")
        for way in row.times:
            names = [name for name, _ in parts_of(way)]
            if never.intersection(names) or len(names) not in (1, len(passes)) or not way.isprintable():
                raise ValueError(f"{way!r} is no choice for {named} of {text}")
        found[key] = row
    for key, new in found.items():
        if _read(store.read(KIND, key)).count < new.count:
            store.write(KIND, key, new.to_json())
    reload()
    here = {kind_of_machine(torch.device(kind)) for kind in ("cpu", "cuda")} - {""}
    counts = summary(vars(row) for row in found.values())
    return sum(counts.values()), sum(n for where, n in counts.items() if where.split("; ")[0] in here)
