"""Losses over shards: the sum of each shard, the sum of these, and the divisor of the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import _reduction

from ..errors import UnsupportedError
from .elementwise import by_elements, summed
from .placed import joined, local_of, reduced, shards, spread, total


def each_element(func: Callable[..., Any], *args: Any, **kwargs: Any) -> DTensor:
    """A loss with a value for each element, such as ``mse_loss``."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    reduction = _reduction_of(given)
    variance = given.get("var")  # of the Gaussian's: it may be one for each row
    if isinstance(variance, Tensor) and variance.dim() == given["input"].dim() - 1:
        given["var"] = variance.unsqueeze(-1)
    losses = by_elements(func, **given, reduction="none")
    if reduction == "none":
        return losses
    weight = given.get("weight") if func.__name__ in _WEIGHTED_MEAN else None
    if reduction == "sum" or weight is None:
        return _over_all(losses, 1 if reduction == "sum" else losses.numel())
    weights = summed(torch.sum, weight) if isinstance(weight, DTensor) else weight.sum()
    return by_elements(torch.div, _over_all(losses, 1), weights)


#: Of these a weighted mean is divided by the sum of the weights, of the others by the number of elements.
_WEIGHTED_MEAN = ("mse_loss", "l1_loss")


def _reduction_of(given: dict[str, Any]) -> str:
    """Takes the reduction out of the arguments, in PyTorch's older words too, and refuses one that is none."""
    older = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if older != (None, None):
        return _reduction.legacy_get_string(*older)
    return ("none", "mean", "sum")[_reduction.get_enum(reduction)]


def _over_all(losses: DTensor, divisor: Any) -> DTensor:
    mesh = losses.device_mesh
    sums: list[Placement] = [p if p.is_replicate() else Partial() for p in losses.placements]
    total = local_of(losses).sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return reduced((total / divisor).to(losses.dtype), mesh, sums, ())


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
    reduction = _reduction_of(kwargs)
    local = func(local_of(input), goal, weight, reduction="none", **kwargs)
    losses = joined(local, mesh, places, [*input.shape[:1], *input.shape[2:]])
    if reduction != "mean":
        return losses if reduction == "none" else _over_all(losses, 1)
    if not by_class:
        return _over_all(losses, losses.numel())
    counted = goal != kwargs.get("ignore_index", -100)
    parts = counted.to(local.dtype) if weight is None else weight[goal.where(counted, 0)] * counted
    return _over_all(losses, total(parts.sum(), mesh, used))
