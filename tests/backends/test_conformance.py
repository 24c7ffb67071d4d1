"""Every registered backend, held to the public suite: ``pytest -k im2col`` runs all that concerns im2col."""

import pytest

from convgrad.engine.registry import backends
from convgrad.problem import ConvProblem, Output
from convgrad.testing import check_problem, default_problems, outputs_of

CASES = [
    pytest.param(name, output, id=f"{name}-{output}") for name, b in backends().items() for output in outputs_of(b)
]


def run(name: str, output: Output, problems: list[ConvProblem]) -> None:
    results = [r for p in problems for r in check_problem(name, p, output, repeats=2)]
    failures = [r for r in results if r.status == "failed"]
    assert not failures, "\n".join(str(f) for f in failures[:3])
    if not any(r.status == "passed" for r in results):
        pytest.skip("; ".join({r.message for r in results}))


@pytest.mark.parametrize(("name", "output"), CASES)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_some_of_the_default_problems(name: str, output: Output, ndim: int) -> None:
    step = {1: 7, 2: 17, 3: 10}[ndim] * (3 if name == "reference" else 1)  # what the others are compared with
    run(name, output, [p for p in default_problems() if p.ndim == ndim][::step])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "output"), CASES)
def test_all_default_problems(name: str, output: Output) -> None:
    run(name, output, list(default_problems()))
