"""The part of a contraction that one process computes: its operator's sizes and arguments, and its halos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from ..problem import Role
from .geometry import Route, chunks
from .sharding import ROLES, Choice, Work, line_of, nested


class Halo(NamedTuple):
    """A dimension along which a role is extended, and over which dimension of the mesh."""

    role: Role
    dim: int
    route: Route
    over: int


class Part(NamedTuple):
    """The sizes, arguments and halos of this process's operator."""

    #: Of each role, extended by its halos.
    sizes: dict[Role, list[int]]
    #: Of the operator.
    arguments: tuple[Any, ...]
    halos: list[Halo]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: results are zero, if they have elements at all."""
        return not all(n for size in self.sizes.values() for n in size)


def part_of(work: Work, choice: Choice, mesh: DeviceMesh) -> Part:
    """This process's part of a contraction."""
    place = mesh.get_coordinate()
    assert place is not None
    g = work.geometry
    sizes: dict[Role, list[int]] = {role: _own(work, choice, role, place) for role in ROLES}
    groups = g.groups * sizes["output"][1] // work.shape("output")[1] if g.groups > 1 else 1
    padding, beyond, halos = [n for pair in g.padding for n in pair], list(g.output_padding), []
    for i, (rule, role) in enumerate(zip(choice.rules, choice.moves, strict=True)):
        if rule is None or rule.spatial is None or role is None:
            continue
        j, dim, parts = rule.spatial, 2 + rule.spatial, work.mesh[i]
        line = line_of(g, work.shapes, j)
        side = "input" if (role == "input") != g.transposed else "output"  # a transposed one is read backwards
        exchange = line.exchange(side, parts)
        moved, stays = exchange.want[place[i]], chunks(line.output if side == "input" else line.input, parts)[place[i]]
        sizes[role][dim] = moved[1] - moved[0]
        padding[2 * j : 2 * j + 2] = line.local(*((moved, stays) if side == "input" else (stays, moved)))
        beyond[j] = 0
        halos.append(Halo(role, dim, exchange.route(place[i]), i))
    if not halos and all(low == high >= 0 for low, high in g.padding):
        padding = padding[::2]  # as ATen can state it
    return Part(sizes, (g.stride, padding, g.dilation, g.transposed, beyond, groups), halos)


def _own(work: Work, choice: Choice, role: Role, place: Sequence[int]) -> list[int]:
    """The size of this process's shard of a role."""
    found = list(work.shape(role))
    for dim, n in enumerate(found):
        along = [i for i, rule in enumerate(choice.rules) if rule is not None and getattr(rule, role) == dim]
        at = 0
        for i in along:
            at = at * work.mesh[i] + place[i]
        start, stop = nested(n, [work.mesh[i] for i in along])[at]
        found[dim] = stop - start
    return found
