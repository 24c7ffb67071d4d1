"""Redistribution of a DTensor: what its own does, with the fewest bytes, and an error that names the collective.

Where DTensor's own way sends more than it must, another one is taken. On CPUs DTensor gathers the whole to shard
another dimension, and gloo computes a reduce-scatter as an all-reduce, so that both are an all-to-all here. A sum over
several dimensions of a mesh is one all-reduce where these are all processes, which receives $2(P-1)/P$ of a tensor in
place of $2(P_1-1)/P_1 + 2(P_2-1)/P_2$.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._compat import all_to_all, named, wait
from ..errors import DtypeError
from .geometry import chunks
from .sharding import Step, steps


def redistribute(x: DTensor, placements: Sequence[Placement], what: str) -> DTensor:
    """Return a tensor in other placements, as `DTensor.redistribute`; its gradient comes back in the old ones.

    In a `CollectiveError`, ``what`` is its name.
    """
    return _Redistribute.apply(x, tuple(placements), what)


class _Redistribute(torch.autograd.Function):
    """A redistribution and its derivative; partial gradients of the processes are summed.

    DTensor's own has a wrong third derivative ("triple backward is not yet supported").
    """

    @staticmethod
    def forward(x: DTensor, placements: tuple[Placement, ...], what: str) -> DTensor:
        if torch.compiler.is_dynamo_compiling():
            return x.redistribute(placements=placements)
        local = local_as(x, placements, what)
        return DTensor.from_local(local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, _, what = inputs
        ctx.placements = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        ctx.what = what if what.startswith("gradient of ") else f"gradient of {what}"

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return redistribute(gradients[0], ctx.placements, ctx.what), None, None


def local_as(x: DTensor, placements: Sequence[Placement], what: str) -> Tensor:
    """Return this process's part of a tensor in other placements; not differentiable."""
    # DTensor of PyTorch 2.11 cannot redistribute what requires a gradient where none is recorded.
    x = x.detach()  # pyright: ignore[reportAssignmentType]
    mesh, shape, now = x.device_mesh, x.shape, x.placements
    local = x.to_local()
    if not (_plain(now) and _plain(placements)):
        with named(said := f"redistribution of {what}"):
            return wait(x.redistribute(placements=placements).to_local(), said)
    for step in steps(tuple(shape), x.dtype.itemsize, tuple(mesh.shape), now, tuple(placements)):
        over = zip(names_of(mesh, step.over), step.over, strict=True)
        processes = (f"mesh dimension {name} ({mesh.size(m)} processes)" for name, m in over)
        said = f"{step.name} of {what} over {' and '.join(processes)}"
        after = tuple(step.want if m in step.over else p for m, p in enumerate(now))
        if step.name == "all-reduce":
            for group in groups_of(mesh, step.over):
                local = wait(all_reduce(local.contiguous(), "sum", group), said)
        elif step.name in ("all-to-all", "reduce-scatter"):
            local = _shared_out(local, mesh, step, shape, said)
        else:
            part = DTensor.from_local(local, mesh, now, run_check=False, shape=shape, stride=x.stride())
            with named(said):
                local = wait(part.redistribute(placements=after).to_local(), said)
        now = after
    return local


def _plain(placements: Sequence[Placement]) -> bool:
    """Whether there are only sums, replicas and shards, of a different dimension each."""
    dims = [p.dim for p in placements if type(p) is Shard]
    others = [p for p in placements if type(p) is not Shard]
    return len(set(dims)) == len(dims) and all(p.is_replicate() or p == Partial() for p in others)


def mesh_of(name: str, tensors: dict[Any, Tensor | None]) -> DeviceMesh:
    """Return the mesh of these tensors; raise an error for a plain tensor or several meshes."""
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


def names_of(mesh: DeviceMesh, over: Sequence[int]) -> tuple[str, ...]:
    """The names, or the numbers, of some dimensions of a mesh."""
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return tuple(str(names[m]) for m in over)


def groups_of(mesh: DeviceMesh, over: Sequence[int]) -> list[ProcessGroup]:
    """The groups over which sums, one after another, are the sum over some dimensions of a mesh."""
    everyone = None if torch.compiler.is_dynamo_compiling() else dist.group.WORLD  # which it does not trace
    if len(over) > 1 and everyone is not None and prod([mesh.size(m) for m in over]) == everyone.size():
        return [everyone]
    return [mesh.get_group(m) for m in over]


def _shared_out(local: Tensor, mesh: DeviceMesh, step: Step, shape: Sequence[int], what: str) -> Tensor:
    """Return this process's range of another dimension, from all processes, joined or summed: an all-to-all."""
    m, have, want = step.over[0], step.have, step.want
    assert isinstance(want, Shard)
    group, parts, rank = mesh.get_group(m), mesh.size(m), mesh.get_local_rank(m)
    pieces = [local.narrow(want.dim, start, stop - start) for start, stop in chunks(shape[want.dim], parts)]
    sizes = [list(pieces[rank].shape) for _ in range(parts)]
    if isinstance(have, Shard):
        for size, (start, stop) in zip(sizes, chunks(shape[have.dim], parts), strict=True):
            size[have.dim] = stop - start
    rows = torch.cat([piece.reshape(-1) for piece in pieces])
    arrived = all_to_all(rows, [*map(prod, sizes)], [piece.numel() for piece in pieces], group, what)
    if not isinstance(have, Shard):
        return arrived.view(parts, *sizes[rank]).sum(0, dtype=local.dtype)
    found = zip(arrived.split([prod(size) for size in sizes]), sizes, strict=True)
    return torch.cat([part.view(size) for part, size in found], have.dim)
