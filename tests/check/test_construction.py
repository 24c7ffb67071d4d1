"""From nothing but a function that accepts or not, problems come that have every attribute at many values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import pytest
import torch

from convgrad.check import construct
from convgrad.check.problems import changed
from convgrad.problem import ConvProblem

slow = partial(pytest.param, marks=pytest.mark.slow)

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def accepts(p: ConvProblem) -> bool:
    return p.ndim == 2 and p.symmetric and p.dtype in FLOATS


def by_64(p: ConvProblem) -> bool:
    return accepts(p) and p.in_channels % 64 == 0


@pytest.fixture(scope="module", params=["all", "multiples of 64"])
def found(request: pytest.FixtureRequest) -> list[ConvProblem]:
    return list(construct(accepts if request.param == "all" else by_64))


def test_every_attribute_at_many_values(found: list[ConvProblem]) -> None:
    assert len(found) == len(set(found)) == 150
    assert {1, 2, 3} <= {min(p.batch, 3) for p in found}
    assert {p.dtype for p in found} == {*FLOATS}
    for attribute in (
        lambda p: len(set(p.input_size)) == 1,
        lambda p: len(set(p.kernel_size)) == 1,
        lambda p: p.channels_last,
        lambda p: p.depthwise,
        lambda p: p.groups == 1,
        lambda p: p.input_size[1] % 8 == 0,
        lambda p: 2 in p.stride,
        lambda p: p.stride[0] == p.stride[1],
        lambda p: max(p.dilation) > 1,
        lambda p: p.padding == ((0, 0), (0, 0)),
        lambda p: p.padding[0] == p.padding[1],
        lambda p: p.in_channels >= 300,
        lambda p: p.input_size == (64, 64),
        lambda p: p.has_bias,
        lambda p: p.transposed,
    ):
        assert {True, False} == {attribute(p) for p in found}
    assert max(p.batch * max(p.in_channels, p.out_channels) for p in found) > 65_535
    assert min(p.batch * p.in_channels for p in found) <= 64


def test_the_first_few_differ() -> None:
    first = list(islice(construct(accepts), 12))
    assert {True, False} == {p.channels_last for p in first} == {p.depthwise for p in first}
    assert len({p.dtype for p in first}) >= 3
    assert len({p.kernel_size for p in first}) >= 5


def test_what_vectors_leave_over_comes_early() -> None:
    """A loop over the rest of the channels or of a row is wrong for some remainders only."""
    narrow = {"kernel_size": (3, 3), "padding": ((1, 1), (1, 1)), "stride": (1, 1), "dtype": torch.float32}
    first = list(islice(construct(lambda p: p.depthwise and all(getattr(p, n) == v for n, v in narrow.items())), 40))
    assert {p.in_channels % 8 for p in first} == {*range(8)}
    assert {p.input_size[1] % 16 for p in first} == {*range(16)}


@pytest.mark.parametrize(
    "narrow",
    [
        lambda p: p.in_channels % 48 == 0 and p.out_channels % 160 == 0 and p.kernel_size == (3, 3) and p.channels_last,
        # No draw meets all of these: they are found by changing what was read last before it refused.
        lambda p: p.in_channels == 60 and p.out_channels == 36 and p.kernel_size == (3, 3) and p.symmetric,
        lambda p: p.transposed and p.stride == (4, 4) and p.kernel_size == (8, 8) and p.padding == ((2, 2), (2, 2)),
        slow(lambda p: p.ndim == 3 and p.groups == 1 and p.dtype == torch.float64 and p.stride == (2, 2, 2)),
        slow(
            lambda p: p.ndim == 1 and p.padding == ((3, 0),) and p.kernel_size == (4,) and p.depthwise and p.batch > 2
        ),
        slow(lambda p: p.dtype == torch.complex64 and p.pointwise and p.input_size[-1] % 4 == 0),
    ],
)
def test_many_conditions_at_once(narrow: Callable[[ConvProblem], bool]) -> None:
    """None of these is among the problems that everybody is asked for."""
    problems = list(construct(narrow))
    assert len(problems) == 150
    assert all(narrow(p) for p in problems)
    assert len({p.batch for p in problems}) > 2
    assert len({p.input_size for p in problems}) > 10


def test_bounds() -> None:
    """The largest value that is accepted is met, whatever it is."""

    def narrow(p: ConvProblem) -> bool:
        return accepts(p) and p.depthwise and p.input_size[1] <= 101 and p.batch <= 23 and p.kernel_size == (3, 3)

    problems = list(construct(narrow))
    assert {max(p.input_size[1] for p in problems), max(p.batch for p in problems)} == {101, 23}


def test_the_search_for_a_bound_ends_where_what_is_accepted_is_no_multiple_of_its_step() -> None:
    problems = list(construct(lambda p: accepts(p) and p.input_size[1] % 6 == 5 and p.kernel_size == (3, 3)))
    assert {p.input_size[1] % 6 for p in problems} == {5}


def test_hints() -> None:
    """What nobody would guess stands in the kernel's code."""

    def narrow(p: ConvProblem) -> bool:
        return p.kernel_size == (6, 10) and p.in_channels == 34

    assert not list(construct(narrow))
    assert len(list(construct(narrow, hints=[(6, 10), 34], most=60))) == 60
    only = ConvProblem.parse("g34mb2ic34ih12iw12oc34oh7ow3kh6kw10")
    assert list(construct(lambda p: p == only, hints=[only])) == [only]


def test_named_ones_come_first() -> None:
    named = [ConvProblem.parse("mb2ic4ih21oc3kh3ph1"), ConvProblem.parse("mb1ic4iw21oc3kw3")]
    problems = list(islice(construct(accepts, named), 20))
    assert problems[0] == named[0]
    assert named[1] not in problems
    assert len(set(problems)) == 20


def test_time_is_limited() -> None:
    asked: list[ConvProblem] = []
    assert not list(construct(lambda p: bool(asked.append(p)), seconds=0.0))
    assert len(asked) < 500


def test_what_makes_no_problem_is_left_out() -> None:
    """Other sizes than these belong together, or have more elements than any memory."""
    image = ConvProblem.parse("mb1ic4ih9oc4kh3")
    for changes in ({"groups": 3}, {"kernel_size": (10, 10)}, {"input_size": (1 << 31, 1 << 31)}):
        assert changed(image, **changes) is None
    assert changed(ConvProblem.parse("mb1ic4ih9oc4kh3ph8 circular"), input_size=(7, 7)) is None


def test_a_named_one_may_be_larger_than_what_is_searched_for() -> None:
    large = ConvProblem.parse("mb8ic64ih112oc64kh3ph1")
    assert next(construct(lambda p: p == large, [large])) == large


def test_what_was_found_for_another_output_is_not_searched_for_again() -> None:
    found: list[ConvProblem] = []
    asked = [0, 0, 0]

    def counting(which: int, kernel: tuple[int, int]):
        def accepts(p: ConvProblem) -> bool:
            asked[which] += 1
            return p.ndim == 2 and p.groups == 1 and (which < 2 or p.kernel_size == kernel)

        return accepts

    first, second, narrow = (list(construct(counting(i, (5, 1)), most=40, found=found)) for i in range(3))
    assert first == second
    assert asked[1] < asked[0] < asked[2]  # hardly anything of it has a kernel of 5x1, and more is searched for
    assert {p.kernel_size for p in narrow} == {(5, 1)}
    assert len(narrow) == 40
