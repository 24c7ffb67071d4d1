"""Every row of `DEFECTS`: that PyTorch still has the defect, where this machine can show it, and that it is avoided."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import convgrad
from convgrad.backends import DEFECTS, Defect, warn_of
from convgrad.check.aten_search import answer
from convgrad.check.child import Child
from convgrad.diagnostics import explain_problem
from convgrad.engine import choose, get_backend
from convgrad.problem import ConvProblem
from convgrad.testing import check_problem

CPU = torch.device("cpu")
#: The operand that needs unusual strides to show it.
ODD = {"strides of size 1": 1, "batch stride of one image": 1}
ROWS = [pytest.param(d, id=d.name) for d in DEFECTS]
SLOW = [pytest.param(d, id=d.name, marks=pytest.mark.slow) for d in DEFECTS[1:]]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(answer) as one:
        yield one


@pytest.mark.parametrize("defect", [ROWS[0], *SLOW])
def test_pytorch_still_has_it(child: Child, defect: Defect) -> None:
    """Where it does not show, the row may be too wide: then the test says so, and PyTorch's result was right."""
    problem, output = defect.example
    request: dict[str, Any] = {"problem": problem, "output": output, "raw": True}
    if defect.name in ODD:
        request["odd"] = ODD[defect.name]
    for seed in range(5):
        found, died = child.ask({**request, "seed": seed})
        if died or found["status"] == "wrong":
            return
        assert found["status"] == "right", found
    pytest.skip(f"PyTorch {torch.__version__} is right here: the defect {defect.name!r} does not show on this machine")


@pytest.mark.parametrize("defect", ROWS)
def test_aten_is_not_chosen_where_it_is_wrong(defect: Defect) -> None:
    problem, output = ConvProblem.parse(defect.example[0]), defect.example[1]
    assert defect.condition(problem)
    (step,) = choose(problem, (output,), CPU)
    if defect.instead and defect.here():
        assert step.backend.name in defect.instead
        aten = next(r for r in explain_problem(problem, output).rows if r.backend == "aten")
        assert aten.reasons[0].startswith(f"PyTorch's kernel is wrong here: {defect.happens}")
    results = check_problem(step.backend, problem, output, repeats=3)
    assert not [str(r) for r in results if r.status == "failed"]


@pytest.mark.parametrize("defect", [pytest.param(d, id=d.name) for d in DEFECTS if d.instead and d.here()])
def test_on_request_pytorchs_result_is_one_line_away(defect: Defect) -> None:
    warn_of.cache_clear()
    problem, output = ConvProblem.parse(defect.example[0]), defect.example[1]
    with convgrad.use_backend("aten"):
        request = convgrad.engine.active()
        with pytest.warns(RuntimeWarning, match="requested by name, PyTorch's kernel is wrong here"):
            (step,) = choose(problem, (output,), CPU, request)
        assert step.backend is get_backend("aten")
        choose(problem, (output,), CPU, request)  # a second warning would be an error
