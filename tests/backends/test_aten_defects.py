"""Every row of `DEFECTS`: that PyTorch still has the defect, where this machine can show it, and that it is avoided."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import convgrad
from convgrad._compat import usual_strides
from convgrad.backends import DEFECTS, Defect, warn_of
from convgrad.backends.aten import AtenBackend, pytorchs_call
from convgrad.check.child import Child, Lost
from convgrad.diagnostics import explain_problem
from convgrad.engine import choose, get_backend
from convgrad.problem import ConvProblem, Output, Outputs
from convgrad.testing import check_problem
from tests.samples import KNOWN

CPU = torch.device("cpu")
#: The operand that needs unusual strides to show it.
ODD = {"strides of size 1": 1, "batch stride of one image": 1}
ROWS = [pytest.param(d, id=d.name) for d in DEFECTS]
#: Only `KNOWN` shows on most machines.
SHOWN = [pytest.param(d, id=d.name, marks=[] if d is KNOWN else pytest.mark.slow) for d in DEFECTS]


def answer(request: tuple[str, Output, int | None, int]) -> tuple[str, str]:
    """The status and message of PyTorch's own call, in the child; with unusual strides where an operand's size is 1."""
    text, output, odd, seed = request
    torch.set_num_threads(1)

    class Stock(AtenBackend):
        def bind(self, problem: ConvProblem, outputs: Outputs) -> Any:
            call = pytorchs_call(problem, outputs[0])

            def kernel(a: Tensor, b: Tensor, bias: Any = None, workspace: Any = None) -> Tensor:
                pair = [t.as_strided(t.shape, usual_strides(t.shape, problem.channels_last)) for t in (a, b)]
                if odd is not None:
                    strides = [6 if n == 1 else s for n, s in zip(pair[odd].shape, pair[odd].stride(), strict=True)]
                    pair[odd] = pair[odd].as_strided(pair[odd].shape, strides)
                return call(*pair, bias)

            return kernel

    results = check_problem(Stock(), text, output, seed=seed, properties=["exact", "bias"])
    found = next((r for r in results if r.status == "failed"), results[0])
    return found.status, found.message


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(answer) as one:
        yield one


@pytest.mark.parametrize("defect", SHOWN)
def test_pytorch_still_has_it(child: Child, defect: Defect) -> None:
    """Where it does not show, the row may be too wide: then the test says so, and PyTorch's result was right."""
    problem, output = defect.example, defect.outputs[0]
    for seed in range(5):
        try:
            found = child.ask((problem, output, ODD.get(defect.name), seed))
        except Lost:
            return
        if found[0] == "failed":
            assert not found[1].startswith("it raised"), found
            return
    pytest.skip(f"PyTorch {torch.__version__} is right here: the defect {defect.name!r} does not show on this machine")


@pytest.mark.parametrize("defect", ROWS)
def test_aten_is_not_chosen_where_it_is_wrong(defect: Defect) -> None:
    problem, output = ConvProblem.parse(defect.example), defect.outputs[0]
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
    problem, output = ConvProblem.parse(defect.example), defect.outputs[0]
    with convgrad.use_backend("aten"):
        request = convgrad.engine.active()
        with pytest.warns(RuntimeWarning, match="requested by name, PyTorch's kernel is wrong here"):
            (step,) = choose(problem, (output,), CPU, request)
        assert step.backend is get_backend("aten")
        choose(problem, (output,), CPU, request)  # a second warning would be an error
