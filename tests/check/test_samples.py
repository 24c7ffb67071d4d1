"""Elements by themselves are what the reference computes; samples are everywhere."""

from __future__ import annotations

from math import prod

import pytest
import torch

from convgrad.check.operands import magnitude, real_operands, reference
from convgrad.check.problems import default_problems
from convgrad.check.samples import elements_at, index_of, sample
from convgrad.problem import PASSES, RESULT, ConvProblem, Pass


@pytest.mark.parametrize("pass_", PASSES)
def test_elements(pass_: Pass) -> None:
    for problem in list(default_problems())[::7]:
        p = problem.replace(dtype=torch.float64)
        operands = real_operands(p, (pass_,), 0)
        places = torch.arange(prod(p.shape_of(RESULT[pass_])))
        found, size = elements_at(p, pass_, operands, places)
        for got, expected in ((found, reference), (size, magnitude)):
            torch.testing.assert_close(got, expected(p, pass_, operands).flatten(), rtol=1e-7, atol=0)


def test_places() -> None:
    p = ConvProblem.parse("mb2000g35ic35ih5oc35kh3ph1")
    places = sample(p, "forward", 0)
    shape = p.output_shape
    assert {0, prod(shape) - 1} <= set(places.tolist())
    assert int((places[1:] - places[:-1]).max()) < 2 * prod(shape) / 8000 + 1  # no gap is longer than two parts
    small = ConvProblem.parse("mb1ic1ih3oc1kh1")
    assert sample(small, "forward", 0).tolist() == list(range(9))


def test_index() -> None:
    shape = (3, 4, 5)
    expected = [tuple(int(i) for i in torch.unravel_index(torch.tensor(n), shape)) for n in range(60)]
    assert [tuple(index_of(n, shape)) for n in range(60)] == expected
