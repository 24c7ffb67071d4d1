"""Halo exchange: a shard extended by what its neighbors hold, as a differentiable function.

One all-to-all a dimension, in which a process sends each other one exactly the positions that it lacks: a single
functional collective, which the compiler traces. Several dimensions go one after another, so that a corner comes along
with the border that the neighbor has received already: the bytes that a process receives are those that it lacks, and
none of them comes from a diagonal neighbor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from .._compat import all_to_all, suggested_format
from ..errors import ShapeError
from .geometry import Exchange, Route

Group = ProcessGroup | DeviceMesh
Counts = int | Sequence[int]


def halo_exchange(
    x: Tensor, dim: int | tuple[int, ...], before: Counts | tuple[Counts, ...], after: Counts | tuple[Counts, ...],
    mesh_or_group: Group | tuple[Group, ...], *, padding: Literal["zeros", "circular"] = "zeros",
    sizes: Sequence[int] | tuple[Sequence[int], ...] | None = None,
) -> Tensor:  # fmt: skip
    """Extend the local shard of a tensor by positions of the neighboring shards, of several of them if needed.

    Its derivative sends the gradients of the extensions back to the shards that they came from, which add them. It can
    be differentiated any number of times, in forward mode too, and compiles into one graph.

    Args:
        x: the local shard.
        dim: the dimension along which the whole is sharded, or a tuple of them.
        before: how many positions to add at the beginning, cut off if negative: one number, or a list with one for each
            shard. For several dimensions one number for all, or a tuple with an entry for each.
        after: the same for the end.
        mesh_or_group: the processes that hold the shards, in their order: a process group, or a DeviceMesh with one
            dimension for each of ``dim``; for several dimensions a tuple of groups too.
        padding: what lies beyond the ends of the whole: zeros, or with ``circular`` the other end.
        sizes: how many positions each shard has along ``dim``, for several dimensions a tuple of such lists. None: all
            as many as this one.

    Shape:
        (..., n, ...) -> (..., before + n + after, ...)

    Raises:
        ShapeError: a dimension, a number of positions, shards or groups that do not belong together.
        TypeError: neither a process group nor a mesh.

    Equivalent to:
        >>> import os, torch
        >>> import torch.distributed as dist
        >>> from convgrad.parallel import halo_exchange
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> x = torch.arange(4.0)
        >>> halo_exchange(x, 0, 1, 2, dist.group.WORLD, padding="circular")  # of one process: the other end of itself
        tensor([3., 0., 1., 2., 3., 0., 1.])
        >>> torch.nn.functional.pad(x[None], (1, 2), mode="circular")[0]
        tensor([3., 0., 1., 2., 3., 0., 1.])
        >>> dist.destroy_process_group()
    """
    several = isinstance(dim, tuple)
    if padding not in ("zeros", "circular"):
        raise ShapeError(f"padding should be 'zeros' or 'circular', but got {padding!r}")
    dims = [*dim] if isinstance(dim, tuple) else [dim]
    if outside := [d for d in dims if not -x.dim() <= d < x.dim()]:
        raise ShapeError(f"dim should be from {-x.dim()} to {x.dim() - 1}, but got {outside[0]}")
    dims = [d % x.dim() for d in dims]
    if len(set(dims)) != len(dims):
        raise ShapeError(f"each dimension can be extended once, but got dim={dim}")
    groups = _groups(mesh_or_group, len(dims))
    rows = [_rows(name, v, several, dims) for name, v in (("before", before), ("after", after), ("sizes", sizes))]
    routes = []
    for d, group, low, high, given in zip(dims, groups, *rows, strict=True):
        parts, rank = group.size(), group.rank()
        lengths = [int(x.shape[d])] * parts if given is None else list(given)
        if len(lengths) != parts or lengths[rank] != x.shape[d]:
            raise ShapeError(
                f"sizes of dimension {d} should name {parts} shards, of which shard {rank} has {x.shape[d]} positions, "
                f"but got {lengths}"
            )
        routes.append(_route(lengths, low, high, padding == "circular", rank))
    for d, route, group in zip(dims, routes, groups, strict=True):
        x = exchange(x, d, route, group)
    zeros = [n for d in reversed(range(x.dim())) for n in (routes[dims.index(d)].zeros if d in dims else (0, 0))]
    return pad(x, zeros) if any(zeros) else x  # last, so that no zeros are sent


@torch.compiler.assume_constant_result
def _route(sizes: Any, before: Counts, after: Counts, circular: bool, rank: int) -> Route:
    """Return the route of a halo; the compiler computes it once and does not trace it."""
    return Exchange.of_halo(sizes, before, after, circular).route(rank)


def exchange(x: Tensor, dim: int, route: Route, group: ProcessGroup, *, back: bool = False) -> Tensor:
    """Return this process's extended range; or in reverse, the sum of all extended ranges over this process's part.

    Each is the derivative of the other. The group has the processes in the order of the shards.

    Shape:
        (..., have, ...) -> (..., want, ...), without positions beyond the ends of the whole; back the other way round.
    """
    if not route.travels and [p[1:3] for p in route.pieces] == [route.have]:
        return x
    return _apply(x, dim, route, group, back)


class _Exchange(torch.autograd.Function):
    """The linear map `exchange`; its transpose is the same map the other way."""

    @staticmethod
    def forward(x: Tensor, dim: int, route: Route, group: ProcessGroup, back: bool) -> Tensor:
        return _exchanged(x, dim, route, group, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rest = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dim, route, group, back = ctx.rest
        return _apply(gradients[0], dim, route, group, not back), None, None, None, None


class _Linear(_Exchange):
    """Forward mode and vmap too, which Dynamo refuses to trace."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _apply(tangents[0], *ctx.rest)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        x, dim, *rest = arguments
        return _apply(x.movedim(in_dims[0], 0), dim + 1, *rest), 0


def _apply(*arguments: Any) -> Any:
    return (_Exchange if torch.compiler.is_dynamo_compiling() else _Linear).apply(*arguments)


def _exchanged(x: Tensor, dim: int, route: Route, group: ProcessGroup, back: bool) -> Tensor:
    rank, everyone, (base, stop) = group.rank(), range(group.size()), route.have
    shape = [n for d, n in enumerate(x.shape) if d != dim]
    kept = [(p.at, p.start - base, p.stop - p.start) for p in route.pieces if p.rank == rank]
    lacked = [[(p.at, p.stop - p.start) for p in route.pieces if p.rank == other != rank] for other in everyone]
    sent = [[(p.start - base, p.stop - p.start) for p in pieces] for pieces in route.sent]
    outgoing, incoming = (lacked, sent) if back else (sent, lacked)
    places = [place for ranges in incoming for place in ranges]
    compiled = torch.compiler.is_dynamo_compiling()  # Dynamo does not trace a gradient's layout
    layout = torch.contiguous_format if compiled else suggested_format(x)
    if route.travels and prod(shape):
        pieces = [x.narrow(dim, at, n).movedim(dim, 0) for ranges in outgoing for at, n in ranges]
        rows = torch.cat(pieces) if pieces else x.new_empty((0, *shape))
        received, given = ([sum(n for _, n in ranges) for ranges in side] for side in (incoming, outgoing))
        what = f"halo exchange along dimension {dim} among {len(everyone)} processes"
        arrived = all_to_all(rows, received, given, group, what)
    else:  # no bytes for any process
        arrived = x.new_empty((sum(n for _, n in places), *shape))
    parts = [part.movedim(0, dim) for part in arrived.split([n for _, n in places])] if places else []
    if not back:
        found = {at: x.narrow(dim, start, n) for at, start, n in kept}
        for (at, _), part in zip(places, parts, strict=True):
            found[at] = part.contiguous(memory_format=layout)
        return torch.cat([found[p.at] for p in route.pieces] or [x.narrow(dim, 0, 0)], dim)
    if [n for *_, n in kept] == [stop - base]:
        total = x.narrow(dim, kept.pop()[0], stop - base).clone()
    else:
        size = [stop - base if d == dim else n for d, n in enumerate(x.shape)]
        total = x.new_zeros(size).contiguous(memory_format=layout)
    for at, start, n in kept:
        total.narrow(dim, start, n).add_(x.narrow(dim, at, n))
    for (start, n), part in zip(places, parts, strict=True):
        total.narrow(dim, start, n).add_(part)
    return total


# ---- arguments -----------------------------------------------------------------------------------


def _rows(name: str, value: Any, several: bool, dims: list[int]) -> Sequence[Any]:
    """Return one entry for each dimension."""
    if not several or value is None or isinstance(value, int):
        return [value] * len(dims)
    if not isinstance(value, tuple) or len(value) != len(dims):
        raise ShapeError(f"expected {name} to be a tuple of {len(dims)} entries, one for each of dim, but got {value}")
    return value


def _groups(given: Group | tuple[Group, ...], count: int) -> list[ProcessGroup]:
    if isinstance(given, DeviceMesh):
        if given.ndim != count:
            raise ShapeError(f"expected a mesh with {count} dimensions, one for each of dim, but it has {given.ndim}")
        return [given.get_group(i) for i in range(count)]
    groups = given if isinstance(given, tuple) else (given,)
    if len(groups) != count:
        raise ShapeError(f"expected {count} groups, one for each of dim, but got {len(groups)}")
    if any(group is None for group in groups):  # as dist.group.WORLD is before init_process_group
        raise TypeError("expected a process group or a DeviceMesh, but got None: is torch.distributed initialized?")
    return [g.get_group() if isinstance(g, DeviceMesh) else g for g in groups]
