"""Measurements of problems on this machine: reading them, merging new ones, and the choice that follows.

A candidate has the name of its backend, or a name for each pass, joined by commas. Times are relative to the first
candidate's (ATen's, where it can), for these survive a machine that was shared; each further measurement adds one, and
the median decides.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from pathlib import Path
from typing import Any

import torch

from ...backends import Backend
from ...foreign import read_as
from ...problem import ConvProblem, Output, Outputs, output_length, passes_of
from ..cache import invalidate
from ..registry import backends, computed_at_once, registered
from . import store
from .environment import environment, kind_of_machine

#: So many measurements, taken at different times, make a choice for good.
SETTLED = 3
KIND = "choice"
_MOST_TIMES = 7  # of each candidate, the newest
#: A candidate is chosen before the first one if it takes less than this times as long: more is noise.
_CLEAR = 0.98
_LONGEST = 2000  # characters of a text


@dataclass
class Measurement:
    """The times of each candidate, relative to the first one's, newest last; and those that were wrong."""

    times: dict[str, tuple[float, ...]] = field(default_factory=dict)
    #: Candidate -> what was wrong with its result, or that it raised; never chosen.
    wrong: dict[str, str] = field(default_factory=dict)
    #: Backend -> the version of its kernel, where it has one.
    versions: dict[str, str] = field(default_factory=dict)

    # Of one that was looked up, and no part of what is stored: it is of this problem, not of one like it; it has every
    # kernel that a user registered to be measured.
    same = True
    complete = True

    def checked(self, *more: str) -> Measurement:
        """Return it, which another program may have written, or raise a ValueError; with texts that belong to it."""
        if not self.times or not all(times and min(times) > 0 for times in self.times.values()):
            raise ValueError("a measurement has no times, or one that is not above 0")
        texts = (*self.times, *self.wrong, *self.wrong.values(), *self.versions, *self.versions.values(), *more)
        if any(len(text) > _LONGEST for text in texts):
            raise ValueError(f"a measurement has a text of more than {_LONGEST} characters")
        return self

    def to_json(self) -> dict[str, Any]:
        times = {name: [float(f"{t:.4g}") for t in times] for name, times in self.times.items()}
        return {"times": times} | {n: v for n, v in (("wrong", self.wrong), ("versions", self.versions)) if v}

    def merged(self, newer: Measurement) -> Measurement:
        """Both, and of each candidate's times the newest; only the newer one where a kernel has changed since."""
        other_base = [*self.times][:1] != [*newer.times][:1]  # relative to something else
        if other_base or any(newer.versions.get(name, v) != v for name, v in self.versions.items()):
            return newer
        names, wrong = dict.fromkeys((*self.times, *newer.times)), self.wrong | newer.wrong
        times = {n: (*self.times.get(n, ()), *newer.times.get(n, ()))[-_MOST_TIMES:] for n in names if n not in wrong}
        return Measurement(times, wrong, self.versions | newer.versions)

    def is_current(self, there: Mapping[str, Backend]) -> bool:
        """Whether no kernel has changed since: what was slower may be the fastest now."""
        return all(there[name].version == version for name, version in self.versions.items() if name in there)

    @property
    def count(self) -> int:
        """The number of times it was measured."""
        return len(next(iter(self.times.values()), ()))

    def ranked(self) -> list[tuple[str, float]]:
        """Candidates with their median times, the fastest first; the first one before those that are hardly faster.

        One that was timed in fewer than half of the measurements is left out: the best passes are not always the same.
        """
        medians = {name: statistics.median(t) for name, t in self.times.items() if 2 * len(t) >= self.count}
        first = next(iter(medians), "")
        return sorted(medians.items(), key=lambda item: item[1] * (_CLEAR if item[0] == first else 1))

    def reason(self, name: str) -> str:
        """Return why a candidate is chosen, as a sentence."""
        medians, first = dict(self.ranked()), next(iter(self.times))
        often = {1: "once", 2: "twice"}.get(self.count, f"{self.count} times")
        said = f"measured {often} on this machine" + ("" if self.same else ", a similar problem")
        if name != first:
            return f"{said}: {medians[first] / medians[name]:.2f}x as fast as {_in_words(first)}"
        if other := next((other for other in medians if other != name), ""):
            return f"{said}: the next, {_in_words(other)}, takes {medians[other] / medians[name]:.2f}x as long"
        return f"{said}: the only one that can"


def _in_words(name: str) -> str:
    """The backends of a candidate: ``aten``; ``native and aten``; ``aten in 2 calls``."""
    names = name.split(", ")
    return f"{names[0]} in {len(names)} calls" if len(names) > len({*names}) else " and ".join(names)


@lru_cache(256)
def similar(problem: ConvProblem) -> ConvProblem:
    """Return one problem for all like it: the batch a power of two, sizes above 8 powers of the square root of two."""
    sizes = tuple(n if n <= 8 else round(2 ** (round(2 * math.log2(n)) / 2)) for n in problem.input_size)
    batch = 2 ** round(math.log2(problem.batch)) if problem.batch else 0
    dims = zip(sizes, problem.dims, strict=True)
    outputs = tuple(output_length(n, d.kernel, d.stride, d.low, d.high, d.dilation) for n, d in dims)
    if min(outputs) < 1:
        sizes, outputs = problem.input_size, problem.output_size
    return problem.replace(batch=batch, input_size=sizes, output_size=outputs, name="").canonical()


# ---- in the store ------------------------------------------------------------------------------------

_BETWEEN = " | "


def key_of(problem: ConvProblem, outputs: Collection[Output], where: str) -> tuple[str, str, str, str]:
    """Return the key in the store, as texts: where, passes, the `similar` problem, the problem itself."""
    passes, own = _texts(problem, outputs)
    return where, passes, str(similar(problem)), own


def _texts(problem: ConvProblem, outputs: Collection[Output]) -> tuple[str, str]:
    """Return all of a call that changes the answer: no gradient of a bias does, nor a name."""
    return "+".join(passes_of(outputs)), str(problem.replace(name="") if problem.name else problem)


def _rows() -> Iterator[tuple[list[str], Any]]:
    """Yield the parts of each key that the store holds, and the value; keys of another version are left out."""
    split = ((key.split(_BETWEEN), value) for key, value in store.items(KIND).items())
    return ((parts, value) for parts, value in split if len(parts) == 4)


@cache
def _snapshot(_: Path | None, where: str) -> dict[tuple[str, str], list[Any]]:
    """(passes, problem), and (passes, "like " and the `similar` problem) -> what a store held of a machine."""
    known: dict[tuple[str, str], list[Any]] = {}
    for (machine, passes, like, own), value in _rows():
        for problem in (own, f"like {like}") if machine == where else ():
            known.setdefault((passes, problem), []).append(value)
    return known


def reload() -> None:
    """Look into the store again when next asked, and make all choices again."""
    _snapshot.cache_clear()
    invalidate()


def _read(value: Any) -> Measurement:
    """Return a value of the store; one without times where there is none, or another version's."""
    try:
        return read_as(Measurement, value, "a measurement").checked()
    except ValueError:
        return Measurement()


def find(problem: ConvProblem, outputs: Outputs, device: torch.device) -> Measurement | None:
    """Return what was measured of a problem with the present kernels, or else of those like it."""
    if not (known := _snapshot(store.folder(), environment(device))):
        return None
    key, there = _texts(problem, outputs), backends()
    values = known.get(key) or known.get((key[0], f"like {similar(problem)}"), ())
    each = [m for m in map(_read, values) if m.times and m.is_current(there)]
    if not each:
        return None
    found = reduce(Measurement.merged, each)
    found.same = key in known
    found.complete = not any(computed_at_once(b, problem, outputs, device) for b in _unmeasured(found))
    return found


def _unmeasured(known: Measurement) -> list[Backend]:
    """Return the kernels that a user registered with ``prefer="measured"`` and that a measurement does not have."""
    mine = [entry.backend for entry in registered().values() if entry.candidate and entry.source != ""]
    return [b for b in mine if b.name not in known.times and b.name not in known.wrong]


def add(problem: ConvProblem, outputs: Outputs, device: torch.device, new: Measurement) -> Measurement:
    """Add a measurement to those of the problem; return what is known of it now."""
    key = _BETWEEN.join(key_of(problem, outputs, environment(device)))
    known = _read(store.read(KIND, key))  # another process may have measured it too
    compared_others = any(b.name in new.times for b in _unmeasured(known))
    found = new if compared_others else known.merged(new)
    store.write(KIND, key, found.to_json())
    reload()
    return found


# ---- all of them -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Exported(Measurement):
    """An item of what `exported` returns."""

    machine: str
    outputs: str
    problem: str


def exported() -> list[dict[str, Any]]:
    """Return every measurement that the store holds as plain data, for another machine of the same kind, too."""
    rows = [(key, value) for key, value in _rows() if _read(value).times]
    return [{"machine": where, "outputs": passes, "problem": own, **value} for (where, passes, _, own), value in rows]


def summary(rows: Iterable[dict[str, Any]] | None = None) -> dict[str, int]:
    """Machine and settings -> of how many problems there are rows (by default of the store), with or without bias."""
    rows = exported() if rows is None else rows
    found = {(r["machine"], r["problem"].replace(" bias", "")) for r in rows}
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
        row.checked(row.machine, row.outputs, row.problem)
        passes: Any = row.outputs.split("+")
        parts = key_of(ConvProblem.parse(row.problem), passes, row.machine)
        key = _BETWEEN.join(parts)
        if parts[1::2] != (row.outputs, row.problem) or _BETWEEN in row.machine or not key.isprintable():
            raise ValueError(f"these are no outputs of a problem: {row.outputs!r} of {row.problem!r}")
        for name in row.times:
            names = name.split(", ")
            if never.intersection(names) or len(names) not in (1, len(passes)) or not name.isprintable():
                raise ValueError(f"{name!r} is no choice for {row.outputs} of {row.problem}")
        found[key] = row
    for key, new in found.items():
        if _read(store.read(KIND, key)).count < new.count:
            store.write(KIND, key, new.to_json())
    reload()
    here = {kind_of_machine(torch.device(kind)) for kind in ("cpu", "cuda")} - {""}
    counts = summary(vars(row) for row in found.values())
    return sum(counts.values()), sum(n for where, n in counts.items() if where.split("; ")[0] in here)
