"""Local tensors of a DTensor, a DTensor of local tensors, and the communication between processes.

Every rule for a whole network has the same three steps: `spread` gives the part of each operand that this process
computes with, PyTorch computes on plain local tensors, and `joined` says which part of which whole the result is.

DTensor's own way from replicas to parts, ``to_local(grad_placements=...)``, loses terms of second
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.functional import pad

from .._compat import wait
from ..errors import UnsupportedError
from .geometry import Exchange, Range, Route, chunks
from .halo import exchange
from .redistribution import groups_of, redistribute


def shards(x: DTensor) -> dict[int, int]:
    """Return the mesh dimension that shards each sharded dimension of a tensor."""
    found: dict[int, int] = {}
    for m, placement in enumerate(x.placements):
        if type(placement) is Shard and placement.dim not in found:
            found[placement.dim] = m
        elif not placement.is_replicate():
            raise UnsupportedError(
                f"placements should be Replicate, or Shard of a different dimension each, but got {list(x.placements)}"
            )
    return found


def spread(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], used: Collection[int]) -> Tensor:
    """Return the part of an operand that this process computes with; refuse to gather.

    Args:
        value: a DTensor, or a tensor that every process has whole.
        used: the mesh dimensions whose processes use it for different parts of the result; where it is replicated
            there, its gradient is the sum of theirs.
    """
    have = value.placements if isinstance(value, DTensor) else [Replicate()] * mesh.ndim
    local = local_of(value) if isinstance(value, DTensor) else value
    cuts = [m for m in range(mesh.ndim) if have[m] != placements[m]]
    if any(not have[m].is_replicate() for m in cuts):
        raise UnsupportedError(
            f"a tensor of size {list(value.shape)} is placed as {list(have)} where {list(placements)} is needed; "
            "redistribute it first"
        )
    shared = [m for m in range(mesh.ndim) if have[m].is_replicate() and (m in used or m in cuts)]
    for group in groups_of(mesh, shared) if local.is_floating_point() or local.is_complex() else ():
        local = _Share.apply(local, group)
    for m in cuts:
        dim = placements[m].dim  # pyright: ignore[reportAttributeAccessIssue]
        start, stop = local_range(mesh, m, value.shape[dim])
        local = local.narrow(dim, start, stop - start)
    return local


def joined(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the DTensor of this shape from each process's part; no part may be larger or smaller than DTensor's."""
    order = sorted(range(local.dim()), key=lambda d: (-local.stride(d), d))
    whole = torch.empty_permuted(tuple(shape), order, device="meta")  # its strides are in the order of the local ones
    local = _Materialized.apply(local)
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    if torch.compiler.is_dynamo_compiling() or not made.requires_grad:  # a compiled graph has no second derivatives
        return made
    # A gradient in other placements comes back in these: by DTensor's own way it would have no derivative.
    return redistribute(made, placements, "a part")


def joined_like(x: DTensor, local: Tensor, shape: Sequence[int] | None = None) -> DTensor:
    """Return the DTensor of this shape, or that of ``x``, with the placements of ``x``."""
    return joined(local, x.device_mesh, x.placements, x.shape if shape is None else shape)


def local_of(x: DTensor) -> Tensor:
    """Return the part of a tensor that this process has."""
    return _Materialized.apply(x.to_local())


def meta_of(x: Tensor) -> Tensor:
    """Return a tensor of the same size without memory: for PyTorch's own checks, and the size of a result."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def widened(local: Tensor) -> Tensor:
    """Return a tensor in float32 at least: sums of 16-bit numbers need more digits and range than these have."""
    return local.float() if local.dtype in (torch.float16, torch.bfloat16) else local


def on_some(function: Callable[[Tensor], Tensor], local: Tensor) -> Tensor:
    """Apply a function to a local part; an empty part is first padded by a position of zeros, whose result is cut off.

    For an empty tensor PyTorch records no graph, or raises; in the backward, the other processes would then wait for
    this one's collectives.
    """
    empty = [not n for n in local.shape]
    if not any(empty):
        return function(local)
    result = function(pad(local, [n for e in reversed(empty) for n in (0, int(e))]))
    return result[tuple(slice(0 if e else None) for e in empty)]


def reduced(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return the DTensor from each process's part; where a placement is Partial, from its summand."""
    for group in groups_of(mesh, [m for m, placement in enumerate(placements) if placement.is_partial()]):
        local = _Sum.apply(local, group)
    return joined(local, mesh, [Replicate() if p.is_partial() else p for p in placements], shape)


def total(local: Tensor, mesh: DeviceMesh, over: Collection[int]) -> Tensor:
    """The sum over processes along some mesh dimensions, which they use for different parts of the result."""
    for group in groups_of(mesh, sorted(over)):
        local = _Share.apply(_Sum.apply(local, group), group)
    return local


# A value that differs between processes has a derivative that differs; one that they share has a derivative that they
# share. Between the two lie two linear maps, each the transpose of the other, so that any derivative is right.


class _Materialized(torch.autograd.Function):
    """The identity; a gradient of zeros without memory, as that of a sign, is given some: a DTensor of it crashes."""

    @staticmethod
    def forward(local: Tensor) -> Tensor:
        return _with_memory(local).view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Materialized.apply(gradients[0])


def _with_memory(local: Tensor) -> Tensor:
    without = not torch.compiler.is_dynamo_compiling() and local._is_zerotensor()  # a compiled graph has none of them
    return local.clone() if without else local


class _Sum(torch.autograd.Function):
    """The sum of what the processes have, which they share."""

    @staticmethod
    def forward(local: Tensor, group: ProcessGroup) -> Tensor:
        return wait(all_reduce(_with_memory(local).contiguous(), "sum", group), f"sum over {group.size()} processes")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Share.apply(gradients[0], ctx.group), None


class _Share(_Sum):
    """A value that the processes share, used by each in its own way."""

    @staticmethod
    def forward(local: Tensor, group: ProcessGroup) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Sum.apply(gradients[0], ctx.group), None


def of_channels(x: DTensor, vector: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """This process's part of a vector with an entry for each channel."""
    if vector is None:
        return None
    m = shards(x).get(1)
    placements = [Shard(0) if n == m else Replicate() for n in range(x.device_mesh.ndim)]
    return spread(vector, x.device_mesh, placements, set(shards(x).values())).reshape(shape)


# ---- ranges ----------------------------------------------------------------------------------------


def local_range(mesh: DeviceMesh, m: int, length: int) -> Range:
    """The positions of a dimension of this length that this process owns, along a mesh dimension."""
    return chunks(length, mesh.size(m))[mesh.get_local_rank(m)]


def needed(
    x: DTensor, local: Tensor, d: int, out: int, needs: Callable[[Range], Range], circular: bool = False
) -> tuple[Tensor, Range, Range]:
    """The positions of ``x`` along a dimension that this process's part of a result needs.

    Args:
        local: this process's part of ``x``, of which other dimensions may be extended already.
        out: how many positions the result has, which lies as ``x`` does.
        needs: which range of ``x`` a range of the result needs; beyond the ends: zeros, or if circular the other end.

    Returns:
        The local part with these positions, which of ``x`` they are, and of the result those of this process.
    """
    m, mesh = shards(x).get(d), x.device_mesh
    if m is None:
        return local, (0, x.shape[d]), (0, out)
    results = chunks(out, mesh.size(m))
    ranges = tuple(needs(r) if r[0] < r[1] else (0, 0) for r in results)
    rank = mesh.get_local_rank(m)
    route = _route(chunks(x.shape[d], mesh.size(m)), ranges, circular, rank)
    local = exchange(local, d, route, mesh.get_group(m))
    if any(route.zeros):
        local = pad(local, [*[0, 0] * (local.dim() - 1 - d), *route.zeros])
    return local, ranges[rank], results[rank]


@torch.compiler.assume_constant_result
def _route(have: tuple[Range, ...], want: tuple[Range, ...], circular: bool, rank: int) -> Route:
    """Return the route between ranges; the compiler computes it once and does not trace it."""
    return Exchange(have, want, circular).route(rank)


def take(x: DTensor, local: Tensor, d: int, out: int, positions: Callable[[Range], list[int]]) -> Tensor:
    """This process's part of a result whose range r along a dimension consists of the ``positions(r)`` of ``x``."""

    def ends(result: Range) -> Range:
        found = positions(result)
        return min(found), max(found) + 1

    local, (start, stop), result = needed(x, local, d, out, ends)
    own = positions(result)
    if own == list(range(start, stop)):
        return local
    return local.index_select(d, torch.tensor([p - start for p in own], dtype=torch.long, device=local.device))
