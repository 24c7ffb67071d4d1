"""Normalization over shards: the mean and the variance of the whole, of any number of uneven shards.

Each process takes the mean and the variance of its part; two small all-reduces make those of the whole of them, by the
parallel variance of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample
variances", 1979, section 2), which never subtracts two large numbers as a sum of squares would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import UnsupportedError
from .placed import joined, joined_like, local_of, meta_of, of_channels, on_some, shards, spread, total, widened
from .redistribution import redistribute

Function = Callable[..., Any]


def batch_norm(
    func: Function, x: DTensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5, first: int = 0,
) -> DTensor:  # fmt: skip
    """`torch.nn.functional.batch_norm`: the statistics of all shards, from dimension ``first`` on, without channels."""
    vectors = running_mean, running_var, weight, bias
    metas = [v if v is None else meta_of(v) for v in vectors]
    func(meta_of(x), *metas, training, momentum, eps)  # with PyTorch's own checks
    shape, local = [1, -1, *[1] * (x.dim() - 2)], widened(local_of(x))
    if training:
        dims = [d for d in range(first, x.dim()) if d != 1]
        mean, var = _statistics(x, local, dims, 1, dims)
        count = prod([x.shape[d] for d in dims])
        with torch.no_grad():
            for kept, seen in ((running_mean, mean), (running_var, var * (count / (count - 1)))):
                if kept is not None:
                    kept.lerp_(_whole(x, seen, dims).to(kept.dtype), momentum)
    else:  # not by PyTorch's function, which fails on a shard without channels
        given: Any = [of_channels(x, v, shape) for v in vectors[:2]]
        mean, var = given
    return _like(x, _applied(local, mean, var + eps, *(of_channels(x, v, shape) for v in (weight, bias))))


def instance_norm(func: Function, x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """`torch.nn.functional.instance_norm`: the statistics of each sample and channel."""
    if len(args) < 5:
        kwargs["training"] = kwargs.pop("use_input_stats", True)
    return batch_norm(func, x, *args, **kwargs, first=2)


def group_norm(
    func: Function, x: DTensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> DTensor:  # fmt: skip
    """`torch.nn.functional.group_norm`: the statistics of each sample and group of channels."""
    func(meta_of(x), num_groups)  # with PyTorch's own checks
    local, width = widened(local_of(x)), x.shape[1] // num_groups
    m = shards(x).get(1)
    if m is not None and -(-x.shape[1] // x.device_mesh.size(m)) % width:
        raise UnsupportedError(f"a shard of the {x.shape[1]} channels would end inside one of the {num_groups} groups")
    grouped = local.reshape(local.shape[0], local.shape[1] // width, width, *local.shape[2:])
    mean, var = _statistics(x, grouped, list(range(2, grouped.dim())), width, list(range(2, x.dim())))
    shape = [1, -1, width, *[1] * (x.dim() - 2)]
    result = _applied(grouped, mean, var + eps, *(of_channels(x, v, shape) for v in (weight, bias)))
    return _like(x, result.reshape(local.shape))


def layer_norm(
    func: Function, x: DTensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> DTensor:  # fmt: skip
    """`torch.nn.functional.layer_norm`: the statistics of the last dimensions."""
    func(meta_of(x), normalized_shape)
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    local = widened(local_of(x))
    mean, var = _statistics(x, local, dims, 1, dims)
    return _by_position(x, _applied(local, mean, var + eps), dims, weight, bias)


def rms_norm(
    func: Function, x: DTensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> DTensor:
    """`torch.nn.functional.rms_norm`: the mean square of the last dimensions."""
    func(meta_of(x), normalized_shape)
    dims = list(range(x.dim() - len(normalized_shape), x.dim()))
    local = widened(local_of(x))
    over = {m for d, m in shards(x).items() if d in dims}
    square = total(local.square().sum(dims, keepdim=True), x.device_mesh, over) / prod(normalized_shape)
    eps = torch.finfo(local.dtype).eps if eps is None else eps  # as PyTorch: of the dtype that it computes in
    return _by_position(x, local * torch.rsqrt(square + eps), dims, weight, None)


def local_response_norm(func: Function, x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """`torch.nn.functional.local_response_norm`: over neighboring channels."""
    if 1 in shards(x):
        raise UnsupportedError("local_response_norm works along dimension 1, which is sharded")
    return _like(x, on_some(lambda t: func(t, *args, **kwargs), local_of(x)))


def _statistics(x: DTensor, local: Tensor, dims: list[int], width: int, whole: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over ``dims`` of the local part: ``whole`` dimensions of ``x``, ``width`` channels."""
    over = {m for d, m in shards(x).items() if d in whole}
    count = width * prod([x.shape[d] for d in whole])
    own = prod([local.shape[d] for d in dims])
    if local.numel():
        var, mean = torch.var_mean(local, dims, correction=0, keepdim=True)
    else:  # a part of the graph all the same: backwards, every process takes part in each collective
        var = mean = local.sum(dims, keepdim=True)
    if not over:
        return mean, var
    center = total(mean * (own / count), x.device_mesh, over)
    return center, total((var + (mean - center).square()) * (own / count), x.device_mesh, over)


def _applied(x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(var) * weight + bias, in one pass over x, which alone autograd saves."""
    scale = var.rsqrt() if weight is None else var.rsqrt() * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return torch.addcmul(shift, x, scale)


def _by_position(x: DTensor, local: Tensor, dims: list[int], weight: Tensor | None, bias: Tensor | None) -> DTensor:
    """Return the input times a weight, plus a bias, for each position of the last dimensions."""
    placements: list[Placement] = [
        Shard(p.dim - dims[0]) if isinstance(p, Shard) and p.dim in dims else Replicate() for p in x.placements
    ]
    weight, bias = (
        v if v is None else spread(v, x.device_mesh, placements, set(shards(x).values())) for v in (weight, bias)
    )
    local = local if weight is None else local * weight
    return _like(x, local if bias is None else local + bias)


def _whole(x: DTensor, statistic: Tensor, dims: list[int]) -> Tensor:
    """Return a statistic of all channels from this process's, averaged over the samples."""
    mesh, own = x.device_mesh, shards(x)
    part = statistic.reshape(statistic.shape[:2])
    mean = part.mean(0)
    if 0 in own and 0 not in dims:
        mean = total(part.sum(0), mesh, {own[0]}) / x.shape[0]
    if 1 not in own:
        return mean
    places = [Shard(0) if n == own[1] else Replicate() for n in range(mesh.ndim)]
    everywhere = [Replicate()] * mesh.ndim
    return redistribute(joined(mean, mesh, places, x.shape[1:2]), everywhere, "running statistics").to_local()


def _like(x: DTensor, local: Tensor) -> DTensor:
    return joined_like(x, local.to(x.dtype))
