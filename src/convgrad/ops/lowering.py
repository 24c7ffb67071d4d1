"""Lowering to aten: for tensor subclasses that we do not know, and for the compiler.

A subclass gets aten's operator, which it may know, instead of ours, which it cannot. Under ``torch.compile`` a problem
whose choice is ATen becomes a plain aten convolution in the graph, so that Inductor still sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import hint_of, is_subclass, is_traced
from ..engine import layout_of, plan_for
from ..problem import ConvProblem, gradient_outputs
from ..shapes import conv_geometry, convolution_shape, problem_of
from . import decompositions, fake

_aten = torch.ops.aten


#: Subclasses for which the operators themselves have rules.
with_rules: dict[type, Callable[..., Any]] = {}
#: Module that defines subclasses -> a function that registers the rules for them; it may be called again.
loaders: dict[str, Callable[[], Any]] = {}


def any_subclass(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors is a subclass with a dispatch of its own, for which the operators have no rules."""
    return any(t is not None and is_subclass(t) and rules_of(type(t)) is None for t in tensors)


def rules_of(kind: type) -> Callable[..., Any] | None:
    """The function that describes a call of such tensors to `explain`; None if the operators have no rules for them."""
    if kind not in with_rules and kind.__module__ in loaders:
        loaders[kind.__module__]()
    return with_rules.get(kind)


# ---- the compiler --------------------------------------------------------------------------------


def traced_operator(op: Any, operands: tuple[Any, ...], rest: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The operator of aten that takes the place of ours in a graph that is being traced; None where ours stays.

    It does where ATen would be chosen; in an exported program always, because that may be loaded without this library.
    """
    first, second = operands[:2]
    if not is_traced(first):
        return None
    name = op._schema.name.removeprefix("convgrad::")
    if torch.compiler.is_exporting():
        return getattr(decompositions, name)
    if name in ("grad_input", "grad_weight"):
        return None  # aten has no operator for one gradient alone
    input, weight = (first, second) if name == "convolution" else (second, operands[2])
    arguments = rest if name == "convolution" else rest[1:7]
    if len(arguments[1]) == 2 * (input.dim() - 2):
        return None  # aten cannot state this padding
    if name == "convolution":
        fake.convolution(first, second, operands[2], *rest)  # the same validation as everywhere
        return _aten.convolution.default if _all_aten(input, weight, arguments, None) else None
    fake.convolution_backward(first, second, weight, *rest)
    return _aten.convolution_backward.default if _all_aten(input, weight, arguments, rest[-1]) else None


def _all_aten(input: Tensor, weight: Tensor, arguments: Sequence[Any], mask: Sequence[bool] | None) -> bool:
    """Whether every step of the plan for these sizes (for symbolic ones: for their hints) is ATen's."""
    problem = _hinted_problem(input, weight, arguments)
    if problem is None or problem.empty:
        return True
    outputs = (problem.bias_pass,) if mask is None else gradient_outputs(problem.transposed, mask)
    return plan_for(problem, outputs, input.device).aten


def _hinted_problem(input: Tensor, weight: Tensor, arguments: Sequence[Any]) -> ConvProblem | None:
    shapes = [[hint_of(n) for n in t.shape] for t in (input, weight)]
    values = [[hint_of(n) for n in a] if isinstance(a, (list, tuple)) else hint_of(a) for a in arguments]
    if any(n is None for s in [*shapes, *(v for v in values if isinstance(v, list))] for n in s):
        return None
    g = conv_geometry(shapes[1], *values)  # pyright: ignore[reportArgumentType]
    shape = convolution_shape(shapes[0], shapes[1], None, g)  # pyright: ignore[reportArgumentType]
    layout = torch.contiguous_format
    if input.dim() > 3:
        layout = layout_of(input, weight, conv_geometry(weight.shape, *arguments))
    return problem_of(shapes[0], shapes[1], shape, g, dtype=input.dtype, memory_format=layout)  # pyright: ignore[reportArgumentType]
