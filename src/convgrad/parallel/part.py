"""What one process computes of a contraction: the sizes and arguments of its local operator, and its halos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..calculus import Role
from .geometry import Line, Range, Route, chunks
from .sharding import ROLES, Choice, Work, line_of, nested


class Halo(NamedTuple):
    """A spatial dimension along which a role is extended; ranges are positions of the whole.

    Attributes:
        role: the one that moves.
        other: the one that stays, input or output.
        dim: the dimension of both.
        route: what is sent.
        group: to whom.
        line: the convolution along this dimension.
        side: which side of the line the moving role is; a transposed convolution reads it from output to input.
        moved: the extended range.
        stays: this process's range of the other role.
    """

    role: Role
    other: Role
    dim: int
    route: Route
    group: ProcessGroup
    line: Line
    side: Literal["input", "output"]
    moved: Range
    stays: Range


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

    def extended(self, halo: Halo) -> Part:
        """The same with a halo."""
        stride, padding, *rest = self.arguments
        j, sizes = halo.dim - 2, dict(self.sizes)
        ranges: dict[Role, Range] = {halo.role: halo.moved, halo.other: halo.stays}
        for role, (start, stop) in ranges.items():
            sizes[role] = [*sizes[role][: 2 + j], stop - start, *sizes[role][3 + j :]]
        sides = halo.line.local(*((halo.moved, halo.stays) if halo.side == "input" else (halo.stays, halo.moved)))
        return self._replace(sizes=sizes, arguments=(stride, [*padding[: 2 * j], *sides, *padding[2 * j + 2 :]], *rest))


def part_of(work: Work, choice: Choice, mesh: DeviceMesh) -> Part:
    """This process's part of a contraction."""
    place = mesh.get_coordinate()
    assert place is not None
    g = work.geometry
    sizes: dict[Role, list[int]] = {role: _own(work, choice, role, place) for role in ROLES}
    spatial = [i for i, role in enumerate(choice.moves) if role is not None]
    padding = [n for pair in g.padding for n in pair]
    if not spatial and all(low == high for low, high in g.padding):
        padding = padding[::2]  # as ATen can state it
    exchanged = {rule.spatial for i in spatial if (rule := choice.rules[i]) is not None}
    beyond = [0 if j in exchanged else n for j, n in enumerate(g.output_padding)]
    groups = g.groups * sizes["output"][1] // work.shape("output")[1] if g.groups > 1 else 1
    part = Part(sizes, (g.stride, padding, g.dilation, g.transposed, beyond, groups), [])
    for i in spatial:
        halo = _halo(work, choice, mesh, i, place[i])
        part = part.extended(halo)
        part.halos.append(halo)
    return part


def _halo(work: Work, choice: Choice, mesh: DeviceMesh, i: int, rank: int) -> Halo:
    rule, role = choice.rules[i], choice.moves[i]
    assert rule is not None
    assert rule.spatial is not None
    assert role is not None
    line, parts = line_of(work.geometry, work.shapes, rule.spatial), work.mesh[i]
    side = "input" if (role == "input") != work.geometry.transposed else "output"
    plan = line.exchange(side, parts)
    stays = chunks(line.output if side == "input" else line.input, parts)[rank]
    other = "output" if role == "input" else "input"
    dim = 2 + rule.spatial
    return Halo(role, other, dim, plan.route(rank), mesh.get_group(i), line, side, plan.want[rank], stays)


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
