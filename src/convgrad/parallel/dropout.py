"""Dropout over shards: whether an element is kept is a function of one number and of its place in the whole.

So the mask is the same for every mesh, and the same in processes that hold copies of one shard. It is not the one that
PyTorch draws in a single process: that is a sequence, of which no process could tell its part without drawing the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .placed import joined_like, local_of, local_range, shards

_ALPHA = -1.7580993408473766  # -scale * alpha of SELU: what alpha dropout puts in place of an element


def dropout(func: Callable[..., Any], x: DTensor, p: float = 0.5, training: bool = True) -> DTensor:
    """`torch.nn.functional.dropout`, and of whole channels ``dropout1d`` to ``dropout3d``."""
    if not training or not p:
        return x
    unbatched = x.dim() < {"dropout1d": 3, "dropout3d": 5}.get(func.__name__, 0)  # PyTorch's rule; 2-d has none
    keep = _mask(x, p, x.dim() if func.__name__ == "dropout" else 2 - unbatched).to(x.dtype)
    return joined_like(x, local_of(x) * (keep / (1 - p) if p < 1 else keep))


def alpha_dropout(func: Callable[..., Any], x: DTensor, p: float = 0.5, training: bool = False) -> DTensor:
    """`torch.nn.functional.alpha_dropout`, and of whole channels ``feature_alpha_dropout``."""
    if not training or p == 0:
        return x
    keep = _mask(x, p, x.dim() if func.__name__ == "alpha_dropout" else 2)
    scale = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5 if p < 1 else 0.0
    local = torch.where(keep, local_of(x), _ALPHA) * scale - scale * p * _ALPHA
    return joined_like(x, local.to(x.dtype))


def _mask(x: DTensor, p: float, dims: int) -> Tensor:
    """Return the mask of the local part: one draw for each position of the first ``dims`` dimensions."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    own, mesh = shards(x), x.device_mesh
    place = torch.randint(1 << 62, (), device="cpu").to(x.device)  # equal in processes with one seed
    for d in range(dims):
        start, stop = local_range(mesh, own[d], x.shape[d]) if d in own else (0, x.shape[d])
        place = place.unsqueeze(-1) * x.shape[d] + torch.arange(start, stop, device=x.device)
    draw = _mixed(place.reshape(*place.shape, *[1] * (x.dim() - dims)))
    return (draw & (1 << 53) - 1) >= int(p * (1 << 53))


def _mixed(z: Tensor) -> Tensor:
    """Steele, Lea and Flood's splitmix64 ("Fast splittable pseudorandom number generators", 2014, figure 16)."""
    z = z * -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << 64 - bits) - 1)
