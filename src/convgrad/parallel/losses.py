"""Losses over shards: the sum of each shard, the sum of these, and the divisor of the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..errors import UnsupportedError
from .elementwise import by_elements
from .placed import joined, local_of, reduced, shards, spread, total


def each_element(func: Callable[..., Any], *args: Any, **kwargs: Any) -> DTensor:
    """A loss with a value for each element, such as ``mse_loss``."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    reduction = given.pop("reduction", "mean")
    losses = by_elements(func, **given, reduction="none")
    return losses if reduction == "none" else _over_all(losses, 1 if reduction == "sum" else losses.numel())


def _over_all(losses: DTensor, divisor: Any) -> DTensor:
    mesh = losses.device_mesh
    sums: list[Placement] = [p if p.is_replicate() else Partial() for p in losses.placements]
    return reduced(local_of(losses).sum() / divisor, mesh, sums, ())


def classified(
    func: Callable[..., Any], input: DTensor, target: Tensor, weight: Tensor | None = None, **kwargs: Any
) -> DTensor:
    """`torch.nn.functional.cross_entropy` and ``nll_loss``: the classes are dimension 1."""
    mesh, own = input.device_mesh, shards(input)
    if 1 in own:
        raise UnsupportedError(f"{func.__name__} over classes that are sharded")
    used, by_class = set(own.values()), target.dim() < input.dim()
    places: list[Placement] = [Shard(p.dim - (p.dim > 1)) if isinstance(p, Shard) else p for p in input.placements]
    goal = spread(target, mesh, places if by_class else input.placements, used)
    weight = None if weight is None else spread(weight, mesh, [Replicate()] * mesh.ndim, used)
    reduction = kwargs.pop("reduction", "mean")
    local = func(local_of(input), goal, weight, reduction="none", **kwargs)
    losses = joined(local, mesh, places, [*input.shape[:1], *input.shape[2:]])
    if reduction != "mean":
        return losses if reduction == "none" else _over_all(losses, 1)
    if not by_class:
        return _over_all(losses, losses.numel())
    counted = goal != kwargs.get("ignore_index", -100)
    parts = counted.to(local.dtype) if weight is None else weight[goal.where(counted, 0)] * counted
    return _over_all(losses, total(parts.sum(), mesh, used))
