import math
import random
import subprocess
import sys
import time
import weakref
from functools import partial

import pytest
import torch

from convgrad.engine import ab_timer as timing
from convgrad.engine.ab_timer import Comparison, compare, conditions, median_interval


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


def test_the_times_that_are_printed_have_the_printed_quotient():
    """A machine that drifts: the medians of the two belong to different rounds."""
    drift = [1, 1, 1, 1, 2, 2, 2, 2, 2]
    own = [1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.8, 0.8, 0.8]
    seen = Comparison("theirs", {"ours": [d * o for d, o in zip(drift, own, strict=True)], "theirs": drift})
    assert seen.median("theirs") / seen.median("ours") != pytest.approx(seen.speedup("ours").value)
    assert seen.seconds("theirs") == seen.median("theirs") == 2
    assert seen.seconds("theirs") / seen.seconds("ours") == seen.speedup("ours").value
    first, second = str(seen).splitlines()
    assert float(second.split()[1]) / float(first.split()[1]) == pytest.approx(float(first.split()[3].rstrip("x")))


def test_no_difference_is_said():
    rng = random.Random(1)
    seen = Comparison("theirs", {n: [rng.uniform(0.9, 1.1) for _ in range(51)] for n in ("ours", "theirs")})
    assert not seen.speedup("ours").differs
    assert "no difference" in str(seen)


def test_compare_sees_a_difference_and_alternates():
    order = []

    def call(name, duration):
        order.append(name)
        time.sleep(duration)

    seen = compare({"a": lambda: call("a", 0.001), "b": lambda: call("b", 0.003)}, "b", seconds=0.2, least_rounds=9)
    assert seen.speedup("a").value > 1.2
    assert len(seen.samples["a"]) == len(seen.samples["b"]) >= 9
    assert "".join(order).count("bb") > 2  # ABBA: neither is always first


def test_in_turn_holds_what_a_round_returns():
    made = [[torch.ones(1)], [torch.ones(1)], [torch.ones(1)]]
    alive = [weakref.ref(one[0]) for one in made]
    call = timing.in_turn([one.pop for one in made])
    for _ in made:
        call()
    assert all(ref() is not None for ref in alive)
    seen: list[int] = []
    call = timing.in_turn([partial(seen.append, i) for i in range(3)])
    for _ in range(7):
        call()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


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
from convgrad.engine.ab_timer import keep_memory, memory_kept
def fill(): torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
def faults():
    for _ in range(30): fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5): fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert not memory_kept()
returned = faults()
assert keep_memory() and memory_kept()
print(returned, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_keep_memory_stops_page_faults():
    done = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned >= 100  # 5 x 64 MB are 81920 small pages, or 160 huge ones
    assert kept < 20


def test_memory_kept_reads_the_environment(monkeypatch):
    monkeypatch.setattr(timing, "_kept", False)
    assert not timing.memory_kept()
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "2147479551")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "2147479551")
    assert timing.memory_kept()


def test_conditions_name_what_matters():
    line = conditions()
    assert torch.__version__ in line
    assert f"{torch.get_num_threads()} threads" in line
    assert "memory" in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compare_on_a_device():
    a = torch.ones(2048, 2048, device="cuda")
    seen = compare({"two": lambda: a @ a @ a, "one": lambda: a @ a}, "one", seconds=0.2, device="cuda")
    assert seen.speedup("two").value < 0.8
