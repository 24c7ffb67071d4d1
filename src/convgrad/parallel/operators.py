"""The operators ``torch.ops.convgrad.*`` on DTensors: choose, redistribute, exchange, compute locally, send back.

Below autograd: the derivative table calls these same operators on DTensors, so that derivatives of every order and
forward mode need no formula of their own, and a backward pass makes a choice of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._compat import warn_user
from ..engine import checked_backward, checked_convolution, checked_grad_input, checked_grad_weight
from ..ops import with_rules
from ..problem import Form, Role, add_bias, contract, sum_of_bias
from .halo import exchange
from .part import Part, part_of
from .redistribution import local_as, mesh_of
from .sharding import Choice, Work, choose

_ops = torch.ops.convgrad


def register() -> None:
    """Give each operator its rule, and let DTensors reach it."""
    for name, rule in _RULES.items():
        for overload in getattr(_ops, name).overloads():
            torch.library.register_torch_dispatch(getattr(getattr(_ops, name), overload), DTensor, _handler(rule))
    with_rules[DTensor] = _described


def _described(*arguments: Any) -> Any:
    from .description import described  # imports a room that no call needs

    return described(*arguments)


def _handler(rule: Callable[..., Any]) -> Callable[..., Any]:
    def handle(_class: Any, _operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {k: v for k, v in (kwargs or {}).items() if k != "backend"}
        with torch.no_grad():
            return rule(*args, **options)

    return handle


# ---- the operators -------------------------------------------------------------------------------


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> DTensor:
    call = checked_convolution(input, weight, bias, *arguments)
    return _compute("convolution", call, {"input": input, "weight": weight}, ("output",), bias)[0]


def _grad_input(grad_output: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> DTensor:
    call = checked_grad_input(grad_output, weight, *arguments, **options)
    return _compute("grad_input", call, {"output": grad_output, "weight": weight}, ("input",))[0]


def _grad_weight(grad_output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> DTensor:
    call = checked_grad_weight(grad_output, input, *arguments, **options)
    return _compute("grad_weight", call, {"output": grad_output, "input": input}, ("weight",))[0]


def _convolution_backward(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> Any:
    call = checked_backward(grad_output, input, weight, *arguments)
    first, second, bias = call.mask
    given: dict[Role, Tensor] = {"output": grad_output, **({"weight": weight} if first else {})}
    given |= {"input": input} if second else {}
    results: Any = ("input",) * first + ("weight",) * second
    found = _compute("convolution_backward", call, given, results) if results else []
    by_role = dict(zip(results, found, strict=True))
    return by_role.get("input"), by_role.get("weight"), sum_of_bias(grad_output) if bias else None


_RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "grad_input": _grad_input,
    "grad_weight": _grad_weight,
}


# ---- one contraction -----------------------------------------------------------------------------


def _compute(
    name: str, call: Any, given: dict[Role, Tensor], results: tuple[Role, ...], bias: Tensor | None = None
) -> list[DTensor]:
    """The results of a contraction of DTensors: ``given`` are its operands, ``call`` is what was validated."""
    mesh = mesh_of(name, {**given, "bias": bias})
    operands: dict[Role, DTensor] = {role: t for role, t in given.items() if isinstance(t, DTensor)}
    first, sizes = next(iter(operands.values())), (call.input_size, call.weight_size, call.output_size)
    shapes: Any = tuple(map(tuple, sizes))
    placed: Any = tuple((role, t.placements) for role, t in operands.items())
    work = Work(shapes, call.geometry, first.dtype.itemsize, tuple(mesh.shape), placed, results)
    choice = choose(work)
    if mesh.get_coordinate() is None:  # as everywhere in DTensor, a process outside of the mesh has nothing
        nothing = first.to_local().new_empty(0)
        return [_wrap(nothing, mesh, choice, role, work.shape(role), call.layout) for role in results]
    _warn(name, choice, operands)
    part = part_of(work, choice, mesh)
    here: Any = {role: local_as(t, choice.placements(role), f"{role} of {name}") for role, t in operands.items()}
    added = _bias(bias, choice, mesh)
    later = "output" in choice.moves or part.empty  # added once, to whole sums
    for halo in part.halos:
        if halo.role in here:
            here[halo.role] = exchange(here[halo.role], halo.dim, halo.route, mesh.get_group(halo.over))
    if part.empty:
        found = [first.to_local().new_zeros(part.sizes[role]) for role in results]
    else:
        found = _local_results(part, here, results, None if later else added, call.layout)
    for halo in reversed(part.halos):
        if halo.role in results:
            at = results.index(halo.role)
            found[at] = exchange(found[at], halo.dim, halo.route, mesh.get_group(halo.over), back=True)
    if added is not None and later:
        found[0] = add_bias(found[0], added)
    return [_wrap(t, mesh, choice, role, work.shape(role), call.layout) for role, t in zip(results, found, strict=True)]


def _local_results(
    part: Part,
    operands: dict[Role, Tensor],
    results: tuple[Role, ...],
    bias: Tensor | None,
    layout: torch.memory_format,
) -> list[Tensor]:
    """Return the results of this process's parts of the operands."""
    if results == ("output",):
        return [_ops.convolution.default(operands["input"], operands["weight"], bias, *part.arguments)]
    if len(results) == 2:  # at once, for a joint backward
        three = operands["output"], operands["input"], operands["weight"]
        return [*_ops.convolution_backward.default(*three, None, *part.arguments, [True, True, False])[:2]]
    form = Form(part.sizes["input"], part.sizes["weight"], part.arguments, layout)
    return [contract(form, results[0], operands)]


def _bias(bias: Tensor | None, choice: Choice, mesh: DeviceMesh) -> Tensor | None:
    """Return the bias of this process's channels; where the output is a sum, only one process adds it."""
    if not isinstance(bias, DTensor):
        return None
    rules = choice.rules
    placements = [Shard(0) if rule is not None and rule.output == 1 else Replicate() for rule in rules]
    local = local_as(bias, placements, "bias of convolution")
    summed = any(rule is not None and rule.output is None and mesh.get_local_rank(i) for i, rule in enumerate(rules))
    return None if summed else local


def _wrap(
    local: Tensor, mesh: DeviceMesh, choice: Choice, role: Role, shape: Sequence[int], layout: torch.memory_format
) -> DTensor:
    strides = torch.empty(tuple(shape), device="meta", memory_format=layout).stride()
    placements = choice.placements(role, result=True)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


# ---- what is gathered ----------------------------------------------------------------------------


def _warn(name: str, choice: Choice, operands: dict[Role, DTensor]) -> None:
    """Warn of what is gathered, once for each calling line of the user."""
    for role, size in choice.gathered:
        have = ", ".join(f"{r} {list(t.placements)}" for r, t in operands.items())
        warn_user(
            f"convgrad::{name} gathers {role}: every process receives {size} bytes, as no rule computes with {have} "
            f"for less; {role} as {list(choice.placements(role))} would need no gathering"
        )
