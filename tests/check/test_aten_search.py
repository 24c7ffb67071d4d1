"""The search for defects of PyTorch's kernels: it finds one that is known, says how to repeat it, and it is avoided."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convgrad.backends import aten_defects
from convgrad.check import aten_search, search_aten
from convgrad.check.child import Child
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
    for death, counts in (("the process died (SIGSEGV)", 1), ("no answer in 60 s", 1), ("the process ended with 1", 0)):
        child: Any = SimpleNamespace(ask=lambda request, death=death: (None, death))
        assert aten_search._wrong(child, p, "forward", 0) == death * counts


def test_a_child_that_dies_is_an_answer() -> None:
    with Child(answer) as child:
        assert child.ask("die") == (None, "the process died (SIGSEGV)")
        assert child.ask("answer") == ({"got": "answer", "poisoned": True}, "")
        assert child.ask("interrupt")[1] == ""  # Ctrl-C in a terminal reaches both: it is no defect of PyTorch's


@pytest.mark.slow
def test_a_child_that_ends_or_thinks_for_too_long() -> None:
    with Child(answer) as child:
        assert child.ask("exit") == (None, "the process ended with 3")
        assert child.ask("sleep", seconds=5) == (None, "no answer in 5 s")
