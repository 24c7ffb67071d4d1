"""Ways as functions to be timed: what a plan would do, on operands that come from memory."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch.nn.grad import conv2d_input, conv2d_weight

from convgrad.engine import Step, get_backend, trials
from convgrad.engine.measure.trials import _sets, in_turn, random_operands
from convgrad.problem import ConvProblem, Output

CPU = torch.device("cpu")
P = ConvProblem.parse("mb2ic4ih9oc6kh3")
ALL: tuple[Output, ...] = ("grad_input", "grad_weight", "grad_bias")


@pytest.mark.parametrize("size", ["mb2ic4ih9oc6", "mb1ic16ih64oc16", "mb8ic64ih112oc64", "mb64ic64ih112oc64"])
def test_operands_are_cold_when_it_is_their_turn_again(size: str) -> None:
    """So many sets that a cache does not hold them, unless they are tiny; of what is as large itself only one."""
    problem = ConvProblem.parse(f"{size}kh3")
    count, least = _sets(problem, CPU), problem.least_bytes
    assert count == 65 or max(2**26, least) < count * least <= 2**26 + least or (count == 1 and least > 2**26)
    assert _sets(problem, torch.device("cuda")) == 1


def steps(backend: str, *outputs: tuple[Output, ...]) -> tuple[Step, ...]:
    return tuple(Step(get_backend(backend), o, "") for o in outputs)


def test_a_trial_computes_what_a_plan_does() -> None:
    """One call, separate calls with the sum that no step yields, operands in another layout; a bias of ones."""
    turned = P.replace(memory_format=torch.channels_last)
    ways = {"one": (P, steps("aten", ALL)), "two": (P, steps("aten", ALL[:1], ALL[1:2]))}
    ways["turned"] = (turned, steps("aten", ALL))
    of = random_operands(P, (0, 1, 2), CPU)
    g, x, w = (of[i] for i in range(3))
    expected = (conv2d_input(x.shape, w, g), conv2d_weight(x, w.shape, g), g.sum((0, 2, 3)))
    for call in trials(ways, ALL, CPU).values():
        torch.testing.assert_close(call(), expected)
    biased = P.replace(has_bias=True)
    found = trials({"aten": (biased, steps("aten", ("forward",)))}, ("forward",), CPU)["aten"]()
    x, w = random_operands(P, (1, 2), CPU).values()
    torch.testing.assert_close(found, torch.nn.functional.conv2d(x, w, torch.ones(6)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.complex64])
def test_operands_of_every_dtype(dtype: torch.dtype) -> None:
    (found,) = random_operands(P.replace(dtype=dtype), (1,), CPU).values()
    assert (found.dtype, found.shape) == (dtype, P.input_shape)


def test_in_turn_holds_what_a_round_returns():
    made = [[torch.ones(1)], [torch.ones(1)], [torch.ones(1)]]
    alive = [weakref.ref(one[0]) for one in made]
    call = in_turn({"a": [one.pop for one in made]})["a"]
    for _ in made:
        call()
    assert all(ref() is not None for ref in alive)


def test_in_turn_each_call_takes_other_operands_than_any_before_it():
    """With a turn for each, the second finds in the cache what the first has just read: up to 1.4x as fast."""
    seen: list[int] = []
    calls = in_turn({name: [partial(seen.append, i) for i in range(3)] for name in "ab"})
    for name in "abababba":
        calls[name]()
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]
