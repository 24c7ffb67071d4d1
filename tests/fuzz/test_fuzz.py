"""A random search for wrong results, crashes and refusals without a reason, with freed memory poisoned.

A few seconds in ``make test``, a minute in ``make test-all``; ``CONVGRAD_FUZZ=3600 pytest tests/fuzz`` searches for an
hour. A failure prints one line that repeats it: ``python -m tests.fuzz '<the call>'``.
"""

import json
import os
import random
import time
from typing import Any

import pytest

from convgrad.check.child import Child, Lost
from tests.fuzz.calls import answer, random_call, smaller_calls
from tests.samples import KNOWN, where_known

_SECONDS = float(os.environ.get("CONVGRAD_FUZZ", "0"))


def wrong(child: Child, call: dict[str, Any]) -> str:
    try:
        return child.ask(call)
    except Lost as lost:
        return str(lost)


def shrunk(child: Child, call: dict[str, Any]) -> dict[str, Any]:
    """The simplest call that still fails."""
    for _ in range(10):
        simpler = next((c for c in smaller_calls(call) if wrong(child, c)), None)
        if simpler is None:
            break
        call = simpler
    return call


def search(seconds: float, seed: int) -> list[str]:
    """One line for each failure."""
    r, end, lines = random.Random(seed), time.monotonic() + seconds, []
    with Child(answer) as child:
        wrong(child, random_call(r))  # starting takes longer than many calls
        end = max(end, time.monotonic() + seconds / 2)
        while time.monotonic() < end and len(lines) < 20:
            call = random_call(r)
            what = wrong(child, call)
            if what:
                small = shrunk(child, call)
                lines.append(f"python -m tests.fuzz '{json.dumps(small)}'  # {what}")
    return lines


def test_a_few_seconds() -> None:
    lines = search(2, seed=0)
    assert not lines, "\n".join(lines)


@pytest.mark.slow
@where_known
def test_it_can_fail() -> None:
    """PyTorch's own kernel, requested where it is wrong; and shrinking keeps what makes it wrong."""
    call = random_call(random.Random(0))
    call |= {"problem": KNOWN.example, "backend": "aten", "mask": [True] * 3, "spoiled": None}
    with Child(answer) as child:
        assert "grad_weight is off by" in wrong(child, call)
        small = shrunk(child, call)
        assert wrong(child, small)
    assert small["backend"] == "aten"
    assert small["layouts"] == ["dense"] * 3


@pytest.mark.slow
def test_a_minute_or_as_long_as_you_like() -> None:
    lines = search(_SECONDS or 60, seed=time.time_ns() if _SECONDS else 1)
    assert not lines, "\n".join(lines)
