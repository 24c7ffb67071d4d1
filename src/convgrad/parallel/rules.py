"""The operators ``torch.ops.convgrad.*`` on DTensors: choose, redistribute, exchange, compute locally, send back.

Below autograd: the derivative table calls these same operators on DTensors, so that derivatives of every order and
forward mode need no formula of their own, and a backward pass makes a choice of its own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._compat import wait
from ..calculus import Role, sum_of_bias
from ..engine import checked_backward, checked_convolution, checked_grad_input, checked_grad_weight
from ..errors import DtypeError
from ..ops import with_rules
from .geometry import Range, Route, chunks
from .halo import exchange
from .sharding import ROLES, Choice, Contraction, choose, line_of, nested

__all__ = ["register"]

_ops = torch.ops.convgrad


def register() -> None:
    """Give each operator its rule, and let DTensors reach it."""
    for name, rule in _RULES.items():
        for overload in getattr(_ops, name).overloads():
            torch.library.register_torch_dispatch(getattr(getattr(_ops, name), overload), DTensor, _handler(rule))
    with_rules.add(DTensor)


def _handler(rule: Callable[..., Any]) -> Callable[..., Any]:
    def handle(_class: Any, _operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {k: v for k, v in (kwargs or {}).items() if k != "backend"}
        with torch.no_grad():
            return rule(*args, **options)

    return handle


# ---- the operators -------------------------------------------------------------------------------


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> DTensor:
    call = checked_convolution(input, weight, bias, *arguments)

    def contract(t: dict[Role, Tensor], part: _Part, b: Tensor | None) -> Sequence[Tensor]:
        return [_ops.convolution.default(t["input"], t["weight"], b, *part.arguments)]

    return _compute("convolution", call, {"input": input, "weight": weight}, ("output",), contract, bias)[0]


def _grad_input(grad_output: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> DTensor:
    call = checked_grad_input(grad_output, weight, *arguments, **options)
    return _compute("grad_input", call, {"output": grad_output, "weight": weight}, ("input",), _gradients(call))[0]


def _grad_weight(grad_output: Tensor, input: Tensor, *arguments: Any, **options: Any) -> DTensor:
    call = checked_grad_weight(grad_output, input, *arguments, **options)
    return _compute("grad_weight", call, {"output": grad_output, "input": input}, ("weight",), _gradients(call))[0]


def _convolution_backward(grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any) -> Any:
    call = checked_backward(grad_output, input, weight, *arguments)
    first, second, bias = call.mask
    given: dict[Role, Tensor] = {"output": grad_output}
    given |= {"weight": weight} if first else {}
    given |= {"input": input} if second else {}
    roles: tuple[Role, Role] = ("input", "weight")
    results: tuple[Role, ...] = tuple(role for role, wanted in zip(roles, (first, second), strict=True) if wanted)
    found = _compute("convolution_backward", call, given, results, _gradients(call)) if results else []
    by_role = dict(zip(results, found, strict=True))
    return by_role.get("input"), by_role.get("weight"), sum_of_bias(grad_output) if bias else None


def _gradients(call: Any) -> Callable[..., Sequence[Tensor]]:
    def contract(t: dict[Role, Tensor], part: _Part, _: None) -> Sequence[Tensor]:
        if len(t) == 3:
            both = [True, True, False]
            return _ops.convolution_backward.default(t["output"], t["input"], t["weight"], None, *part.arguments, both)[
                :2
            ]
        name, other, wanted = ("grad_input", "weight", "input") if "weight" in t else ("grad_weight", "input", "weight")
        operator = getattr(_ops, name).default
        return [operator(t["output"], t[other], part.sizes[wanted], *part.arguments, memory_format=call.layout)]

    return contract


_RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "grad_input": _grad_input,
    "grad_weight": _grad_weight,
}


# ---- one contraction -----------------------------------------------------------------------------


class _Part(NamedTuple):
    """What this process computes.

    Attributes:
        sizes: of each role here, extended by its halo.
        own: of each role here, without.
        arguments: of the operator here.
        exchanges: which role moves along which dimension, and how.
    """

    sizes: dict[Role, list[int]]
    own: dict[Role, list[int]]
    arguments: tuple[Any, ...]
    exchanges: list[tuple[Role, int, Route, ProcessGroup]]


def _compute(
    name: str,
    call: Any,
    given: dict[Role, Tensor],
    results: tuple[Role, ...],
    contract: Callable[[dict[Role, Tensor], _Part, Any], Sequence[Tensor]],
    bias: Tensor | None = None,
) -> list[DTensor]:
    """The results of a contraction of DTensors.

    Args:
        name: the operator's.
        call: what was validated.
        given: the operands by their roles.
        results: the roles to compute.
        contract: computes them from local tensors.
        bias: what is added to the output.
    """
    mesh = _mesh(name, {**given, "bias": bias})
    operands: dict[Role, DTensor] = {role: t for role, t in given.items() if isinstance(t, DTensor)}
    work = Contraction(
        (tuple(call.input_size), tuple(call.weight_size), tuple(call.output_size)),
        call.geometry,
        next(iter(operands.values())).dtype.itemsize,
        tuple(mesh.shape),
        tuple((role, t.placements) for role, t in operands.items()),
        results,
    )
    choice = choose(work)
    _warn(name, choice, operands)
    part = _part(work, choice, mesh)
    here: dict[Role, Tensor] = {
        role: wait(t.redistribute(mesh, choice.placements(role)).to_local()) for role, t in operands.items()
    }
    for role, dim, way, group in part.exchanges:
        if role in here:
            here[role] = exchange(here[role], dim, way, group)
    added = _bias(bias, choice, mesh)
    later = "output" in choice.moves  # to whole sums, so that it is added once
    if all(n for size in part.sizes.values() for n in size):
        found = list(contract(here, part, None if later else added))
    else:
        later, like = True, next(iter(here.values()))
        found = [like.new_zeros(part.sizes[role]) for role in results]
    for role, dim, way, group in reversed(part.exchanges):
        if role in results:
            found[results.index(role)] = exchange(found[results.index(role)], dim, way, group, back=True)
    if added is not None and later:
        found[0] = found[0] + added.view(-1, *(1,) * (found[0].dim() - 2))
    return [_wrap(t, mesh, choice, role, work.shape(role), call.layout) for role, t in zip(results, found, strict=True)]


def _mesh(name: str, tensors: dict[Any, Tensor | None]) -> DeviceMesh:
    meshes = {role: t.device_mesh for role, t in tensors.items() if isinstance(t, DTensor)}
    plain = [role for role, t in tensors.items() if t is not None and role not in meshes]
    if plain:
        raise DtypeError(
            f"convgrad::{name} got DTensors for {' and '.join(meshes)} and a plain tensor for {' and '.join(plain)}; "
            "make it a DTensor too, with distribute_tensor or DTensor.from_local"
        )
    first, *others = meshes.values()
    if any(mesh != first for mesh in others):
        raise DtypeError(f"convgrad::{name} got DTensors on several meshes: {meshes}")
    return first


def _part(work: Contraction, choice: Choice, mesh: DeviceMesh) -> _Part:
    place = mesh.get_coordinate()
    assert place is not None
    own: dict[Role, list[int]] = {role: _own(work, choice, role, place) for role in ROLES}
    sizes: dict[Role, list[int]] = {role: list(size) for role, size in own.items()}
    g, exchanges = work.geometry, []
    padding, output_padding = [n for pair in g.padding for n in pair], list(g.output_padding)
    for i, (rule, role) in enumerate(zip(choice.rules, choice.moves, strict=True)):
        if rule is None or role is None or rule.spatial is None:
            continue
        j, rank, parts = rule.spatial, place[i], work.mesh[i]
        line, moves_input = line_of(g, work.shapes, j), (role == "input") != g.transposed
        plan = line.exchange("input" if moves_input else "output", parts)
        inputs, outputs = (chunks(n, parts)[rank] for n in (line.input, line.output))
        wanted: Range = plan.want[rank]
        inputs, outputs = (wanted, outputs) if moves_input else (inputs, wanted)
        padding[2 * j : 2 * j + 2] = line.local(inputs, outputs)
        output_padding[j] = 0
        sizes[role][2 + j] = wanted[1] - wanted[0]
        exchanges.append((role, 2 + j, plan.route(rank), mesh.get_group(i)))
    if not exchanges and all(a == b for a, b in g.padding):
        padding = [a for a, _ in g.padding]  # as ATen can state it
    groups = g.groups * own["output"][1] // work.shape("output")[1] if g.groups > 1 else 1
    arguments = (g.stride, padding, g.dilation, g.transposed, output_padding, groups)
    return _Part(sizes, own, arguments, exchanges)


def _own(work: Contraction, choice: Choice, role: Role, place: Sequence[int]) -> list[int]:
    found = list(work.shape(role))
    for dim, n in enumerate(found):
        along = [i for i, rule in enumerate(choice.rules) if rule is not None and getattr(rule, role) == dim]
        at = 0
        for i in along:
            at = at * work.mesh[i] + place[i]
        start, stop = nested(n, [work.mesh[i] for i in along])[at]
        found[dim] = stop - start
    return found


def _bias(bias: Tensor | None, choice: Choice, mesh: DeviceMesh) -> Tensor | None:
    """The bias of this process's channels; where the output is a sum, one process of them adds it."""
    if not isinstance(bias, DTensor):
        return None
    rules = choice.rules
    placements = [Shard(0) if rule is not None and rule.output == 1 else Replicate() for rule in rules]
    local = wait(bias.redistribute(mesh, placements).to_local())
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
    """Say what is gathered, once for each place in the user's code that calls."""
    for role, size in choice.gathered:
        have = ", ".join(f"{r} {list(t.placements)}" for r, t in operands.items())
        text = (
            f"convgrad::{name} gathers {role}: every process receives {size} bytes, as no rule computes with {have} "
            f"for less; {role} as {list(choice.placements(role))} would need no gathering"
        )
        frame = sys._getframe()
        while frame is not None and _is_inside(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:  # a backward pass in a thread of its own
            warnings.warn(text, stacklevel=2)
        else:
            place = frame.f_code.co_filename, frame.f_lineno
            known = frame.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(text, UserWarning, *place, registry=known)


_INSIDE = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def _is_inside(file: str) -> bool:
    return file.startswith(_INSIDE)
