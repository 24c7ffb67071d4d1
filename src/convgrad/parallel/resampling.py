"""Interpolation over shards: each position of the result is a weighted sum of a few positions of the input.

Where the result is a whole number of times finer, PyTorch's own kernel runs on the shard and a halo, and what it
computes of the halo is cut off. Otherwise the sums are written out, one dimension at a time, with PyTorch's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ..errors import UnsupportedError
from .geometry import Range
from .placed import joined_like, local_of, meta_of, needed, on_some, widened
from .pooling import adaptive_pool


def interpolate(
    func: Callable[..., Any], x: DTensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> DTensor:  # fmt: skip
    """`torch.nn.functional.interpolate`."""
    if antialias:
        raise UnsupportedError("interpolation with antialias has no rule for shards")
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners}
    shape = func(meta_of(x), size, scale_factor, recompute_scale_factor=recompute_scale_factor, **options).shape
    if mode == "area":
        return adaptive_pool(getattr(functional, f"adaptive_avg_pool{x.dim() - 2}d"), x, shape[2:])
    given = scale_factor if isinstance(scale_factor, (list, tuple)) else [scale_factor] * (x.dim() - 2)
    scales = [None] * len(given) if recompute_scale_factor else given
    local = local_of(x)
    taps = 4 if mode == "bicubic" else 1 if mode.startswith("nearest") else 2
    factors = [shape[d] // x.shape[d] for d in range(2, x.dim())]
    multiples = zip(factors, scales, x.shape[2:], shape[2:], strict=True)
    if not align_corners and all(f * n == o and scale in (None, f) for f, scale, n, o in multiples):
        cuts = []
        for d, f in enumerate(factors, 2):

            def around(r: Range, f: int = f, n: int = x.shape[d]) -> Range:
                return max(r[0] // f - taps // 2, 0), min(-(-r[1] // f) + taps // 2, n)

            local, (start, _), (a, b) = needed(x, local, d, shape[d], around)
            cuts.append((d, a - start * f if a < b else 0, b - a))
        local = on_some(lambda t: func(t, [f * n for f, n in zip(factors, t.shape[2:], strict=True)], **options), local)
        for d, a, length in cuts:
            local = local.narrow(d, a, length)
        return joined_like(x, local, shape)
    if taps > 1 and not x.is_floating_point():
        raise UnsupportedError(f"{mode} interpolation of {x.dtype} to any size has no rule for shards")
    sums = []
    for d, scale in enumerate(scales, 2):
        positions, weights = _made_of(x, d, taps, shape[d], scale, options)
        local, (start, _), (a, b) = needed(x, local, d, shape[d], partial(_ends, positions.cpu()))
        sums.append((positions[:, a:b] - start, weights[:, a:b]))
    result = widened(local)
    for d, (positions, weights) in enumerate(sums, 2):
        rows = [result.index_select(d, p) for p in positions]
        by_row = weights.to(result.dtype).view(taps, -1, *[1] * (x.dim() - 1 - d))
        result = rows[0] if taps == 1 else torch.stack([row * w for row, w in zip(rows, by_row, strict=True)]).sum(0)
    return joined_like(x, result.to(x.dtype), shape)


def _ends(positions: Tensor, result: Range) -> Range:
    part = positions[:, slice(*result)]
    return int(part.min()), int(part.max()) + 1


def _made_of(
    x: DTensor, d: int, taps: int, out: int, scale: float | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the input positions that each position of the result reads, and their weights: [taps, out] each.

    Both are read off what PyTorch makes of combs whose teeth are ``taps`` apart, so that one tooth of each counts: of
    height 1 it gives the weight; of the height of its position, that times the position.
    """
    at = torch.arange(x.shape[d], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    combs = torch.stack([(at % taps == j).to(at.dtype) for j in range(taps)])
    shape = [1 if i != d else len(at) for i in range(2, x.dim())]
    goal = {"size": [1 if i != d else out for i in range(2, x.dim())]}
    if scale is not None:
        goal = {"scale_factor": [1.0 if i != d else scale for i in range(2, x.dim())]}
    made = functional.interpolate(torch.cat([combs, combs * at]).view(1, -1, *shape), **goal, **options)
    weights, moments = made.view(2, taps, out)
    positions = (moments / weights).round()
    heaviest = positions.gather(0, weights.abs().argmax(0, keepdim=True))
    without = weights.abs() < 16 * torch.finfo(at.dtype).eps  # their place does not matter
    return torch.where(without, heaviest + 1, positions).clamp(0, len(at) - 1).long(), weights
