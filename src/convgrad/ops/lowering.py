"""Operators in a graph that is being traced, and on a tensor subclass: each gets something else in their place.

A subclass gets aten's operator, which it may know, instead of ours, which it cannot. Under ``torch.compile`` a problem
whose choice is ATen becomes a plain aten convolution in the graph, so that Inductor still sees it. `use_backend` holds
while its block runs, but a graph runs long after it was traced: so a request is put into the graph itself, by an
overload of the operator that carries it, ``convgrad::convolution.with_backend``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import engine
from .._compat import channels_last_of, hint_of, is_subclass, jit_tracing
from ..engine import BY_RULE, Request
from ..problem import ConvProblem, Outputs, gradient_outputs, problem_of
from . import decompositions

Rule = Callable[..., Any]

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
    """Return the operator that replaces convgrad's in a graph that is being traced; None where none does.

    It is aten's where ATen would be chosen, and in an exported program, which may be loaded without this library; else
    the overload with a request that a module makes.
    """
    first, name = operands[0], op._schema.name.removeprefix("convgrad::")
    if torch.compiler.is_exporting():
        return getattr(decompositions, name)
    forward, request = name == "convolution", engine.active()
    # aten has no operator for one gradient alone, and cannot state padding whose sides differ
    stated = name.startswith("convolution") and len(rest[1 if forward else 2]) != 2 * (first.dim() - 2)
    if stated and _all_aten(forward, operands, rest):
        return getattr(torch.ops.aten, name).default
    if request is None or not request.fixed:
        return None
    return partial(getattr(torch.ops.convgrad, name).with_backend, backend=_encode(request))


def _all_aten(forward: bool, operands: tuple[Any, ...], rest: tuple[Any, ...]) -> bool:
    """Whether ATen would be chosen for a call; its symbolic sizes are those that they have in this trace."""
    call = (engine.checked_convolution if forward else engine.checked_backward)(*operands, *rest)
    sizes: Any = tree_map(hint_of, [[*call.input_size], [*call.weight_size], [*call.output_size], call.geometry])
    if None in tree_leaves(sizes):
        return True
    problem = problem_of(*sizes, dtype=operands[0].dtype, memory_format=call.layout)
    outputs = (problem.bias_pass,) if forward else gradient_outputs(problem.transposed, call.mask)
    return problem.empty or _is_atens(problem, outputs, operands[0].device)


def _is_atens(problem: ConvProblem, outputs: Outputs, device: torch.device) -> bool:
    """Whether ATen is chosen: nothing can be timed in a trace, and on a CPU Inductor gives it channels_last."""
    plan = engine.plan_for(problem, outputs, device)
    if any(step.proposed for step in plan.steps):
        return True
    ruled = all(step.backend.name == "aten" or step.reason.startswith(BY_RULE) for step in plan.steps)
    if plan.aten or device.type != "cpu" or not ruled:
        return plan.aten
    return engine.plan_for(problem.replace(memory_format=channels_last_of(problem.ndim)), outputs, device).aten


# ---- requests in graphs ------------------------------------------------------------------------------


def overload(schema: str) -> str:
    """Return the schema with one more keyword, the name of a backend or of one for each pass."""
    arguments, result = schema.split(") -> ")
    star = "" if " *, " in arguments else " *,"
    return f"{arguments},{star} str backend) -> {result}"


def under_request(rule: Rule) -> Rule:
    """Return the rule of an operator as that of its overload."""

    def requested(*args: Any, backend: str, **options: Any) -> Any:
        with engine.resume(_decode(backend)):
            return rule(*args, **options)

    return requested


def operator(name: str) -> Callable[..., Any]:
    """``torch.ops.convgrad.<name>``; in a `use_backend` block that is being compiled or exported its overload.

    In what ``torch.onnx.export(dynamo=False)`` traces it is written in ATen's operators, the only ones that it knows.
    """
    packet = getattr(torch.ops.convgrad, name)
    if torch.compiler.is_compiling():
        if request := traced_request():
            return partial(packet.with_backend, backend=request)
    elif jit_tracing() is not None and torch.onnx.is_in_onnx_export():
        return getattr(decompositions, name)
    return packet.default


def traced_request() -> str:
    """The request of a `use_backend` block that is being compiled or exported, as a text that a graph can hold."""
    return _encode(engine.traced[-1]) if engine.traced else ""


def requesting(request: str) -> AbstractContextManager[None]:
    """Request a backend in this block; an empty request changes nothing."""
    return engine.resume(_decode(request)) if request else nullcontext()


def _encode(request: Request) -> str:
    return ";".join(name or "" for name in request[:3])  # ``aten:cudnn[benchmark=1,deterministic=1]`` has a comma


def _decode(text: str) -> Request:
    if ";" not in text:
        return engine.request_for(text)._replace(fixed=True)
    return Request(*(name or None for name in text.split(";")), fixed=True)  # pyright: ignore[reportArgumentType]
