"""Problems for one kernel: known ones and their neighbours, filtered by what the kernel accepts.

A kernel is known by a function that says which problems it accepts. `draw` collects accepted problems: it changes one
to three attributes of known problems, and of those accepted so far, at random with a fixed seed. `spread` orders them
so that each problem has as many pairs of features that were not met before as its cost allows: kernels are wrong for a
property or two (Kuhn, Wallace and Gallo, "Software Fault Interactions and Implications for Software Testing", IEEE
Transactions on Software Engineering 30(6), 2004).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import combinations_with_replacement
from math import ceil, inf, prod
from typing import Any, Final

import torch

from .._compat import channels_last_of
from ..problem import ConvProblem
from ..sizes import effective_kernel
from .problems import changed, default_problems, real_layers

#: No drawn problem exceeds these: operations, and elements of one tensor.
_MOST_FLOPS, _MOST_ELEMENTS = 300_000_000, 5_000_000
#: Draws in any case, at most, and the number of accepted problems above which drawing ends.
_DRAWS, _MOST_DRAWS, _ENOUGH = 1_200, 20_000, 250
#: Above these the result of a check is compared in fewer ways: operations, elements of a kernel.
_LARGE_FLOPS, _LARGE_KERNEL = 2_500_000, 200
#: A feature that was not met before counts as so many pairs.
_NEW: Final = 40
#: The limit of the second and third dimension of a grid of CUDA blocks, and of 16-bit counters.
_PLANES: Final = 65_536

_SMALL = tuple(range(1, 10))
_BATCHES = (1, 2, 3, 4, 5, 7, 8, 16, 33, 65, 130)
_CHANNELS = (*_SMALL, 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 48, 63, 64, 65, 96, 128, 130, 192, 256, 257, 320, 384)
_SIZES = (*_SMALL, 10, 11, 12, 13, 14, 15, 16, 17, 20, 23, 28, 31, 32, 33, 56, 63, 64, 65, 112, 130, 160, 224, 257)
_KERNELS = (1, 2, 3, 3, 4, 5, 6, 7, 9, 11, 13, 31)
_STEPS = (1, 2, 2, 3, 4)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OTHERS = (torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

Accepts = Callable[[ConvProblem], bool]
Changes = dict[str, Any]


def is_large(p: ConvProblem) -> bool:
    """Whether a check compares the result in fewer ways, since each costs much."""
    return p.flops > _LARGE_FLOPS or prod(p.kernel_size) > _LARGE_KERNEL


def cost(p: ConvProblem) -> float:
    """Return roughly how long a check of the problem takes, relative to other problems."""
    elements = sum(map(prod, (p.input_shape, p.weight_shape, p.output_shape)))
    least = 0.02 + min(prod(p.kernel_size), _LARGE_KERNEL) * 3e-4
    return least + (p.flops / 1e9 + elements / 2e7 if is_large(p) else p.flops / 1e8 + elements / 5e6)


def draw(accepts: Accepts, named: Sequence[ConvProblem] = (), *, seconds: float = inf) -> list[ConvProblem]:
    """Return problems that a kernel accepts, without those named.

    Args:
        accepts: whether the kernel computes a problem; it may be called twenty thousand times.
        named: further problems to start from.
        seconds: how long the search may take.
    """
    rng, end = random.Random(0), time.monotonic() + seconds
    known = [*default_problems(), *real_layers()]
    found, asked = list(named), {*named}

    def ask(p: ConvProblem | None) -> None:
        if p is None or p in asked or p.empty:
            return
        asked.add(p)
        if p.flops <= _MOST_FLOPS and max(map(prod, (p.input_shape, p.weight_shape, p.output_shape))) <= _MOST_ELEMENTS:
            found.extend([p] * bool(accepts(p)))

    for p in known:
        ask(p)
    for number in range(_MOST_DRAWS):
        if time.monotonic() > end or (number >= _DRAWS and len(found) >= _ENOUGH):
            break
        ask(_neighbour(rng, rng.choice(found if found and rng.random() < 0.6 else known)))
    return found[len(named) :]


def spread(problems: Sequence[ConvProblem], before: Sequence[ConvProblem] = ()) -> Iterator[ConvProblem]:
    """Yield the problems, each time the one with the most new pairs of features for its cost.

    Args:
        before: problems that are checked already.
    """
    met: set[tuple[object, object]] = set()
    for p in before:
        met.update(_pairs(p))
    # Gains only fall: the first one whose gain is still the largest when it is computed anew is the best.
    heap = [(-inf, i) for i in range(len(problems))]
    while heap:
        _, i = heappop(heap)
        pairs = {*_pairs(problems[i])} - met
        gain = -(len(pairs) + _NEW * sum(a == b for a, b in pairs)) / cost(problems[i])
        if heap and gain > heap[0][0]:
            heappush(heap, (gain, i))
        else:
            met |= pairs
            yield problems[i]


def _pairs(p: ConvProblem) -> Iterator[tuple[object, object]]:
    return combinations_with_replacement(_features(p), 2)


def random_problems(seed: int) -> Iterator[ConvProblem]:
    """Yield small problems without end, the same for the same seed, that PyTorch can state.

    Equivalent to:
        >>> from itertools import islice
        >>> len({str(p) for p in islice(random_problems(0), 50)}) > 40
        True
    """
    rng, known = random.Random(seed), [p for p in default_problems() if p.symmetric]
    while True:
        p = rng.choice(known)
        for _ in range(4):
            p = changed(p, **_change(rng, p)) or p
        if p.dtype in _FLOATS and not p.empty and p.symmetric and min(map(min, p.padding)) >= 0 and not is_large(p):
            yield p


# ---- neighbours of a problem ---------------------------------------------------------------------


def _neighbour(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    """Return the problem with one to three random changes; None if they make none."""
    q: ConvProblem | None = p
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        q = q and changed(q, **_change(rng, q))
    return q


def _change(rng: random.Random, p: ConvProblem) -> Changes:
    """Return new values of one attribute, or of several that a layer's author changes together."""
    g, per_in, per_out, n = p.groups, p.in_channels // p.groups, p.out_channels // p.groups, rng.choice(_CHANNELS)
    kernel, dilation = _each(rng, p.kernel_size, _KERNELS), _each(rng, p.dilation, _STEPS)
    one, other = rng.randrange(5), rng.randrange(-1, 5)
    smallest = tuple(map(effective_kernel, p.kernel_size, p.dilation))
    many = ceil(_PLANES / min(p.in_channels, p.out_channels))
    return rng.choice((
        {"batch": rng.choice(_BATCHES)},
        # A large batch is affordable where each image is small.
        {"batch": rng.choice((33, 65, 130, many)), "input_size": smallest},
        {"in_channels": g * n},
        {"out_channels": g * n},
        {"in_channels": g * n, "out_channels": g * n},
        {"groups": n, "in_channels": n * per_in, "out_channels": n * per_out},
        {"groups": n, "in_channels": n, "out_channels": n * rng.choice((1, 1, 2, 3))},
        *[{"input_size": _each(rng, p.input_size, _SIZES)}] * 4,
        {"kernel_size": kernel},
        {"kernel_size": kernel, "padding": same_padding(kernel, p.dilation)},
        *[{"stride": _each(rng, p.stride, _STEPS)}] * 2,
        {"dilation": dilation},
        {"dilation": dilation, "padding": same_padding(p.kernel_size, dilation)},
        {"padding": _each(rng, p.padding, ((0, 0), (one, one), (one, one), (one, other)))},
        {"padding": same_padding(p.kernel_size, p.dilation)},
        *[{"dtype": rng.choice(_FLOATS if rng.random() < 0.8 else _OTHERS)}] * 2,
        {"memory_format": torch.contiguous_format if p.ndim == 1 or p.channels_last else channels_last_of(p.ndim)},
        {"origin": "plain" if p.transposed else "transposed"},
        {"has_bias": not p.has_bias},
    ))  # fmt: skip


def _each(rng: random.Random, now: tuple[Any, ...], values: Sequence[Any]) -> tuple[Any, ...]:
    """Return one value for all dimensions, for one of them, or another one for each."""
    value, kind, i = rng.choice(values), rng.random(), rng.randrange(len(now))
    if kind < 0.5:
        return (value,) * len(now)
    return (*now[:i], value, *now[i + 1 :]) if kind < 0.8 else tuple(rng.choice(values) for _ in now)


def same_padding(kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the padding with which an odd kernel keeps the size of the image."""
    halves = [effective_kernel(k, d) // 2 for k, d in zip(kernel, dilation, strict=True)]
    return tuple((n, n) for n in halves)


# ---- what a kernel may be wrong for --------------------------------------------------------------


def _features(p: ConvProblem) -> list[Hashable]:
    """Return the properties, one of each kind, that a kernel may be wrong for."""
    kind = "grouped" if p.groups > 1 else "dense"
    if p.depthwise:
        kind = "depthwise" if p.in_channels == p.out_channels else "multiplier"
    sides = [side for pair in p.padding for side in pair]
    wide = any(max(pair) >= k for pair, k in zip(p.padding, p.kernel_size, strict=True))
    square = len({*p.input_size}) == 1
    values: tuple[Hashable, ...] = (
        (p.ndim, kind),
        p.dtype,
        p.channels_last,
        p.origin,
        p.has_bias,
        min(p.batch, 3) if p.batch < 10 else p.batch.bit_length(),
        (square, p.input_size[0] if square and p.input_size[0] > 6 else None),
        p.kernel_size if max(p.kernel_size) <= 7 else "large",
        p.stride if max(p.stride) <= 3 else "large",
        p.dilation if max(p.dilation) <= 2 else "large",
        "same" if p.padding == same_padding(p.kernel_size, p.dilation) else (min(sides) < 0, max(sides) > 0, wide),
        (p.symmetric, len({*p.padding}) > 1),
        any(d.high > d.least_high for d in p.dims),  # there are rows that no output reads
        (p.batch * p.in_channels >= _PLANES, p.batch * p.out_channels >= _PLANES),
        *((n % 8, n % 64 == 0) for n in (p.in_channels // p.groups, p.out_channels)),
        *(n.bit_length() for n in (p.in_channels, p.out_channels, p.input_size[0], p.input_size[-1])),
        p.input_size[0] % 2,
        p.output_size[-1] % 16,
        min(p.output_size) == 1,
    )
    return [*enumerate(values)]
