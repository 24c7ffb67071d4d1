"""Lowering to aten: for tensor subclasses that we do not know, and for the compiler.

A subclass gets aten's operator, which it may know, instead of ours, which it cannot. Under ``torch.compile`` a problem
whose choice is ATen becomes a plain aten convolution in the graph, so that Inductor still sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .._compat import channels_last_of, hint_of, is_subclass
from ..engine import BY_RULE, checked_backward, checked_convolution, plan_for
from ..problem import ConvProblem, Outputs, gradient_outputs, problem_of
from . import decompositions

_aten = torch.ops.aten


#: Subclasses for which the operators themselves have rules.
with_rules: dict[type, Callable[..., Any]] = {}
#: Module that defines subclasses -> a function that registers the rules for them; it may be called again.
loaders: dict[str, Callable[[], Any]] = {}


def any_subclass(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors is a subclass with a dispatch of its own, for which the operators have no rules."""
    return any(t is not None and is_subclass(t) and rules_of(type(t)) is None for t in tensors)


def rules_of(kind: type) -> Callable[..., Any] | None:
    """Return the function that describes a call of such tensors to `explain`; None without rules for them."""
    if kind not in with_rules and kind.__module__ in loaders:
        loaders[kind.__module__]()
    return with_rules.get(kind)


# ---- the compiler --------------------------------------------------------------------------------


def traced_operator(op: Any, operands: tuple[Any, ...], rest: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return the operator of aten that replaces convgrad's in a graph that is being traced; None where none does.

    It does where ATen would be chosen; in an exported program always, because that may be loaded without this library.
    """
    first, name = operands[0], op._schema.name.removeprefix("convgrad::")
    if torch.compiler.is_exporting():
        return getattr(decompositions, name)
    if name in ("grad_input", "grad_weight"):
        return None  # aten has no operator for one gradient alone
    forward = name == "convolution"
    if len(rest[1 if forward else 2]) == 2 * (first.dim() - 2):
        return None  # aten cannot state this padding
    call = (checked_convolution if forward else checked_backward)(*operands, *rest)
    # Symbolic sizes are those that they have in this trace.
    sizes: Any = tree_map(hint_of, [[*call.input_size], [*call.weight_size], [*call.output_size], call.geometry])
    all_aten = None in tree_leaves(sizes)
    if not all_aten:
        problem = problem_of(*sizes, dtype=first.dtype, memory_format=call.layout)
        outputs = (problem.bias_pass,) if forward else gradient_outputs(problem.transposed, call.mask)
        all_aten = problem.empty or _is_atens(problem, outputs, first.device)
    return getattr(_aten, name).default if all_aten else None


def _is_atens(problem: ConvProblem, outputs: Outputs, device: torch.device) -> bool:
    """Whether ATen is chosen: on a CPU, where Inductor gives it channels_last, also if the rules choose it there.

    It is if something else is only proposed, for nothing can be timed within a trace.
    """
    plan = plan_for(problem, outputs, device)
    if any(step.proposed for step in plan.steps):
        return True
    ruled = all(step.backend.name == "aten" or step.reason.startswith(BY_RULE) for step in plan.steps)
    if plan.aten or device.type != "cpu" or not ruled:
        return plan.aten
    return plan_for(problem.replace(memory_format=channels_last_of(problem.ndim)), outputs, device).aten
