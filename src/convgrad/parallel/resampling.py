"""Interpolation over shards: each position of the result is a weighted sum of a few positions of the input.

Where the result is a whole number of times finer, PyTorch's own kernel runs on the shard and a halo, and what it
computes of the halo is cut off. Otherwise the positions and their weights are written out, one dimension at a time, by
the formulas of ATen/native/UpSample.h.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedError
from .geometry import chunks
from .placed import fetch, joined, local_of, meta_of, mine, on_some, shards
from .pooling import adaptive_avg_pool

#: How many positions of the input a position of the result is made of, to the left of the one it lies at, and in all.
_REACH = {"nearest": (0, 1), "nearest-exact": (0, 1), "linear": (0, 2), "cubic": (1, 4)}


def interpolate(
    func: Callable[..., Any],
    x: DTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> DTensor:
    """`torch.nn.functional.interpolate`."""
    if antialias:
        raise UnsupportedError("interpolation with antialias has no rule for shards")
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners}
    shape = func(meta_of(x), size, scale_factor, recompute_scale_factor=recompute_scale_factor, **options).shape
    if mode == "area":
        return adaptive_avg_pool(getattr(torch.nn.functional, f"adaptive_avg_pool{x.dim() - 2}d"), x, shape[2:])
    given = scale_factor if isinstance(scale_factor, (list, tuple)) else [scale_factor] * (x.dim() - 2)
    local, mesh, own = local_of(x), x.device_mesh, shards(x)
    spatial = {d: m for d, m in own.items() if d > 1}
    kind = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    # Where one of these factors comes out, PyTorch's kernels ignore a scale that is not quite it.
    wholes = {"linear": (1,), "nearest": (1, 2) if x.dim() == 4 and x.is_cpu else ()}.get(kind, ())
    scales = [
        None if recompute_scale_factor or any(o == f * n for f in wholes) else s
        for s, n, o in zip(given, x.shape[2:], shape[2:], strict=True)
    ]
    factors = [shape[d] // x.shape[d] for d in range(2, x.dim())]
    multiples = zip(factors, scales, x.shape[2:], shape[2:], strict=True)
    if not align_corners and all(f * n == o and scale in (None, f) for f, scale, n, o in multiples):
        cuts = []
        for d, m in spatial.items():
            f, n, reach = factors[d - 2], x.shape[d], _REACH[kind][1] // 2
            ranges = [
                (max(a // f - reach, 0), min(-(-b // f) + reach, n)) if a < b else (0, 0)
                for a, b in chunks(shape[d], mesh.size(m))
            ]
            local = fetch(local, d, mesh, m, n, ranges)
            start, (a, b) = mine(mesh, m, ranges)[0], mine(mesh, m, chunks(shape[d], mesh.size(m)))
            cuts.append((d, a - start * f if a < b else 0, b - a))
        local = on_some(lambda t: func(t, [f * n for f, n in zip(factors, t.shape[2:], strict=True)], **options), local)
        for d, a, length in cuts:
            local = local.narrow(d, a, length)
        return joined(local, mesh, x.placements, shape)
    for d in range(2, x.dim()):
        n, out, m = x.shape[d], shape[d], spatial.get(d)
        places = partial(_places, kind, n, out, bool(align_corners), scales[d - 2], x.dtype)
        ranges = chunks(out, 1 if m is None else mesh.size(m))
        found = [places(a, b) for a, b in ranges]
        positions, weights = found[0] if m is None else mine(mesh, m, found)
        start = 0
        if m is not None:
            needed = [(int(p.min()), int(p.max()) + 1) if p.numel() else (0, 0) for p, _ in found]
            local, start = fetch(local, d, mesh, m, n, needed), mine(mesh, m, needed)[0]
        local = _weighted(local, d, positions - start, weights)
    return joined(local, mesh, x.placements, shape)


def _weighted(local: Tensor, d: int, positions: Tensor, weights: Tensor) -> Tensor:
    """The sum of what lies at each row of positions, times its weights."""
    positions, weights = positions.to(local.device), weights.to(local.device)
    if len(positions) == 1:
        return local.index_select(d, positions[0])
    shape = [-1, *[1] * (local.dim() - 1 - d)]
    rows = [local.index_select(d, p) * w.view(shape) for p, w in zip(positions, weights, strict=True)]
    return torch.stack(rows).sum(0)


def _places(
    kind: str, n: int, out: int, align: bool, scale: float | None, dtype: torch.dtype, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """For ``start`` to ``stop`` of the result: the positions of the input that it is made of, and their weights.

    Returns:
        Two tensors of size [positions a result is made of, stop - start].
    """
    real = torch.float64 if dtype == torch.float64 else torch.float32
    if kind.startswith("nearest"):
        real = torch.float32  # whatever the dtype, as in PyTorch's kernels
    o = torch.arange(start, stop, dtype=real)
    if align:
        source = o * torch.tensor((n - 1) / (out - 1) if out > 1 else 0.0, dtype=real)
    else:
        step = torch.tensor(1 / scale if scale else n / out, dtype=real)
        half = 0.0 if kind == "nearest" else 0.5
        source = (o + half) * step - (half if kind in ("linear", "cubic") else 0.0)
        if kind == "linear":
            source = source.clamp_min(0)
    before, taps = _REACH[kind]
    base = source.floor().clamp_max(n - 1) if kind != "cubic" else source.floor()
    t = source - base
    positions = torch.stack([(base.long() - before + i).clamp(0, n - 1) for i in range(taps)])
    if taps == 1:
        return positions, torch.ones_like(t)[None]
    if taps == 2:
        t = t.clamp(0, 1)
        return positions, torch.stack([1 - t, t]).to(dtype)
    return positions, torch.stack([_far(t + 1), _near(t), _near(1 - t), _far(2 - t)]).to(dtype)


def _near(t: Tensor, a: float = -0.75) -> Tensor:
    """Keys' cubic kernel within one position ("Cubic convolution interpolation", 1981, equation 15)."""
    return ((a + 2) * t - (a + 3)) * t * t + 1


def _far(t: Tensor, a: float = -0.75) -> Tensor:
    """The same, between one and two positions away."""
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
