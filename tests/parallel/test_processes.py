"""The harness itself: results, tracebacks, deaths and waiting ranks, all in bounded time."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from .processes import Processes, RankError


def total(factor: int) -> tuple[int, float, int]:
    value = torch.full((1,), float(dist.get_rank() * factor))
    dist.all_reduce(value)
    return dist.get_rank(), value.item(), os.getpid()


def fail_at(bad: int) -> None:
    if dist.get_rank() == bad:
        raise KeyError("the rank that fails")
    dist.barrier()


def warn() -> None:
    warnings.warn("seen", stacklevel=1)


def sleep_at(bad: int) -> None:
    if dist.get_rank() == bad:
        time.sleep(60)


@pytest.mark.parametrize("count", [2, 3])
def test_the_same_processes_answer_every_call(processes: Processes, count: int) -> None:
    first, second = (processes(count, total, factor) for factor in (1, 10))
    assert [value[:2] for value in first] == [(rank, sum(range(count))) for rank in range(count)]
    assert [value[1] for value in second] == [10 * sum(range(count))] * count
    assert [value[2] for value in first] == [value[2] for value in second]


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (fail_at, (1,), r"rank 1 of 2:[\s\S]*KeyError: 'the rank that fails'"),
        (sleep_at, (1,), r"rank 1 of 2:\n.*\nTimeout \(0:00:02\)![\s\S]*in sleep_at"),
        (warn, (), r"UserWarning: seen"),
    ],
)
def test_a_failure_is_told_in_bounded_time_and_the_next_call_works(
    processes: Processes, function, arguments, said
) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=said):
        processes(2, function, *arguments, seconds=2 if function is sleep_at else 30)
    assert time.monotonic() - start < 20
    assert [value[1] for value in processes(2, total, 1)] == [1, 1]
