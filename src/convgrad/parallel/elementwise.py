"""Rules for functions of each element, or along dimensions that are not sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..errors import UnsupportedError
from .geometry import Range, clipped
from .placed import joined, joined_like, local_of, local_range, meta_of, needed, on_some, reduced, shards, spread, take

Function = Callable[..., Any]


def of_replicas(func: Function, *args: Any, **kwargs: Any) -> Any:
    """The rule of any function of replicated tensors: each process computes the whole."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor)]
    mesh, placements = tensors[0].device_mesh, tensors[0].placements
    args, kwargs = tree_map_only(DTensor, local_of, (args, kwargs))
    return tree_map_only(Tensor, lambda t: joined(t, mesh, placements, t.shape), func(*args, **kwargs))


def by_elements(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Each element of the result depends on the elements at the same place of the operands, which may be broadcast."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    mesh, placements, used = _common(tensors, len(shape))

    def local(t: Tensor) -> Tensor:
        if t.dim() == 0 and not isinstance(t, DTensor) and not t.requires_grad:
            return t
        missing = len(shape) - t.dim()
        own: list[Placement] = [
            Shard(p.dim - missing)
            if isinstance(p, Shard) and p.dim >= missing and t.shape[p.dim - missing] == shape[p.dim]
            else Replicate()
            for p in placements
        ]
        return spread(t, mesh, own, used)

    args, kwargs = tree_map_only(Tensor, local, (args, kwargs))
    return joined(func(*args, **kwargs), mesh, placements, shape)


def _common(tensors: Sequence[Tensor], ndim: int) -> tuple[DeviceMesh, list[Placement], set[int]]:
    """Return the placements of an elementwise function's result: those of the sharded operands."""
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for t in tensors:
        for dim, m in shards(t).items() if isinstance(t, DTensor) else ():
            here = Shard(dim + ndim - t.dim())
            if placements[m] not in (here, Replicate()):
                raise UnsupportedError(
                    f"operands are sharded along dimensions {placements[m]} and {here} of the result"
                )
            placements[m] = here
    used = {m for m, p in enumerate(placements) if not p.is_replicate()}
    if len({p for p in placements if not p.is_replicate()}) < len(used):
        raise UnsupportedError(f"operands would be sharded twice along one dimension: {placements}")
    return mesh, placements, used


def along(default: int | None = None, position: int = 1, shift: int = 0) -> Function:
    """The rule of a function that works along one dimension, such as softmax or cat.

    Args:
        default: the dimension where none is given.
        position: of the argument ``dim``.
        shift: 1 if the result has a dimension more there, -1 if it has one less.
    """

    def rule(func: Function, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if dim is None:
            raise UnsupportedError(f"{func.__name__} needs its argument dim where tensors are sharded")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        x = next(t for t in tensors if isinstance(t, DTensor))
        dim = dim % (x.dim() + max(shift, 0))
        if shift <= 0 and any(dim in shards(t) for t in tensors if isinstance(t, DTensor)):
            raise UnsupportedError(f"{func.__name__} works along dimension {dim}, which is sharded")
        mesh, placements, used = _common(tensors, x.dim())
        metas, keywords = tree_map_only(Tensor, meta_of, (args, kwargs))
        wholes = func(*metas, **keywords)  # with PyTorch's own checks
        args, kwargs = tree_map_only(Tensor, lambda t: spread(t, mesh, placements, used), (args, kwargs))
        places = [Shard(p.dim + shift) if isinstance(p, Shard) and p.dim >= dim else p for p in placements]
        return tree_map(lambda t, whole: joined(t, mesh, places, whole.shape), func(*args, **kwargs), wholes)

    return rule


_flip_one = along()


def flipped(func: Function, x: DTensor, *dims: Any, **kwargs: Any) -> DTensor:
    """`torch.flip`, one dimension after another."""
    (given,) = kwargs.values() if kwargs else dims if len(dims) == 1 else (dims,)
    for dim in (given,) if isinstance(given, int) else given:
        x = _flip_one(Tensor.flip, x, dim)
    return x


def concatenated(func: Function, tensors: Sequence[Tensor], dim: int = 0) -> DTensor:
    """`torch.cat`; along a sharded dimension each process gets its part of every operand."""
    dim %= tensors[0].dim()
    length, shape = sum(t.shape[dim] for t in tensors), list(tensors[0].shape)
    shape[dim] = length
    mesh, placements, used = _common(tensors, len(shape))
    m, parts, end = next((m for m, p in enumerate(placements) if p == Shard(dim)), None), [], 0
    for t in tensors:
        start, end = end, end + t.shape[dim]
        cut = partial(clipped, start, end)
        if isinstance(t, DTensor) and dim in shards(t):
            local = needed(t, spread(t, mesh, placements, used), dim, length, cut)[0]
        else:
            local = spread(t, mesh, [Replicate() if n == m else p for n, p in enumerate(placements)], used)
            a, b = cut((0, length) if m is None else local_range(mesh, m, length))
            local = local.narrow(dim, a, b - a)
        parts.append(local)
    return joined(func(parts, dim), mesh, placements, shape)


def divided(func: Function, x: DTensor, *args: Any, **kwargs: Any) -> tuple[DTensor, ...]:
    """`torch.chunk` and `torch.split`, by slices."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % x.dim()
    stops = list(accumulate(t.shape[dim] for t in func(meta_of(x), *args, **kwargs)))
    before = [slice(None)] * dim
    return tuple(
        indexed(Tensor.__getitem__, x, (*before, slice(a, b))) for a, b in zip([0, *stops], stops, strict=False)
    )


def summed(func: Function, x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """A sum or a mean: of each shard, then over the shards."""
    whole = func(meta_of(x), *args, **kwargs)  # with PyTorch's own checks
    dim = args[0] if args else kwargs.get("dim")
    keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    dims = sorted(d % x.dim() for d in ((dim,) if isinstance(dim, int) else dim or range(x.dim())))
    local = local_of(x)
    if func.__name__ == "mean":
        sums = local.sum(dims, keep, dtype=torch.promote_types(whole.dtype, torch.float32))
        local = (sums / torch.Size([x.shape[d] for d in dims]).numel()).to(whole.dtype)
    else:
        local = local.sum(dims, keep, dtype=whole.dtype)
    placements = [
        p if not isinstance(p, Shard) else Partial() if p.dim in dims
        else p if keep else Shard(p.dim - sum(d < p.dim for d in dims)) for p in x.placements
    ]  # fmt: skip
    return reduced(local, x.device_mesh, placements, whole.shape)


def prelu(func: Function, x: DTensor, weight: Tensor) -> DTensor:
    """`torch.nn.functional.prelu`: a weight for each channel, or one for all."""
    each = weight.reshape([-1, *[1] * (x.dim() - 2)] if weight.numel() > 1 else [])
    return by_elements(lambda x, weight: func(x, weight.reshape(-1)), x, each)


def linear(func: Function, x: DTensor, weight: Tensor, bias: Tensor | None = None) -> DTensor:
    """A matrix applied to the last dimension: where that is sharded, partial sums."""
    mesh, last, used = x.device_mesh, x.dim() - 1, set(shards(x).values())
    inner: list[Placement] = [Shard(1) if p == Shard(last) else Replicate() for p in x.placements]
    local = func(local_of(x), spread(weight, mesh, inner, used))
    placements = [Partial() if p == Shard(last) else p for p in x.placements]
    result = reduced(local, mesh, placements, [*x.shape[:-1], weight.shape[0]])
    return result if bias is None else by_elements(torch.add, result, bias)


# ---- parts of tensors ------------------------------------------------------------------------------


def indexed(func: Function, x: DTensor, index: Any) -> DTensor:
    """``x[index]`` with slices, numbers, None and an ellipsis; a slice may cut a sharded dimension."""
    given = list(index) if isinstance(index, tuple) else [index]
    if any(i is not None and i is not Ellipsis and type(i) not in (int, slice) for i in given):
        raise UnsupportedError("a sharded tensor can be indexed with slices, numbers, None and an ellipsis only")
    at = next((n for n, i in enumerate(given) if i is Ellipsis), len(given))
    count = sum(i is not None and i is not Ellipsis for i in given)
    given[at : at + 1] = [slice(None)] * (x.dim() - count)
    shape, local = func(meta_of(x), index).shape, local_of(x)
    moved: dict[int, int] = {}
    own, d, to = [], 0, 0
    for i in given:
        if i is None or d not in shards(x):
            own.append(i)
        elif isinstance(i, int):
            raise UnsupportedError(f"one position of dimension {d}, which is sharded, cannot be selected")
        else:
            wanted = range(x.shape[d])[i]
            if wanted != range(x.shape[d]):
                local = take(x, local, d, len(wanted), lambda part, w=wanted: list(w[slice(*part)]))
            own.append(slice(None))
        if i is not None:
            moved[d] = to
            d += 1
        to += not isinstance(i, int)
    placements = [Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in x.placements]
    return joined(func(local, tuple(own)), x.device_mesh, placements, shape)


def reshaped(func: Function, x: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    """``flatten``, ``reshape`` and their likes, where each sharded dimension stays one, wherever it then is."""
    whole, local = func(meta_of(x), *args, **kwargs), local_of(x)
    local = local if whole.dtype is x.dtype else func(local, *args, **kwargs)  # a view as another dtype
    shape, sizes, moved = whole.shape, [*whole.shape], dict[int, int]()
    for d in shards(x):
        same = [to for to, n in enumerate(shape) if n == x.shape[d] and prod(shape[:to]) == prod(x.shape[:d])]
        same = [to for to in same if to not in moved.values()]
        if not same:
            raise UnsupportedError(f"{func.__name__} from {list(x.shape)} to {list(shape)} where {list(x.placements)}")
        moved[d] = same[0]
        sizes[same[0]] = local.shape[d]
    placements = [Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in x.placements]
    return joined(local.reshape(sizes), x.device_mesh, placements, shape)


def padded(
    func: Function, x: DTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> DTensor:
    """`torch.nn.functional.pad`: along a sharded dimension, the shards are cut anew."""
    shape = func(meta_of(x), pad, mode, value).shape  # with PyTorch's own checks
    if mode == "circular" and min(pad) < 0:  # PyTorch crops first, then pads circularly
        x, pad = padded(func, x, [min(n, 0) for n in pad]), [max(n, 0) for n in pad]
    local, rest = local_of(x), list(pad)
    for d in shards(x):
        at = 2 * (x.dim() - 1 - d)
        low, high = [*pad, *[0] * 2 * x.dim()][at : at + 2]
        if not (low or high):
            continue
        rest[at : at + 2] = 0, 0
        size = x.shape[d]
        if mode not in ("constant", "circular"):
            local = take(x, local, d, shape[d], partial(_mirrored, mode, size, low))
            continue
        local, (start, stop), _ = needed(
            x, local, d, shape[d], lambda part, low=low: (part[0] - low, part[1] - low), mode == "circular"
        )
        if mode == "constant" and value:
            outside = torch.tensor([not 0 <= i < size for i in range(start, stop)], dtype=torch.bool)
            local = local.masked_fill(outside.to(local.device).view(-1, *[1] * (x.dim() - 1 - d)), value)
    if any(rest):
        local = on_some(lambda t: func(t, rest, mode, value), local)
    return joined_like(x, local, shape)


def _mirrored(mode: str, size: int, low: int, part: Range) -> list[int]:
    """Return the positions of a tensor that a part of the padded tensor reads."""
    if mode == "replicate":
        return [min(max(i - low, 0), size - 1) for i in range(*part)]
    return [size - 1 - abs(size - 1 - abs(i - low)) for i in range(*part)]


def shuffled(func: Function, x: DTensor, *args: int, **kwargs: int) -> DTensor:
    """`torch.nn.functional.pixel_shuffle` and `pixel_unshuffle`: channels become positions, or the reverse."""
    (factor,) = (*args, *kwargs.values())
    local, up, cuts = local_of(x), func.__name__ == "pixel_shuffle", []
    shape = func(meta_of(x), factor).shape
    if x.dim() - 3 in shards(x):
        raise UnsupportedError(f"{func.__name__} of a tensor whose channels are sharded")

    def needs(part: Range) -> Range:
        return (part[0] // factor, -(-part[1] // factor)) if up else (part[0] * factor, part[1] * factor)

    for d in (x.dim() - 2, x.dim() - 1):
        local, (start, _), (a, b) = needed(x, local, d, shape[d], needs)
        cuts.append((d, a - start * factor if up and a < b else 0, b - a))
    *lead, c, h, w = local.shape  # by reshaping: PyTorch's derivative is wrong for no pixels
    if up:
        blocks = local.reshape(*lead, c // factor**2, factor, factor, h, w).movedim((-4, -3), (-3, -1))
        local = blocks.reshape(*lead, c // factor**2, h * factor, w * factor)
    else:
        blocks = local.reshape(*lead, c, h // factor, factor, w // factor, factor).movedim((-3, -1), (-4, -3))
        local = blocks.reshape(*lead, c * factor**2, h // factor, w // factor)
    for d, at, length in cuts:
        local = local.narrow(d, at, length)
    return joined_like(x, local, shape)
