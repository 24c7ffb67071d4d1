"""Pooling over shards: each process computes the windows of its part of the result, from a halo of the input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from .geometry import Line, Range, clipped
from .placed import joined_like, local_of, local_range, meta_of, needed, on_some, reduced, shards, widened

Function = Callable[..., Any]
Size = int | Sequence[int]


def max_pool(
    func: Function, x: DTensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0, dilation: Size = 1,
    ceil_mode: bool = False, return_indices: bool = False,  # with indices it is another function, which has no rule
) -> DTensor:  # fmt: skip
    """`torch.nn.functional.max_pool2d` and its likes; outside of the input there is nothing, or less than anything."""
    shape, d = func(meta_of(x), kernel_size, stride, padding, dilation, ceil_mode).shape, _spatial(func)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    kernel, steps, pads, gaps = (_each(v, d) for v in (kernel_size, stride or kernel_size, padding, dilation))
    result, _ = windowed(x, shape, lambda t: func(t, kernel, steps, 0, gaps), kernel, steps, pads, gaps, lowest)
    return joined_like(x, result, shape)


def avg_pool(
    func: Function, x: DTensor, kernel_size: Size, stride: Size | None = None, padding: Size = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> DTensor:  # fmt: skip
    """`torch.nn.functional.avg_pool2d` and its likes: a sum over each window, divided by what PyTorch counts in it."""
    shape, d = func(meta_of(x), kernel_size, stride, padding, ceil_mode, count_include_pad).shape, _spatial(func)
    kernel, steps, pads = (_each(v, d) for v in (kernel_size, stride or kernel_size, padding))
    values, own = windowed(x, shape, lambda t: func(t, kernel, steps), kernel, steps, pads, [1] * d)
    if divisor_override:
        return joined_like(x, values * (prod(kernel) / divisor_override), shape)
    for n, (k, s, p) in enumerate(zip(kernel, steps, pads, strict=True)):
        size, beyond = x.shape[x.dim() - d + n], p if count_include_pad else 0
        counts = [min(o * s - p + k, size + beyond) - max(o * s - p, -beyond) for o in range(*own[n])]
        if any(c != k for c in counts):
            ratio = torch.tensor([k / c for c in counts], dtype=x.dtype, device=values.device)
            values = values * ratio.view(-1, *[1] * (d - 1 - n))
    return joined_like(x, values, shape)


def windowed(
    x: DTensor, shape: Sequence[int], pool: Callable[[Tensor], Tensor], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], outside: float = 0.0, circular: bool = False,
) -> tuple[Tensor, list[Range]]:  # fmt: skip
    """Return the results of this process's windows, from the padded input that they read, and the windows."""
    local = local_of(x)
    pads, around, outputs = [], [], []
    for n, (k, s, p, dil) in enumerate(zip(kernel, stride, padding, dilation, strict=True)):
        d = x.dim() - len(kernel) + n
        line = Line(x.shape[d], shape[d], k, s, p, dil)
        local, inputs, output = needed(x, local, d, shape[d], line.reads if circular else line.inputs_of, circular)
        # Without a window of its own, a process computes one of nothing: its graph is the same as the others'.
        sides = line.local(inputs, output) if output[0] < output[1] else (0, dil * (k - 1) + 1)
        own_end = circular and d not in shards(x)
        pads, around = [*((0, 0) if own_end else sides), *pads], [*(sides if own_end else (0, 0)), *around]
        outputs.append(output)
    if any(around):
        local = on_some(lambda t: F.pad(t, around, "circular"), local)
    result = on_some(pool, F.pad(local, pads, value=outside) if any(pads) else local)
    for n, (start, stop) in enumerate(outputs):
        result = result.narrow(n - len(outputs), 0, stop - start)
    return result, outputs


# ---- adaptive ----------------------------------------------------------------------------------------


def adaptive_pool(func: Function, x: DTensor, output_size: Any, return_indices: bool = False) -> DTensor:
    """`torch.nn.functional.adaptive_avg_pool2d`, `adaptive_max_pool2d` and their likes.

    One dimension after the other, the last one first, so that equal maxima are found in PyTorch's order.

    A sharded dimension of fewer results than processes is reduced in every process and then over them, and not sharded
    any more; otherwise a process gets what the windows of its results lack.
    """
    shape, reduce = func(meta_of(x), output_size).shape, _mean if "avg" in func.__name__ else _max
    mesh, placements, local = x.device_mesh, list(x.placements), widened(local_of(x))
    for d in reversed(range(x.dim() - _spatial(func), x.dim())):
        n, out, m = x.shape[d], shape[d], shards(x).get(d)
        bins = [(o * n // out, -(-(o + 1) * n // out)) for o in range(out)]
        over = None if m is None or out >= max(mesh.size(m), 2) else m  # one result is whole in one process, too
        if over is not None:
            own = local_range(mesh, over, n)
        else:
            local, own, (a, b) = needed(x, local, d, out, lambda o, bins=bins: (bins[o[0]][0], bins[o[1] - 1][1]))
            bins = bins[a:b]
        parts = [local.narrow(d, start, stop - start) for start, stop in (clipped(*own, b) for b in bins)]
        local = reduce(parts, d, bins) if parts else local.narrow(d, 0, 0)
        if over is not None:
            if reduce is _mean:  # sums are added later, together
                placements[over] = Partial()
                continue
            before, after = mesh.get_local_rank(over), mesh.size(over) - 1 - mesh.get_local_rank(over)
            each = F.pad(local.unsqueeze(0), [*[0, 0] * local.dim(), before, after])
            sums = [Partial() if i == over else Replicate() for i in range(mesh.ndim)]
            local, placements[over] = local_of(reduced(each, mesh, sums, each.shape)).max(0).values, Replicate()
    return reduced(local.to(x.dtype), mesh, placements, shape)


def _mean(parts: list[Tensor], d: int, bins: list[tuple[int, int]]) -> Tensor:
    """Return the sum of each part, divided by the length of its window."""
    return torch.stack([part.sum(d) / (b - a) for part, (a, b) in zip(parts, bins, strict=True)], d)


def _max(parts: list[Tensor], d: int, bins: list[tuple[int, int]]) -> Tensor:
    """Return the maximum of each part; minus infinity, as part of the graph, of an empty one."""
    return torch.stack([p.max(d).values if p.shape[d] else p.sum(d) - torch.inf for p in parts], d)


def _spatial(func: Function) -> int:
    """Return the number of dimensions that a function such as ``max_pool2d`` pools over."""
    return int(func.__name__[-2])


def _each(value: Size, d: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * d if len(values) == 1 else values
