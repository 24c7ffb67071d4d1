"""What happened in a block, summed by convolution and output."""

import torch

import convgrad
from convgrad.engine import Event
from convgrad.models import Usage
from convgrad.problem import ConvProblem


def test_the_most_expensive_comes_first() -> None:
    usage = Usage()
    for channels, seconds in ((1, 1.0), (2, 3.0), (3, 2.0), (1, 1.5)):
        problem = ConvProblem.parse(f"ic{channels}ih3oc1kh1")
        usage(Event(problem, ("forward",), "reference", "cpu", "", (), seconds))
    assert [(row.problem.in_channels, row.calls, row.seconds) for row in usage.rows] == [
        (2, 1, 3),
        (1, 2, 2.5),
        (3, 1, 2),
    ]


def test_what_runs_after_the_block_is_not_counted() -> None:
    x, w = torch.randn(1, 2, 5), torch.randn(2, 2, 3)
    with Usage() as usage:
        convgrad.conv1d(x, w)
    convgrad.conv1d(x, w)
    assert [row.calls for row in usage.rows] == [1]
