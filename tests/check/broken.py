"""Backends broken on purpose, each in one way only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from convgrad.backends import Backend
from convgrad.backends.im2col import Im2colBackend
from convgrad.backends.reference import ReferenceBackend
from convgrad.check import check_problem
from convgrad.problem import ConvProblem, Output, Pass

Break = Callable[[ConvProblem, Pass, Tensor, Tensor, Tensor], Tensor]

TEXT = "mb2g2ic4ih7iw9oc6kh3kw3ph1pw1"


class Broken(Im2colBackend):
    """im2col with other attributes, and then ``damage`` done to (problem, pass, a, b, result)."""

    name = "broken"
    sweeps = ()

    def __init__(self, damage: Break, **attributes: Any) -> None:
        self.damage = damage
        vars(self).update(attributes)

    def bind(self, problem: ConvProblem, outputs: Any) -> Any:
        kernel = super().bind(problem, outputs)
        return lambda a, b, *rest: self.damage(problem, outputs[0], a, b, kernel(a, b, *rest))


def around(base: type[Backend], wrap: Callable[..., Any], **attributes: Any) -> Any:
    """A backend like another one, whose kernels are what ``wrap`` makes of its kernels, their problem and outputs."""

    def bind(self: Any, problem: ConvProblem, outputs: Any) -> Any:
        return wrap(base.bind(self, problem, outputs), problem, outputs)

    return type("Wrapped", (base,), {"bind": bind, **attributes})()


def off_by_one(result: Tensor) -> Tensor:
    """The smallest thing that can go wrong: one element, by one."""
    result[(0,) * result.dim()] += 1
    return result


def wrong_if(condition: Callable[[ConvProblem], bool]) -> Break:
    return lambda p, pass_, a, b, result: off_by_one(result) if condition(p) else result


#: Wrong everywhere, in one element.
CORNER = wrong_if(lambda p: True)


def failing_properties(
    backend: ReferenceBackend | Im2colBackend, output: Output = "forward", text: str = TEXT
) -> set[str]:
    return {r.property_name for r in check_problem(backend, text, output) if r.status == "failed"}
