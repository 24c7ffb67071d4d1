"""The sharding of a contraction: the table of rules, the bytes that each costs, and the choice.

The three roles of the one form share axes: input and output the batch and every spatial dimension, weight and output
the output channels, input and weight the input channels, and all three the groups. To shard one of these axes over a
dimension of the mesh is one rule for every pass: a role that has the axis is sharded along it; the role that has not is
the same on every process where it is read, and where it is the result, it is a sum over the processes.

===============  ==========  ===========  ==========
rule             input       weight       output
===============  ==========  ===========  ==========
batch            Shard(0)    (sum)        Shard(0)
output channels  (sum)       Shard(0)     Shard(1)
input channels   Shard(1)    Shard(1)     (sum)
groups           Shard(1)    Shard(0)     Shard(1)
spatial j        Shard(2+j)  (sum)        Shard(2+j)
===============  ==========  ===========  ==========

(sum): Replicate for an operand, Partial for a result. The weight of a transposed convolution has its channels in the
other order. A rule for each dimension of the mesh, in any combination: that is every sharding. A spatial rule
exchanges a halo of one side (see `geometry`).

The choice is the combination for which the fewest bytes must travel, of those that leave every process its part of the
work. What the result of a forward pass or the input's gradient costs on its way back is counted where the activations
are sharded along batch and space, as the other layers of a network will want it there; what a sum in any other result
will cost later is not, as in DTensor's own rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..problem import Geometry, Role
from .geometry import Line, Range, chunks

Placements = tuple[Placement, ...]
Shape = tuple[int, ...]


class Rule(NamedTuple):
    """One row of the table: the dimension of each role that is sharded, None where the role lacks the axis."""

    name: str
    input: int | None
    weight: int | None
    output: int | None

    @property
    def spatial(self) -> int | None:
        """The spatial dimension that is sharded, or None."""
        return self.input - 2 if self.input is not None and self.input > 1 else None


class Work(NamedTuple):
    """The contraction to compute: all that a choice depends on, the same on every process."""

    #: Of input, weight and output, as a whole.
    shapes: tuple[Shape, Shape, Shape]
    geometry: Geometry
    itemsize: int
    #: The sizes of the mesh's dimensions.
    mesh: Shape
    operands: tuple[tuple[Role, Placements], ...]
    results: tuple[Role, ...]

    def shape(self, role: Role) -> Shape:
        """The whole shape of a role."""
        return self.shapes[ROLES.index(role)]

    def home(self, role: Role) -> Placements | None:
        """Return the placements wanted of a result: input and output alike, unless channels are sharded or summed."""
        other = dict(self.operands).get("input" if role == "output" else "output")
        lasting = other is not None and all(p.is_replicate() or (p.is_shard() and p != Shard(1)) for p in other)
        return other if lasting and role != "weight" else None


class Choice(NamedTuple):
    """A rule for each dimension of the mesh; None where every process computes the same."""

    rules: tuple[Rule | None, ...]
    #: For each spatial rule the role that is extended by a halo; None for the others.
    moves: tuple[Role | None, ...]
    #: What a process receives, on average, of halos, operands and results.
    bytes: int
    #: What it receives of each role of which whole shards are gathered.
    gathered: tuple[tuple[Role, int], ...]

    def placements(self, role: Role, result: bool = False) -> Placements:
        """Return the placements of a role, as an operand or as a result."""
        found: list[Placement] = []
        for rule in self.rules:
            dim = None if rule is None else getattr(rule, role)
            summed = Partial() if result and rule is not None else Replicate()
            found.append(summed if dim is None else Shard(dim))
        return tuple(found)


ROLES: tuple[Role, Role, Role] = ("input", "weight", "output")


def _table(g: Geometry, ndim: int) -> list[Rule]:
    ci, co = (0, 1) if g.transposed else (1, 0)
    channels = [Rule("groups", 1, 0, 1)]
    if g.groups == 1:
        channels = [Rule("output channels", None, co, 1), Rule("input channels", 1, ci, None)]
    spatial = [Rule(f"spatial {j}", 2 + j, None, 2 + j) for j in range(ndim)]
    return [Rule("batch", 0, None, 0), *channels, *spatial]


def nested(length: int, parts: Sequence[int]) -> list[Range]:
    """The ranges of a dimension that several dimensions of the mesh shard, one after another."""
    found: list[Range] = [(0, length)]
    for p in parts:
        found = [(a + c, a + d) for a, b in found for c, d in chunks(b - a, p)]
    return found


def line_of(g: Geometry, shapes: tuple[Shape, Shape, Shape], j: int) -> Line:
    """One spatial dimension of a convolution; of a transposed one, the plain one that it reads from output to input."""
    source, kernel, result = (s[2 + j] for s in shapes)
    if g.transposed:
        source, result = result, source
    return Line(source, result, kernel, g.stride[j], g.padding[j][0], g.dilation[j])


@lru_cache(maxsize=1024)
def choose(c: Work) -> Choice:
    """Return the cheapest combination of rules; of equal ones, the one that changes the fewest placements.

    Before that, one that leaves no mesh dimension repeating the work although it shards an operand.
    """
    table: list[Rule | None] = [None, *_table(c.geometry, len(c.shapes[0]) - 2)]
    found = [_priced(c, rules) for rules in product(table, repeat=len(c.mesh)) if _possible(c, rules)]

    def price(choice: Choice) -> tuple[int, int, int]:
        sharded = [any(not have[i].is_replicate() for _, have in c.operands) for i in range(len(c.mesh))]
        repeated = sum(s and rule is None for s, rule in zip(sharded, choice.rules, strict=True))
        placed = [(have, choice.placements(role)) for role, have in c.operands]
        changes = sum(a != b for pair in placed for a, b in zip(*pair, strict=True))
        return repeated, choice.bytes, changes

    return min(found, key=price)


def _possible(c: Work, rules: tuple[Rule | None, ...]) -> bool:
    spatial = [r for r in rules if r is not None and r.spatial is not None]
    if len(set(spatial)) < len(spatial):
        return False  # a halo goes along one dimension of the mesh
    for rule in {r for r in rules if r is not None}:
        parts = [p for p, r in zip(c.mesh, rules, strict=True) if r == rule]
        placed = [
            (getattr(rule, role), p) for role, have in c.operands for p, r in zip(have, rules, strict=True) if r == rule
        ]
        already = any(dim is not None and placement == Shard(dim) for dim, placement in placed)
        for role in ROLES:
            dim = getattr(rule, role)
            if dim is not None and c.shape(role)[dim] < prod(parts) and not already:
                return False  # some processes would have nothing to do
        if rule.name == "groups" and not _whole_groups(c, parts):
            return False
    return True


def _whole_groups(c: Work, parts: list[int]) -> bool:
    """Whether every shard of the channels holds whole groups, the same ones of all roles."""
    groups = nested(c.geometry.groups, parts)
    sizes = (c.shape("input")[1], c.shape("weight")[0], c.shape("output")[1])
    each = [(n, n // c.geometry.groups) for n in sizes]
    return all(nested(n, parts) == [(a * size, b * size) for a, b in groups] for n, size in each)


# ---- costs ---------------------------------------------------------------------------------------


def _priced(c: Work, rules: tuple[Rule | None, ...]) -> Choice:
    plain = Choice(rules, (None,) * len(rules), 0, ())
    received, gathered = 0, {}
    for role, have in c.operands:
        for step in steps(c.shape(role), c.itemsize, c.mesh, have, plain.placements(role)):
            received += step.bytes
            if step.name == "all-gather":
                gathered[role] = gathered.get(role, 0) + step.bytes
    for role in c.results:
        have, home = plain.placements(role, result=True), c.home(role)
        if home is not None:
            received += sum(step.bytes for step in steps(c.shape(role), c.itemsize, c.mesh, have, home))
    moves: list[Role | None] = []
    for i, rule in enumerate(rules):
        n, role = (0, None) if rule is None or rule.spatial is None else min(_halos(c, plain, i, rule.spatial))
        received += n
        moves.append(role)
    return Choice(rules, tuple(moves), received, tuple(gathered.items()))


def _halos(c: Work, choice: Choice, i: int, j: int) -> Iterator[tuple[int, Role]]:
    """The bytes of a halo of the input, and of one of the output."""
    line, used = line_of(c.geometry, c.shapes, j), [role for role, _ in c.operands] + list(c.results)
    sides: tuple[Role, Role] = ("output", "input") if c.geometry.transposed else ("input", "output")
    for side, role in zip(("input", "output"), sides, strict=True):
        shape = c.shape(role)
        apart = [c.mesh[k] for k, p in enumerate(choice.placements(role)) if p.is_shard() and k != i]
        row = c.itemsize * prod(shape) // prod(apart) // shape[2 + j]  # of one process
        yield used.count(role) * row * line.exchange(side, c.mesh[i]).moved // c.mesh[i], role


class Step(NamedTuple):
    """One collective of a redistribution over dimensions of the mesh, or a cut, which sends nothing."""

    name: str
    over: tuple[int, ...]
    have: Placement
    want: Placement
    #: What a process receives, on average.
    bytes: int


@lru_cache(maxsize=4096)
def steps(shape: Shape, itemsize: int, mesh: Shape, have: Placements, want: Placements) -> tuple[Step, ...]:
    """Return the steps from some placements to others: those that shrink the tensor first, those that gather last."""
    found: list[Step] = []
    now = list(have)
    while True:
        changes = [i for i, placement in enumerate(want) if now[i] != placement]
        if not changes:
            return tuple(found)
        leaving = [now[i] for i in changes]
        free = [i for i in changes if want[i].is_replicate() or want[i] not in leaving]
        i = min(
            free or [i for i in changes if now[i].is_shard()], key=lambda i: _ORDER.index(_collective(now[i], want[i]))
        )
        before, after = now[i], want[i] if free else Replicate()  # one of two that exchange is gathered
        name = _collective(before, after)
        over = tuple(j for j in changes if (now[j], want[j]) == (before, after)) if name == "all-reduce" else (i,)
        parts = prod(mesh[j] for j in over)
        size = itemsize * prod(shape) // prod(mesh[j] for j, p in enumerate(now) if p.is_shard() and j not in over)
        least = size * (parts - 1) // parts
        sent = {"cut": 0, "all-to-all": least // parts, "all-reduce": 2 * least}.get(name, least)
        found.append(Step(name, over, before, after, sent))
        for j in over:
            now[j] = after


_ORDER = ("cut", "reduce-scatter", "all-to-all", "all-reduce", "all-gather")


def _collective(have: Placement, want: Placement) -> str:
    if have.is_replicate():
        return "cut"
    if have.is_partial():
        return "all-reduce" if want.is_replicate() else "reduce-scatter"
    return "all-gather" if want.is_replicate() else "all-to-all"
