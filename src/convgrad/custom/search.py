"""Problems on which a user's kernel can be checked: those that it accepts, the most telling ones first.

The default problems come first. A kernel that accepts few of them is asked about variations of those, and one that
accepts none about problems drawn from the values that real networks use.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..check import default_problems
from ..problem import ConvProblem, effective_kernel, output_length

__all__ = ["admitted_problems"]

#: More are not needed where a kernel accepts much.
_ENOUGH = 60
#: Problems that a search asks about at most.
_MOST = 10_000
#: Operations of one pass: the reference computes every problem several times in float64.
_SMALL = 4_000_000
#: What is larger is computed by several programs of a kernel.
_TILE = 64
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHANNELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 144, 192, 256, 384, 512, 768, 1024)
_SIZES = (3, 4, 5, 7, 8, 9, 12, 13, 14, 16, 17, 20, 24, 28, 32, 33, 48, 56, 64, 112, 128, 224)
#: Longer than a tile of 128, and then some: no multiple of anything, of 2, of 32. Of images half as many.
_LONG = (131, 130, 160)
_KERNELS = (3, 1, 5, 7, 2, 4, 9, 11, 13, 31, 6, 8, 14, 16)


def admitted_problems(accepts: Callable[[ConvProblem], bool], seconds: float = 2.0) -> list[ConvProblem]:
    """Problems that a kernel accepts, so ordered that the first few differ in everything that matters.

    Args:
        accepts: whether the kernel takes a problem.
        seconds: how long to search at most.
    """
    end = time.monotonic() + seconds
    found = dict.fromkeys(p for p in default_problems() if accepts(p))
    rng = random.Random(0)
    if not found:
        found = dict.fromkeys(_first(10, (p for p in _drawn(rng, end) if accepts(p))))
    tried = set(found)
    while found and len(_affordable(found)) < _ENOUGH and len(tried) < _MOST and time.monotonic() < end:
        for p in _varied(rng, sorted(found, key=lambda p: p.flops)[:10]):
            if p not in tried:
                tried.add(p)
                if accepts(p):
                    found[p] = None
    found |= dict.fromkeys(p for p in _past_a_tile(list(found)) if accepts(p))
    return telling_first(_affordable(found))


def _affordable(problems: Iterable[ConvProblem]) -> list[ConvProblem]:
    """Those that the reference computes soon; where a kernel accepts large ones only, the smallest of these."""
    limit = max(_SMALL, 4 * min((p.flops for p in problems), default=0))
    return [p for p in problems if p.flops <= limit]


def _first(n: int, problems: Iterator[ConvProblem]) -> Iterator[ConvProblem]:
    for _, p in zip(range(n), problems, strict=False):
        yield p


# ---- search --------------------------------------------------------------------------------------


def _build(**fields: Any) -> ConvProblem | None:
    """A problem from everything but its output size; None where these sizes give none."""
    out = tuple(
        output_length(n, k, s, low, high, dil)
        for n, k, s, (low, high), dil in zip(
            *(fields[key] for key in ("input_size", "kernel_size", "stride", "padding", "dilation")), strict=True
        )
    )
    try:
        return ConvProblem(output_size=out, **fields).canonical()
    except ValueError:
        return None


def _drawn(rng: random.Random, end: float) -> Iterator[ConvProblem]:
    """Problems as networks have them, at random."""
    while time.monotonic() < end:
        d = rng.choice((2, 2, 2, 1, 3))
        k, dil, size = rng.choice(_KERNELS), rng.choice((1, 1, 1, 2)), rng.choice(_SIZES)
        pad = rng.choice((0, dil * (k - 1) // 2, dil * (k - 1) // 2, k - 1))
        groups = rng.choice((1, "channels", 2, 4, 8, 32))
        channels = rng.choice(_CHANNELS)
        g = channels if groups == "channels" else groups
        problem = _build(
            batch=rng.choice((1, 2, 4, 8, 32)),
            in_channels=channels if groups == "channels" else g * rng.choice(_CHANNELS[:12]),
            out_channels=g * rng.choice((1, 1, 2, 3)) if groups == "channels" else g * rng.choice(_CHANNELS[:12]),
            groups=g,
            input_size=tuple(rng.choice((size, size, rng.choice(_SIZES))) for _ in range(d)),
            kernel_size=(k,) * d,
            stride=(rng.choice((1, 2, 1, 2, 3, 4, k)),) * d,
            padding=((pad, rng.choice((pad, pad, 0))),) * d,
            dilation=(dil,) * d,
            dtype=rng.choice((torch.float32, *_DTYPES)),
            memory_format=_layout(d, rng.random() < 0.3),
        )
        if problem is not None:
            yield problem


def _layout(d: int, last: bool) -> torch.memory_format:
    return (
        {2: torch.channels_last, 3: torch.channels_last_3d}.get(d, torch.contiguous_format)
        if last
        else (torch.contiguous_format)
    )


def _varied(rng: random.Random, seeds: Sequence[ConvProblem]) -> Iterator[ConvProblem]:
    """Some problems like the seeds, with one, two or three things changed."""
    for _ in range(100):
        p: ConvProblem | None = rng.choice(seeds)
        for _ in range(rng.choice((1, 1, 2, 3))):
            p = rng.choice(_CHANGES)(rng, p) if p is not None else None
        if p is not None:
            yield p


def _changed(p: ConvProblem, **changes: Any) -> ConvProblem | None:
    names = ("batch", "in_channels", "out_channels", "groups", "input_size", "kernel_size", "stride", "padding")
    names += ("dilation", "dtype", "memory_format", "origin")
    return _build(**{n: getattr(p, n) for n in names} | changes)


def _other_size(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    return _changed(
        p, input_size=tuple(rng.choice((n, n + rng.choice((1, 2, 3)), rng.choice(_SIZES[:16]))) for n in p.input_size)
    )


def _other_kernel(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    k = rng.choice(_KERNELS[:6])
    pads = tuple((effective_kernel(k, dil) // 2,) * 2 for dil in p.dilation)
    return _changed(p, kernel_size=(k,) * p.ndim, padding=pads)


def _other_padding(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    spans = [effective_kernel(k, dil) - 1 for k, dil in zip(p.kernel_size, p.dilation, strict=True)]
    share = rng.choice((0, 1, 2))  # none, half of it, all of it
    return _changed(p, padding=tuple((span * share // 2,) * 2 for span in spans))


def _other_stride(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    even = (rng.choice((1, 2, 3)),) * p.ndim
    return _changed(p, stride=rng.choice((even, even, tuple(rng.choice((1, 2)) for _ in even))))


def _other_channels(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    ci, co = p.in_channels // p.groups, p.out_channels // p.groups
    if rng.random() < 0.5 and p.groups > 1:
        groups = rng.choice((p.groups + 1, p.groups * 2, 3, 8))
        return _changed(p, groups=groups, in_channels=groups * ci, out_channels=groups * co)
    return _changed(p, out_channels=p.groups * rng.choice((co * 2, co + 1, 1)))


def _past_a_tile(seeds: Sequence[ConvProblem]) -> Iterator[ConvProblem]:
    """Like the smallest of each kind, but in one respect larger than the tile that a program of a kernel computes."""
    smallest = {(p.ndim, p.depthwise, p.pointwise): p for p in sorted(seeds, key=lambda p: -p.flops)}
    for p in smallest.values():
        ci, co = p.in_channels // p.groups, p.out_channels // p.groups
        for long in _LONG:
            larger = [_changed(p, input_size=(*p.input_size[:-1], long)), _changed(p, batch=long // 2 + 2)]
            if p.ndim > 1:
                larger.append(_changed(p, input_size=(long, *p.input_size[1:])))
            if p.groups > 1:
                larger.append(_changed(p, groups=long, in_channels=long * ci, out_channels=long * co))
            else:
                larger += [_changed(p, in_channels=long), _changed(p, out_channels=long)]
            yield from (q for q in larger if q is not None)


_CHANGES: tuple[Callable[[random.Random, ConvProblem], ConvProblem | None], ...] = (
    lambda rng, p: _changed(p, batch=rng.choice((1, 2, 3))),
    lambda rng, p: _changed(p, dtype=rng.choice(_DTYPES)),
    lambda rng, p: _changed(p, memory_format=_layout(p.ndim, not p.channels_last)),
    lambda rng, p: _changed(p, dilation=(rng.choice((1, 2)),) * p.ndim),
    _other_size,
    _other_size,
    _other_kernel,
    _other_padding,
    _other_stride,
    _other_channels,
)


# ---- order ---------------------------------------------------------------------------------------


def features(p: ConvProblem) -> frozenset[tuple[str, object]]:
    """What a kernel may get wrong while everything else about it is right."""
    return frozenset(
        {
            ("one image", p.batch == 1),
            ("dimensions", p.ndim),
            ("square", len(set(p.input_size)) == 1),
            ("width a multiple of 8", p.input_size[-1] % 8 == 0),
            ("channels a multiple of 8", p.in_channels % 8 == 0),
            ("stride", p.stride if len(set(p.stride)) == 1 else "uneven"),
            ("rows left unread", any(_unread(p, i) for i in range(p.ndim))),
            ("border", any(low > 0 for low, _ in p.padding)),
            ("symmetric", p.symmetric),
            ("dilated", max(p.dilation) > 1),
            ("kernel", p.kernel_size if len(set(p.kernel_size)) == 1 else "uneven"),
            ("wide", p.output_size[-1] > _TILE),
            ("tall", p.output_size[0] > _TILE),
            ("many images", p.batch > _TILE),
            ("many channels in, out", (p.in_channels > _TILE, p.out_channels > _TILE)),
            ("larger kernel than image", any(k > n for k, n in zip(p.kernel_size, p.input_size, strict=True))),
            ("groups", "depthwise" if p.depthwise else p.groups > 1),
            ("multiplier", p.out_channels // p.groups > 1),
            ("dtype", p.dtype),
            ("channels_last", p.channels_last),
        }
    )


def _unread(p: ConvProblem, i: int) -> bool:
    reach = (p.output_size[i] - 1) * p.stride[i] + effective_kernel(p.kernel_size[i], p.dilation[i])
    return reach < p.input_size[i] + sum(p.padding[i])


def telling_first(problems: Sequence[ConvProblem]) -> list[ConvProblem]:
    """The same problems; each of the first adds as many features as it can to those before it."""
    left = {p: features(p) for p in problems}
    ordered: list[ConvProblem] = []
    seen: set[tuple[str, object]] = set()
    while left:
        best = max(left, key=lambda p: (len(left[p] - seen), -p.flops))
        if not left[best] - seen:
            break
        ordered.append(best)
        seen |= left.pop(best)
    rest = list(left)
    random.Random(0).shuffle(rest)
    return ordered + rest
