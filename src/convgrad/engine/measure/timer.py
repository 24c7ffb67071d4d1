"""Reliable timing: callables timed alternately in one process, and their ratio with a confidence interval.

Machines drift: clocks, neighbors, caches. Two runs one after the other therefore compare the machine with itself.
Here every round times each callable once, in alternating order, and only the ratios inside a round count; their
median gets the distribution-free interval of order statistics (H. A. David, Order Statistics, section 2.5), so that
one disturbed round costs nothing. On a device, times come from its own events, with its caches flushed before each
call, and without what a launch that does nothing takes.
"""

from __future__ import annotations

import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from .environment import memory_kept

_CONFIDENCE = 0.95  # of every interval
_MOST_ROUNDS = 101
_LEAST_ROUNDS = 7  # six would do for 95 %; the seventh lets one round be disturbed
_FEWEST_ROUNDS = 3  # where there is no doubt
_MUCH = 1.25  # times as long
_LEAST_BLOCK = 2e-4  # seconds; the clock is good to 1e-7
_CACHE_BYTES = 256 << 20  # no less than the last-level cache of any device so far
_LEAST_ON_DEVICE = 5e-7  # seconds; the resolution of a device's events
_MOST_FLUSHES = 50


class Ratio(NamedTuple):
    """A ratio of two times, with the interval that holds it at the stated confidence."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1: only then is there a difference to speak of."""
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        text = f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"
        return text if self.differs else f"{text} no difference"


@dataclass(frozen=True)
class Comparison:
    """Times of several callables, measured alternately.

    Equivalent to:
        >>> seen = Comparison("pytorch", {"ours": (1.0,) * 9, "pytorch": (2.0,) * 9})
        >>> print(seen.speedup("ours"), seen.seconds("ours"))
        2.00x [2.00, 2.00] 1.0
        >>> print(seen)
        ours: 1000 ms, 2.00x [2.00, 2.00] as fast as pytorch
        pytorch: 2000 ms
    """

    #: The name against which ratios are formed.
    baseline: str
    #: Seconds per call of each round, round i of one callable next to round i of the others.
    samples: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        lines = {name: f"{name}: {self.seconds(name) * 1e3:.4g} ms" for name in self.samples}
        faster = {n: f", {self.speedup(n)} as fast as {self.baseline}" for n in lines if n != self.baseline}
        return "\n".join(line + faster.get(name, "") for name, line in lines.items())

    def median(self, name: str) -> float:
        """Return the seconds per call: the median over rounds, whatever the others took in them."""
        return statistics.median(self.samples[name])

    def seconds(self, name: str) -> float:
        """Return the seconds per call where the baseline takes its median: medians have another quotient."""
        return self.median(self.baseline) / self.speedup(name).value

    def speedup(self, name: str) -> Ratio:
        """Return the speedup of ``name`` over the baseline: the median over rounds of baseline / name."""
        ratios = self._ratios(name)
        return Ratio(statistics.median(ratios), *median_interval(ratios))

    def at_least(self, name: str) -> float:
        """Return the speedup that is certain: the interval's lower end, or the worst of too few rounds."""
        ratios = self._ratios(name)
        return max(median_interval(ratios)[0], min(ratios))

    def decided(self, tie: float) -> bool:
        """Whether it is certain which is the fastest, or that what may be as fast takes less than ``tie`` as long."""
        best = min(self.samples, key=self.median)
        each = [self._ratios(best, other) for other in {*self.samples} - {best}]
        intervals = [(min(ratios), *median_interval(ratios)) for ratios in each]
        return all(low > 1 or high < tie or least > _MUCH for least, low, high in intervals)

    def _ratios(self, name: str, base: str | None = None) -> list[float]:
        return [b / own for b, own in zip(self.samples[base or self.baseline], self.samples[name], strict=True)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds the median of the distribution of ``values``, at 95 % confidence.

    The k-th smallest and k-th largest of n values miss the median with probability 2 P(Binomial(n, 1/2) < k);
    k is the largest for which that is small enough. Too few values give (-inf, inf): nothing is known.
    """
    ordered, n = sorted(values), len(values)
    missed = accumulate(2 * math.comb(n, k) / 2**n for k in range(n // 2))
    k = sum(part <= 1 - _CONFIDENCE for part in missed)
    return (ordered[k - 1], ordered[n - k]) if k else (-math.inf, math.inf)


def compare(
    calls: Mapping[str, Callable[[], object]],
    baseline: str | None = None,
    *,
    seconds: float = 1.0,
    device: torch.device | str = "cpu",
    least_rounds: int = _LEAST_ROUNDS,
    known: Mapping[str, float] | None = None,
    tie: float = 0.0,
    host: bool = False,
) -> Comparison:
    """Time callables alternately, for about ``seconds`` in all and at least ``least_rounds`` rounds.

    Args:
        calls: name -> callable without arguments. What it returns is dropped before the next call.
        baseline: name against which ratios are formed; the last one by default.
        device: where the work runs. On a device each call is timed by events after its caches were flushed, less a
            launch that does nothing, so that the time is that of the kernels.
        known: seconds per call, for callables that were called a few times before and need no warm-up.
        tie: end as soon as it is clear which one is the fastest (`Comparison.decided`); 0: all rounds.
        host: on a device, a call takes no less than the processor takes to enqueue it.

    Raises:
        ValueError: no callables, or a baseline that is not among them.

    Equivalent to:
        >>> a = torch.ones(1000)
        >>> seen = compare({"twice": lambda: (a + 1, a + 1), "once": lambda: a + 1}, "once", seconds=0.05)
        >>> 0 < seen.speedup("twice").value < 1
        True
    """
    baseline = list(calls)[-1] if calls and baseline is None else baseline
    if baseline is None or baseline not in calls:
        raise ValueError(f"baseline={baseline!r} must be one of the callables {list(calls)}")
    clock = _Clock(torch.device(device), host)
    single = known or {name: _warm_up(clock, call, seconds / (10 * len(calls))) for name, call in calls.items()}
    # Caches are flushed before each call, and once more while it is enqueued.
    single = {name: took + 2 * clock.flush for name, took in single.items()}

    block = max(_LEAST_BLOCK, seconds / (len(calls) * _MOST_ROUNDS))
    inner = {name: max(1, round(block / took)) for name, took in single.items()}
    round_takes = sum(max(block, took) for took in single.values())
    rounds = min(_MOST_ROUNDS, max(least_rounds, int(seconds / round_takes)))

    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        if tie and i >= _FEWEST_ROUNDS and Comparison(baseline, samples).decided(tie):
            break
        for name in names if i % 2 == 0 else reversed(names):
            samples[name].append(clock.seconds(calls[name], inner[name]))
    return Comparison(baseline, {name: tuple(s) for name, s in samples.items()})


def call_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, work on the device included."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return max(time.perf_counter() - start, 1e-9)


def second_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the second call, for the first one allocates, compiles and plans."""
    call()
    return call_seconds(call, device)


class _Clock:
    """Times calls; on a device with caches that hold nothing of theirs, and nothing that must be written back."""

    def __init__(self, device: torch.device, host: bool = False) -> None:
        self._device, self._host = device, host
        self.flush = 0.0
        if device.type == "cpu":
            return
        self._memory = torch.zeros(_CACHE_BYTES // 4, dtype=torch.float32, device=device)
        self._total = torch.zeros((), dtype=torch.float32, device=device)
        self._enqueued: dict[Callable[[], object], float] = {}
        self.flush = math.inf
        self.flush, enqueued = self._times(self.read, 5, 0.0)
        self.empty, _ = self._times(self.nothing, 11, enqueued)

    def seconds(self, call: Callable[[], object], n: int = 1) -> float:
        """Return the seconds per call over n calls."""
        if self._device.type == "cpu":
            return timeit.timeit(call, number=n) / n
        expected = self._enqueued.get(call) or self._times(call, 1, 0.0)[1]
        took, self._enqueued[call] = self._times(call, n, expected)
        return max(took - self.empty, _LEAST_ON_DEVICE, self._enqueued[call] if self._host else 0.0)

    def read(self) -> None:
        """Read more than the caches hold: what a write leaves in them would be written back within the next call."""
        torch.sum(self._memory, (), out=self._total)

    def nothing(self) -> None:
        """Launch a kernel that writes one number."""
        self._total.zero_()

    def _times(self, call: Callable[[], object], n: int, expected: float) -> tuple[float, float]:
        """Return the seconds between the device's events around a call, and those in which it is enqueued: medians.

        Before each call the device has work for longer than enqueuing it is expected to take, so that it never waits.
        """
        flushes = min(_MOST_FLUSHES, 1 + math.ceil(2 * expected / max(self.flush, _LEAST_ON_DEVICE)))
        events, enqueued = [], []
        with torch.accelerator.device_index(self._device.index):  # an event is recorded on the current one's stream
            for _ in range(n):
                start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
                for _ in range(flushes):
                    self.read()
                start.record()
                begun = time.perf_counter()
                call()
                enqueued.append(time.perf_counter() - begun)
                end.record()
                events.append((start, end))
        torch.accelerator.synchronize(self._device)
        return statistics.median(a.elapsed_time(b) for a, b in events) * 1e-3, statistics.median(enqueued)


def empty_launch(device: torch.device | str) -> float:
    """Return the seconds of a launch that does nothing, which are subtracted from every time on a device."""
    return _Clock(torch.device(device)).empty


def _warm_up(clock: _Clock, call: Callable[[], object], seconds: float) -> float:
    """Return the seconds per call, roughly, from as many calls as fit into ``seconds``, but at least two."""
    clock.seconds(call)  # the first call allocates, compiles, plans: it tells nothing
    times, stop = [clock.seconds(call)], time.perf_counter() + seconds
    calls = 11 if memory_kept() and times[0] < 0.1 else 1  # see `keep_memory`
    while time.perf_counter() < stop or len(times) < calls:
        times.append(clock.seconds(call))
    return max(min(times), 1e-9)
