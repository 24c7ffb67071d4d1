"""The public suite: its strategy draws the problems that it says, and what is right passes on them."""

import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from convgrad.backends.im2col import Im2colBackend
from convgrad.problem import ConvProblem
from convgrad.testing import check_problem, problems


@given(problems(crops=False, dtypes=(torch.float64,), largest=6))
@settings(max_examples=100)
def test_the_strategy_draws_canonical_problems(problem: ConvProblem) -> None:
    assert problem == problem.canonical()
    assert problem.dtype == torch.float64
    assert all(low >= 0 for low, _ in problem.padding)
    assert not problem.empty


def test_the_strategy_reaches_every_corner() -> None:
    for what in (
        lambda p: p.ndim == 3 and p.channels_last and p.transposed,
        lambda p: p.depthwise and p.out_channels == 2 * p.in_channels and p.batch == 1,
        lambda p: any(low < 0 for low, _ in p.padding),
        lambda p: any(high < 0 for _, high in p.padding),
        lambda p: max(p.dilation) > 1 and max(p.stride) > 2,
    ):
        assert what(find(problems(), what, settings=settings(max_examples=5000, phases=[Phase.generate])))  # any one


@given(problems(largest=8), st.sampled_from(("forward", "grad_input", "grad_weight")), st.integers(0, 99))
@settings(max_examples=25)
def test_a_right_backend_passes_on_any_problem(problem: ConvProblem, output, seed: int) -> None:
    results = check_problem(Im2colBackend(), problem, output, seed=seed, repeats=2)
    assert not [str(r) for r in results if r.status == "failed"]
