"""What one process computes of a contraction: the sizes and arguments of its local operator, and its halos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..calculus import Role
from .geometry import Route, chunks
from .sharding import ROLES, Choice, Work, line_of, nested


class Halo(NamedTuple):
    """A role that is extended along one of its dimensions: what is sent, and to whom."""

    role: Role
    dim: int
    way: Route
    group: ProcessGroup


class Part(NamedTuple):
    """What this process computes.

    Attributes:
        sizes: of each role, extended by its halos.
        arguments: of the operator.
        halos: which roles move.
    """

    sizes: dict[Role, list[int]]
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
    g, halos = work.geometry, []
    sizes: dict[Role, list[int]] = {role: _own(work, choice, role, place) for role in ROLES}
    groups = g.groups * sizes["output"][1] // work.shape("output")[1] if g.groups > 1 else 1
    padding, beyond = list(g.padding), list(g.output_padding)
    for i, (rule, role) in enumerate(zip(choice.rules, choice.moves, strict=True)):
        if rule is None or rule.spatial is None or role is None:
            continue
        j, rank = rule.spatial, place[i]
        line = line_of(g, work.shapes, j)  # of a transposed convolution: from output to input
        side = "input" if (role == "input") != g.transposed else "output"
        plan = line.exchange(side, work.mesh[i])
        moved, stays = plan.want[rank], chunks(line.output if side == "input" else line.input, work.mesh[i])[rank]
        padding[j] = line.local(*((moved, stays) if side == "input" else (stays, moved)))
        beyond[j] = 0
        sizes[role][2 + j] = moved[1] - moved[0]
        halos.append(Halo(role, 2 + j, plan.route(rank), mesh.get_group(i)))
    sides = [n for pair in padding for n in pair]
    if all(low == high >= 0 for low, high in padding):
        sides = sides[::2]  # as ATen can state it
    return Part(sizes, (g.stride, sides, g.dilation, g.transposed, beyond, groups), halos)


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
