"""The short way of a plain eager call: no dispatcher, one look-up, and a backward that plans once.

It is open where nobody stands between the caller and the kernel: plain tensors, no functorch transform, no dispatch or
function mode, no forward-mode level, no autocast, no compiler, no trace. A call that was seen before costs one look-up
with a key that holds everything that validation and choice depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .. import settings
from .._compat import any_autocast, dispatch_modes, function_modes, functorch_active, is_legacy_batched, jit_tracing
from ..calculus import Form, Role, sum_of_bias
from ..engine.cache import epoch
from ..engine.plan import Plan, plan_for
from ..engine.request import Request, active, resume
from ..problem import ConvProblem, gradient_outputs
from .stock import stock

__all__ = ["EagerCall", "is_eager"]

_dynamo = torch.compiler.is_dynamo_compiling


def is_eager(first: Tensor, second: Tensor, third: Tensor | None = None) -> bool:
    """Whether a call on these operands may skip the dispatcher."""
    return (
        not _dynamo()  # first: the compiler folds it, and traces nothing of what follows
        and (first.__class__ is Tensor or first.__class__ is Parameter)
        and (second.__class__ is Parameter or second.__class__ is Tensor)
        and (third is None or third.__class__ is Parameter or third.__class__ is Tensor)
        and not functorch_active()
        and not dispatch_modes()
        and not function_modes()
        and forward_ad._current_level < 0
        and not any_autocast()
        and jit_tracing() is None  # a trace must see torch operators
    )


class EagerCall:
    """A validated convolution whose plan is known, and whose backward plans are made once and kept.

    Attributes:
        below: (input, weight, bias) -> output.
        form: the trilinear form, for derivatives that take the long way.
        request: the `use_backend` request under which it was planned.
        flags: the settings under which it was planned.
        stock: what of it PyTorch's own operator may compute.
    """

    __slots__ = (
        "_epoch",
        "_plans",
        "below",
        "device",
        "eager",
        "flags",
        "form",
        "problem",
        "request",
        "stock",
    )

    yields: Role = "output"
    transformed = False

    def __init__(
        self, below: Callable[..., Tensor], form: Form, problem: ConvProblem, input: Tensor, weight: Tensor
    ) -> None:
        self.below = below
        self.form = form
        self.problem = problem.replace(has_bias=False)
        self.stock = stock(problem, form.arguments, weight)
        self.device = input.device
        self.request: Request | None = active()
        self.eager = self
        self.flags, self._epoch = settings.key(input), epoch[0]
        self._plans: dict[Any, Plan] = {}

    def still_holds(self, cotangent: Tensor) -> bool:
        """Whether a backward pass may take the short way: nothing has changed, and nobody differentiates it."""
        return (
            not torch.is_grad_enabled()
            and type(cotangent) is Tensor
            and epoch[0] == self._epoch
            and not functorch_active()
            and not dispatch_modes()
            and not _dynamo()
            and settings.key(cotangent) == self.flags
            and not cotangent.is_complex()
            and not is_legacy_batched(cotangent)
        )

    def gradients(
        self, cotangent: Tensor, input: Tensor | None, weight: Tensor | None, needs: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients that are needed. Autograd has checked that the cotangent is like the output."""
        plan = self._plans.get(needs)
        if plan is None:
            plan = self._plans[needs] = self._plan(needs)
        transposed = self.problem.transposed
        if needs[0] and needs[1]:
            data = (input, cotangent) if transposed else (cotangent, input)
            grads = plan.all(*data, weight)  # pyright: ignore[reportArgumentType]
            return grads if needs[2] else (*grads, None)  # pyright: ignore[reportReturnType]
        one = two = None
        if needs[0]:
            one = plan.contract(cotangent, weight)  # pyright: ignore[reportArgumentType]
        elif needs[1]:
            data = (input, cotangent) if transposed else (cotangent, input)
            two = plan.contract(*data)  # pyright: ignore[reportArgumentType]
        return one, two, sum_of_bias(cotangent) if needs[2] else None

    def _plan(self, needs: tuple[bool, bool, bool]) -> Plan:
        both = needs[0] and needs[1]
        outputs = gradient_outputs(self.problem.transposed, (needs[0], needs[1], needs[2] and both))
        with resume(self.request):
            return plan_for(self.problem, outputs, self.device)
