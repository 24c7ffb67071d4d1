"""The exchanges of a sharded convolution, for `convgrad.explain`: from the rules that compute it, without a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._compat import suggested_format
from ..diagnostics import Transfer
from ..problem import Geometry, Role, convolution_shape
from .part import Part, part_of
from .redistribution import groups_of, mesh_of, names_of
from .sharding import Choice, Placements, Step, Work, choose, steps

_WHY = {
    "halo exchange": "neighbors own positions that its own couple with",
    "all-gather": "no other rule computes it for fewer bytes",
    "all-to-all": "this pass is computed, or wanted, with another dimension sharded",
    "reduce-scatter": "each process has a summand of all of it",
    "all-reduce": "each process has a summand of all of it",
}


class Description(NamedTuple):
    """This process's part of a call."""

    #: Its operands, without memory, and the arguments of ``torch.convolution``.
    arguments: tuple[object, ...]
    #: Where operands and results lie, in words.
    placements: str
    #: What this process receives.
    transfers: tuple[Transfer, ...]


def described(
    geometry: Geometry, input: DTensor, weight: Tensor, bias: Tensor | None, outputs: Sequence[str]
) -> Description:
    """Return this process's part of a convolution of DTensors, and what it receives forward and backward."""
    mesh = mesh_of("convolution", {"input": input, "weight": weight, "bias": bias})
    assert isinstance(weight, DTensor)
    sizes = tuple(input.shape), tuple(weight.shape), convolution_shape(input.shape, weight.shape, None, geometry)
    operands: dict[Role, Placements] = {"input": input.placements, "weight": weight.placements}

    def work(given: dict[Role, Placements], results: tuple[Role, ...]) -> Work:
        return Work(sizes, geometry, input.dtype.itemsize, tuple(mesh.shape), tuple(given.items()), results)

    forward = work(operands, ("output",))
    choice = choose(forward)
    part = part_of(forward, choice, mesh)
    output = _at_rest(forward, choice, "output")
    found = list(_transfers("forward", forward, choice, part, mesh)) if "forward" in outputs else []
    roles: tuple[Role, Role] = ("input", "weight")
    results: tuple[Role, ...] = tuple(role for role in roles if f"grad_{role}" in outputs)
    if results:
        given: dict[Role, Placements] = {"output": output}
        given |= {role: operands[role] for role in roles if results != (role,)}
        backward = work(given, results)
        choice = choose(backward)
        found += _transfers("backward", backward, choice, part_of(backward, choice, mesh), mesh)
    if isinstance(bias, DTensor) and "grad_bias" in outputs:
        sums = tuple(Shard(0) if p == Shard(1) else Partial() if p.is_shard() else p for p in output)
        redistribution = steps(tuple(bias.shape), bias.dtype.itemsize, tuple(mesh.shape), sums, bias.placements)
        found += _redistributions("backward", "grad_bias", redistribution, mesh)
    names = names_of(mesh, range(mesh.ndim))
    text = f"on a mesh of {' x '.join(f'{name} {n}' for name, n in zip(names, mesh.shape, strict=True))}: " + ", ".join(
        f"{role} {list(placements)}" for role, placements in {**operands, "output": output}.items()
    )
    layout = suggested_format(input.to_local())
    local: list[Tensor | None] = [
        torch.empty(part.sizes[role], dtype=input.dtype, device="meta", memory_format=layout) for role in roles
    ]
    channels = part.sizes["output"][1]
    local.append(None if bias is None else torch.empty(channels, dtype=bias.dtype, device="meta"))
    return Description((*local, *part.arguments), text, tuple(found))


def _at_rest(work: Work, choice: Choice, role: Role) -> Placements:
    """Return the final placements of a result: those the next layer reads, or those it has, with sums added up."""
    own = dict(work.operands).get(role) or work.home(role) or choice.placements(role, result=True)
    return tuple(Replicate() if p.is_partial() else p for p in own)


def _transfers(name: str, work: Work, choice: Choice, part: Part, mesh: DeviceMesh) -> Iterator[Transfer]:
    for role, have in work.operands:
        tensor = "grad_output" if name == "backward" and role == "output" else role
        redistribution = steps(work.shape(role), work.itemsize, work.mesh, have, choice.placements(role))
        yield from _redistributions(name, tensor, redistribution, mesh)
        yield from _halos(name, tensor, role, False, work, part, mesh)
    for role in work.results:
        tensor = f"grad_{role}" if name == "backward" else role
        yield from _halos(name, tensor, role, True, work, part, mesh)
        have, want = choice.placements(role, result=True), _at_rest(work, choice, role)
        redistribution = steps(work.shape(role), work.itemsize, work.mesh, have, want)
        yield from _redistributions(name, tensor, redistribution, mesh)


def _halos(
    name: str, tensor: str, role: Role, result: bool, work: Work, part: Part, mesh: DeviceMesh
) -> Iterator[Transfer]:
    """Yield the halos: rows that extend an operand, or partial sums of this process's part of a result."""
    halos, size = [halo for halo in part.halos if halo.role == role], list(part.sizes[role])
    for halo in halos:
        size[halo.dim] = halo.route.have[1] - halo.route.have[0]
    for halo in halos:
        if halo.route.travels:
            sent = sum(p.stop - p.start for pieces in halo.route.sent for p in pieces)
            row = work.itemsize * prod(size[: halo.dim] + size[halo.dim + 1 :])
            moved, over = row * (sent if result else halo.route.received), names_of(mesh, (halo.over,))
            yield Transfer(name, tensor, "halo exchange", over, moved, moved, _WHY["halo exchange"])
        size[halo.dim] = part.sizes[role][halo.dim]  # the rows of the next halo have this length


def _redistributions(name: str, tensor: str, redistribution: Sequence[Step], mesh: DeviceMesh) -> Iterator[Transfer]:
    """Yield each step that sends something; a sum over some processes is one all-reduce for each mesh dimension."""
    for what, over, _, _, least in (step for step in redistribution if step.bytes):
        sent = least
        if what == "all-reduce":
            everyone = prod(mesh.size(m) for m in over)
            size = least * everyone // (2 * (everyone - 1))
            sent = sum(2 * size * (group.size() - 1) // group.size() for group in groups_of(mesh, over))
        yield Transfer(name, tensor, what, names_of(mesh, over), sent, least, _WHY[what])
