import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from convgrad.engine.measure import Comparison, compare, conditions, environment, median_interval, timer


def test_interval_of_too_few_values_is_everything():
    assert median_interval([1.0] * 5) == (-math.inf, math.inf)
    assert median_interval([]) == (-math.inf, math.inf)


@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (15, 4), (25, 8), (50, 18), (100, 40)])
def test_interval_takes_the_tabulated_order_statistics(n, k):
    # k as in the table for the sign test, two-sided 5 % (e.g. Conover, Practical Nonparametric Statistics).
    assert median_interval(random.Random(n).sample(range(n), n)) == (k - 1, n - k)


def test_interval_holds_the_median_as_often_as_promised():
    rng = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([rng.lognormvariate(0, 1) for _ in range(21)])
        hits += low <= 1 <= high  # the median of this distribution is 1
    assert 0.95 <= hits / 2000 <= 0.995


def test_noise_common_to_a_round_cancels():
    noise = [random.Random(i).uniform(1, 100) for i in range(31)]
    seen = Comparison("theirs", {"ours": [2 * x for x in noise], "theirs": [3 * x for x in noise]})
    ratio = seen.speedup("ours")
    assert ratio.value == pytest.approx(1.5)
    assert ratio.differs
    assert "no difference" not in str(ratio)


def test_the_quotient_of_two_times_is_the_speedup():
    """A machine that drifts: the medians of the two belong to different rounds."""
    drift = [1, 1, 1, 1, 2, 2, 2, 2, 2]
    own = [1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.8, 0.8, 0.8]
    seen = Comparison("theirs", {"ours": [d * o for d, o in zip(drift, own, strict=True)], "theirs": drift})
    assert seen.median("theirs") / seen.median("ours") != pytest.approx(seen.speedup("ours").value)
    assert seen.seconds("theirs") == seen.median("theirs") == 2
    assert seen.seconds("theirs") / seen.seconds("ours") == seen.speedup("ours").value


def test_no_difference_is_said():
    rng = random.Random(1)
    seen = Comparison("theirs", {n: [rng.uniform(0.9, 1.1) for _ in range(51)] for n in ("ours", "theirs")})
    assert not seen.speedup("ours").differs
    assert "no difference" in str(seen.speedup("ours"))


def test_compare_sees_a_difference_and_alternates():
    order = []

    def call(name, duration):
        order.append(name)
        time.sleep(duration)

    seen = compare({"a": lambda: call("a", 0.001), "b": lambda: call("b", 0.003)}, "b", seconds=0.2, least_rounds=9)
    assert seen.speedup("a").value > 1.2
    assert len(seen.samples["a"]) == len(seen.samples["b"]) >= 9
    assert "".join(order).count("bb") > 2  # ABBA: neither is always first


@pytest.mark.parametrize(
    ("own", "decided"),
    [
        ([1.0] * 7, True),  # as fast
        ([1.01, 1.02] * 4, True),  # not worth knowing
        ([1.04, 0.99] * 4, False),
        ([1.1] * 3, False),  # too few for an interval
        ([1.3] * 3, True),  # but not where there is no doubt
        ([1.3] * 2 + [1.2], False),
        ([1.1] * 7, True),
        ([1.1] * 6 + [0.9], False),
        ([0.7] * 3, True),  # it is the fastest itself
    ],
)
def test_when_it_is_decided(own, decided):
    assert Comparison("a", {"a": [1.0] * len(own), "b": own}).decided(1.03) == decided


def test_what_is_decided_takes_no_more_rounds():
    known = {"a": 1e-4, "b": 5e-3}
    calls = {name: partial(time.sleep, t) for name, t in known.items()}
    assert len(compare(calls, "a", seconds=0.5, known=known, tie=1.03).samples["a"]) <= 30


def test_compare_repeats_short_calls_inside_a_block():
    count = 0

    def call():
        nonlocal count
        count += 1

    seen = compare({"call": call}, seconds=0.05)
    assert count > 10 * len(seen.samples["call"])
    assert 0 < seen.median("call") < 1e-4


@pytest.mark.parametrize("calls", [{}, {"a": int}])
def test_compare_refuses_an_unknown_baseline(calls):
    with pytest.raises(ValueError, match="must be one of the callables"):
        compare(calls, "b")


KEEP = """
import resource, torch
from convgrad.engine.measure.environment import keep_memory, memory_kept
def fill(): torch.empty(48 << 20, dtype=torch.uint8).fill_(1)
def faults():
    for _ in range(3): fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5): fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert not memory_kept()
returned = faults()
assert keep_memory() and memory_kept()
print(returned, min(faults() for _ in range(4)))  # a virtual machine may take pages back at any time
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_keep_memory_stops_page_faults():
    done = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned >= 100  # 5 x 48 MB are 61440 small pages, or 120 huge ones
    assert kept < 20


def test_memory_kept_reads_the_environment(monkeypatch):
    monkeypatch.setattr(environment, "_kept", False)
    assert not environment.memory_kept()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "2147479551")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "2147479551")
    assert environment.memory_kept()


def test_conditions_name_what_matters():
    line = conditions()
    assert torch.__version__ in line
    assert f"{torch.get_num_threads()} thread" in line
    assert "memory" in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compare_on_a_device():
    a = torch.ones(2048, 2048, device="cuda")
    seen = compare({"two": lambda: a @ a @ a, "one": lambda: a @ a}, "one", seconds=0.2, device="cuda")
    assert seen.speedup("two").value < 0.8


class Card:
    """The clock of a device: one queue, a gap before each kernel, and a cache that writes back late."""

    GAP, READ = 4e-6, 85e-6  # seconds
    BYTES, CACHE = 3e12, 50e6  # a second; of the cache

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host = self.free = self.dirty = 0.0
        card = self

        class Event:
            def __init__(self, device: torch.device, enable_timing: bool) -> None: ...
            def record(self) -> None:
                self.at = max(card.free, card.host)

            def elapsed_time(self, end) -> float:
                return (end.at - self.at) * 1e3

        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "synchronize", self.synchronize)
        patch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: self.host))
        patch.setattr(timer._Clock, "read", lambda _: self.enqueue(5e-6, self.READ, 256e6))
        patch.setattr(timer._Clock, "nothing", lambda _: self.enqueue(5e-6, 0.0, 4))

    def synchronize(self, device: torch.device) -> None:
        self.host = max(self.host, self.free)

    def enqueue(self, host: float, takes: float, read: float = 0.0, written: float = 0.0) -> None:
        """A kernel that the host launches in some seconds, that runs for others, and reads and writes some bytes."""
        self.host += host
        written_back = min(self.dirty, read + written)
        self.free = max(self.free, self.host) + self.GAP + takes + written_back / self.BYTES
        self.dirty = min(self.dirty - written_back + written, self.CACHE)

    def compare(self, host: bool = False, **calls):
        known = dict.fromkeys(calls, 1e-2)
        return compare(calls, seconds=0.05, device="meta", known=known, host=host).median


def test_a_device_never_waits_for_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the gap before a kernel counts, nor the time in which the host enqueues it, unless that is asked for."""
    card = Card(monkeypatch)
    calls = {"slow": lambda: card.enqueue(900e-6, 30e-6), "quick": lambda: card.enqueue(5e-6, 30e-6)}
    seconds = card.compare(**calls)
    assert seconds("slow") == pytest.approx(30e-6)
    assert seconds("quick") == pytest.approx(30e-6)
    seconds = card.compare(host=True, **calls)
    assert seconds("slow") == pytest.approx(900e-6)
    assert seconds("quick") == pytest.approx(30e-6)


def test_on_a_device_that_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event without a stream is recorded on the current device's, where nothing runs."""
    card = Card(monkeypatch)
    current, recorded = [0], []

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    record = torch.Event.record
    monkeypatch.setattr(torch.Event, "record", lambda event: recorded.append(current[-1]) or record(event))
    compare({"call": lambda: card.enqueue(5e-6, 30e-6)}, seconds=0.01, device="meta:1")
    assert {*recorded} == {1}


def test_nothing_is_written_back_within_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    calls = {"writes": lambda: card.enqueue(5e-6, 40e-6, 0, 100e6), "reads": lambda: card.enqueue(5e-6, 40e-6, 100e6)}
    seconds = card.compare(**calls)
    assert seconds("writes") == pytest.approx(40e-6)
    assert seconds("reads") == pytest.approx(40e-6)


def test_a_call_without_a_kernel_takes_what_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    assert timer.empty_launch("meta") == pytest.approx(card.GAP)
    assert card.compare(nothing=lambda: None)("nothing") == timer._LEAST_ON_DEVICE


def test_flushes_are_part_of_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    calls = {"ours": lambda: card.enqueue(5e-6, 10e-6), "theirs": lambda: card.enqueue(5e-6, 20e-6)}
    compare(calls, seconds=0.05, device="meta", known={"ours": 1e-5, "theirs": 2e-5})
    assert card.host < 0.06
