"""The search for defects of PyTorch's kernels: it finds one that is known, says how to repeat it, and it is avoided."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from convgrad.backends import aten_defects
from convgrad.check import aten_search, search_aten
from convgrad.check.child import Child, Lost
from convgrad.engine import Found, choose, record, recorded, store
from convgrad.problem import ConvProblem
from tests.check.dying import answer
from tests.samples import KNOWN, where_known

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(aten_defects, "found", {})
    store.forget("defect")
    yield
    store.forget("defect")


@where_known
def test_it_finds_what_is_known_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, output = ConvProblem.parse(KNOWN.example), KNOWN.outputs[0]
    monkeypatch.setattr(aten_defects, "DEFECTS", ())
    monkeypatch.setattr("convgrad.check.aten_search.DEFECTS", ())
    monkeypatch.setattr("convgrad.check.aten_search.random_problems", lambda seed: repeat(problem))
    found = next(search_aten(seconds=60))
    assert found.output == output
    assert found.what
    assert found.repeat.startswith('MALLOC_PERTURB_=129 python -c "import torch; ')


def test_what_was_found_is_kept_and_avoided() -> None:
    problem = ConvProblem.parse("mb2ic64ih9oc64kh3ph1")
    found = Found(problem, "grad_weight", "off by 7", "a command")
    record(found)
    assert recorded() == [found]
    for p, avoided in ((problem, True), (problem.replace(batch=5), True), (ConvProblem.parse("ic64ih8oc64kh3"), False)):
        (step,) = choose(p, ("grad_weight",), CPU)
        assert (step.backend.name != "aten") == avoided
        assert step.reason.startswith("PyTorch's kernel is wrong here: off by 7, as convgrad check --aten") == avoided
    (step,) = choose(problem, ("forward",), CPU)
    assert step.backend.name == "aten"


def test_only_a_death_counts_and_no_error_of_the_comparison() -> None:
    p = ConvProblem.parse("ic2ih5oc2kh3")
    errors = [Lost("crashed with SIGSEGV"), Lost("did not return in 60 s"), RuntimeError("the check failed")]
    for error, said in zip(errors, ("it crashed with SIGSEGV", "it did not return in 60 s", ""), strict=True):
        child: Any = SimpleNamespace(ask=Mock(side_effect=error))
        assert aten_search._wrong(child, p, "forward", 0) == said


def test_a_child_that_dies_is_an_answer() -> None:
    with Child(answer) as child:
        with pytest.raises(Lost, match="crashed with SIGSEGV"):
            child.ask("die")
        assert child.ask("answer") == {"got": "answer", "poisoned": True}
        assert child.ask("interrupt")["got"]  # Ctrl-C in a terminal reaches both: it is no defect of PyTorch's


@pytest.mark.slow
def test_a_child_that_ends_or_thinks_for_too_long() -> None:
    with Child(answer) as child:
        with pytest.raises(Lost, match="ended the process with status 3"):
            child.ask("exit")
        with pytest.raises(Lost, match="did not return in 5 s"):
            child.ask("sleep", seconds=5)
