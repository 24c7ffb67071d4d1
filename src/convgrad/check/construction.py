"""Problems made for one kernel: what it accepts is found by trial; every attribute takes small, odd and large values.

All that is known of a kernel is a function that says which problems it accepts. So some accepted problems are found
first (`_start`, and `_climb` for a kernel that accepts next to nothing); then each attribute of some of them is
changed, alone and together with those that usually go with it, value by value, up to the bound, which is found by
bisection (`_explore`); then accepted problems are mixed (`_mix`). The list is put together out of all of these.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import ceil, gcd, inf, prod
from typing import Any, Final, NamedTuple

import torch

from .._compat import channels_last_of
from ..problem import ConvProblem
from ..sizes import effective_kernel
from .covering import PLANES, is_large, same_padding, spread
from .problems import changed, default_problems, real_layers, smallest

Accepts = Callable[[ConvProblem], bool]
Changes = dict[str, Any]
_Move = Callable[[ConvProblem, Any], Iterable[Changes]]

#: What no problem exceeds that nobody names: operations, and elements of one tensor.
_MOST_FLOPS: Final = 300_000_000
_MOST_ELEMENTS: Final = 5_000_000
#: Accepted problems to start from; how many are drawn in any case, and at most where few are accepted.
_ENOUGH, _DRAWS, _MOST_DRAWS = 60, 1500, 10_000
#: How many known problems come at once, before the search.
_AT_ONCE = 24
_CLIMBS, _STEPS = 40, 12
_BASES, _MIXTURES = 14, 2500
#: Larger integers in the kernel's code are taken for no size.
_LARGEST_HINT: Final = 4096

_SMALL = tuple(range(1, 10))
_CHANNELS = (*_SMALL, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 130, 160, 192, 256, 257, 320, 384)
_CHANNELS += (512, 768, 960, 1024, 1536)
_SIZES = (*_SMALL, 10, 11, 12, 13, 14, 15, 16, 17, 20, 23, 28, 31, 32, 33, 56, 63, 64, 65, 112, 130, 131, 160, 224, 257)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_DTYPES += (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
#: Attributes that are taken out of another problem together.
_PARTS = (
    ("batch",), ("input_size",), ("dtype",), ("memory_format",), ("stride",), ("kernel_size", "padding"), ("padding",),
    ("dilation",), ("origin",), ("has_bias",), ("in_channels", "out_channels", "groups"),
)  # fmt: skip


def construct(
    accepts: Accepts,
    named: Sequence[ConvProblem] = (),
    *,
    hints: Collection[Any] = (),
    most: int = 150,
    seconds: float = inf,
    found: list[ConvProblem] | None = None,
) -> Iterator[ConvProblem]:
    """Problems that a kernel accepts: those named, then the others in an order in which the first differ in everything.

    The first, small ones of the suite's own, come at once; for the others ``accepts`` is called ten thousand times.

    Args:
        accepts: whether the kernel computes a problem.
        named: problems to begin with; those that it does not accept are left out.
        hints: integers, tuples of them and problems that the kernel's code mentions: limits, multiples, sizes.
        most: how many, those named not counted.
        seconds: how long the search may take.
        found: what a search for another output of the kernel found; where most of it is accepted, there is no other
            search. What is found is added.
    """
    search = _Search(accepts, hints, seconds)
    given = [p for p in dict.fromkeys(named) if search.accepted(p, named=True)]
    most += len(given)
    search.ask(h for h in hints if isinstance(h, ConvProblem))
    search.ask(default_problems())
    search.ask(real_layers())
    known = search.found()
    given += spread([p for p in known if p in given or not is_large(p)], min(most - len(given), _AT_ONCE), given)
    yield from given
    search.begin(seconds)
    found = [] if found is None else found
    if 2 * sum(map(search.accepted, found)) <= len(found):
        _start(search)
        bases = spread(search.found(), _BASES)
        for base in dict.fromkeys([*given[:2], *bases]):
            _explore(search, base)
        _mix(search)
        found += search.found()
    yield from spread(search.found(), most - len(given), given)


class _Search:
    """What was asked, and what of it the kernel accepts."""

    def __init__(self, accepts: Accepts, hints: Collection[Any], seconds: float) -> None:
        self._accepts = accepts
        self.begin(seconds)
        self._asked: dict[ConvProblem, bool] = {}
        self.numbers = sorted({h for h in hints if isinstance(h, int) and 0 < h <= _LARGEST_HINT})
        self.tuples = [h for h in hints if isinstance(h, tuple) and h and all(isinstance(n, int) and n > 0 for n in h)]

    def begin(self, seconds: float) -> None:
        """From now on, ask for this long."""
        self._end = time.monotonic() + seconds

    def found(self) -> list[ConvProblem]:
        return [p for p, answer in self._asked.items() if answer]

    def ask(self, problems: Iterable[ConvProblem | None]) -> None:
        for p in problems:
            self.accepted(p)

    def accepted(self, p: ConvProblem | None, *, named: bool = False) -> bool:
        if p is None or p.empty:
            return False
        if p not in self._asked:
            if self.over:
                return False
            self._asked[p] = (named or _affordable(p)) and bool(self._accepts(p))
        return self._asked[p]

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    def obstacle(self, p: ConvProblem) -> tuple[str, int]:
        """The attribute that ``accepts`` read last before it refused, and how many it had read."""
        watched: Any = _Watched(p)
        try:
            self._accepts(watched)
        except Exception:  # the kernel's own function may want a true problem
            return "", 0
        return (watched.seen[-1] if watched.seen else ""), len(watched.seen)


class _Watched:
    """A problem that remembers which of its attributes were looked at."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem, self.seen = problem, []

    def __getattr__(self, name: str) -> Any:
        self.seen.append(name)
        return getattr(self.problem, name)


def _affordable(p: ConvProblem) -> bool:
    shapes = (p.input_shape, p.weight_shape, p.output_shape)
    return p.flops <= _MOST_FLOPS and max(map(prod, shapes)) <= _MOST_ELEMENTS


# ---- the first accepted problems -----------------------------------------------------------------


def _start(search: _Search) -> None:
    """Ask problems drawn at random, and those that these and known ones lead to."""
    rng = random.Random(0)
    found = len(search.found())
    for i in range(_MOST_DRAWS):
        if found >= _ENOUGH and i >= _DRAWS:
            return
        found += search.accepted(_drawn(rng, search))
    starts = [*real_layers(), *default_problems()]
    rng.shuffle(starts)
    for p in starts[:_CLIMBS]:
        _climb(search, p)


def _climb(search: _Search, p: ConvProblem) -> None:
    """Change what ``accepts`` read last before it refused, until it reads further."""
    name, depth = search.obstacle(p)
    for _ in range(_STEPS):
        axis = next((a for a in _AXES if name in a.names), None)
        if axis is None or search.accepted(p):
            return
        best: tuple[int, str, ConvProblem] | None = None
        changes = [more for value in _ladder(search, p, axis) for more in axis.move(p, value)]
        for q in filter(None, (changed(p, **more) for more in changes)):
            if search.accepted(q):
                return
            further, reached = search.obstacle(q)
            if reached > depth and (best is None or reached > best[0]):
                best = (reached, further, q)
        if best is None:
            return
        depth, name, p = best


def _drawn(rng: random.Random, search: _Search) -> ConvProblem | None:
    """A typical problem: most often square, with the padding that keeps the size."""
    d = rng.choice((1, 2, 2, 2, 2, 3))
    tuples = [t for t in search.tuples if len(t) == d]

    def number(usual: Sequence[int]) -> int:
        return rng.choice(search.numbers) if search.numbers and rng.random() < 0.3 else rng.choice(usual)

    def numbers(usual: Sequence[int]) -> tuple[int, ...]:
        if tuples and rng.random() < 0.3:
            return rng.choice(tuples)
        return (number(usual),) * d if rng.random() < 0.7 else tuple([number(usual) for _ in range(d)])

    kernel, stride, dilation = numbers((1, 2, 3, 3, 3, 4, 5, 7)), numbers((1, 1, 2, 3)), numbers((1, 1, 1, 2))
    same = [low for low, _ in same_padding(kernel, dilation)]
    low: Sequence[int] = rng.choice((same, same, [0] * d, [2 * n for n in same], numbers((0, 1, 2, 3))))
    high: Sequence[int] = low if rng.random() < 0.8 else rng.choice(([0] * d, [1] * d))
    groups = rng.choice((1, 1, 2, 4, number(_CHANNELS)))
    per_in, per_out = rng.choice(((1, 1), (1, number(_SMALL)), (number(_CHANNELS), number(_CHANNELS))))
    if groups == 1:
        per_in = number(_CHANNELS)
        per_out = rng.choice((per_in, 2 * per_in, number(_CHANNELS)))
    return changed(
        smallest(d),
        batch=number((1, 1, 2, 4)),
        in_channels=groups * per_in,
        out_channels=groups * per_out,
        groups=groups,
        input_size=numbers((7, 8, 14, 16, 28, 32, 56)),
        kernel_size=kernel,
        stride=stride,
        dilation=dilation,
        padding=tuple(zip(low, high, strict=True)),
        dtype=rng.choice((torch.float32, torch.float32, *_DTYPES)),
        memory_format=rng.choice((torch.contiguous_format, channels_last_of(d))),
        origin="transposed" if rng.random() < 0.15 else "plain",
        has_bias=rng.random() < 0.2,
    )


# ---- along each attribute ------------------------------------------------------------------------


class _Axis(NamedTuple):
    """The attributes of a problem that change together, how, and which values they are given.

    ``move`` yields the kinds of change for one value, always as many in the same order; ``bounded``: whether there are
    values between, to look for the largest; ``tuples``: whether a value may be one for each dimension.
    """

    names: tuple[str, ...]
    move: _Move
    values: tuple[Any, ...]
    bounded: bool = False
    tuples: bool = False


def _explore(search: _Search, base: ConvProblem) -> None:
    """Ask for every value of every attribute, and for the largest."""
    for axis in _AXES:
        accepted: dict[int, list[int]] = {}  # by the kind of change
        ladder = _ladder(search, base, axis)
        for value in ladder:
            for kind, changes in enumerate(axis.move(base, value)):
                if search.accepted(changed(base, **changes)) and isinstance(value, int):
                    accepted.setdefault(kind, []).append(value)
        for kind, found in accepted.items() if axis.bounded else ():
            _largest(search, base, axis, kind, found, ladder)


def _ladder(search: _Search, base: ConvProblem, axis: _Axis) -> list[Any]:
    """The values of an attribute: the usual ones, those near the integers in the kernel's code, and its tuples."""
    if type(axis.values[0]) is not int:
        return [*axis.values]
    near = [n for h in search.numbers for n in (h - 1, h, h + 1, 2 * h, 3 * h) if n > 0]
    if "batch" in axis.names:
        near += [ceil((PLANES + 1) / base.in_channels), ceil((PLANES + 1) / base.out_channels)]
    if "in_channels" in axis.names:
        near += [n // base.groups * m for n in (base.in_channels, base.out_channels) for m in (2, 3, 5)]
    tuples = [t for t in search.tuples if len(t) == base.ndim] if axis.tuples else []
    return [*sorted({*axis.values, *near}), *tuples]


def _largest(search: _Search, base: ConvProblem, axis: _Axis, kind: int, found: list[int], ladder: list[int]) -> None:
    """Ask between the largest accepted value and the next one that was not: a bound lies there."""
    step = gcd(*(b - a for a, b in pairwise(found))) or found[0]
    low = found[-1]
    further = low + max(1, low // step) * step
    high = next((v for v in ladder if isinstance(v, int) and v > low and (v - low) % step == 0), further)
    while high - low > step:
        middle = low + (high - low) // 2 // step * step
        changes = list(axis.move(base, middle))[kind]
        low, high = (middle, high) if search.accepted(changed(base, **changes)) else (low, middle)


def _batch(p: ConvProblem, n: int) -> Iterator[Changes]:
    """Many images are affordable where each is small."""
    yield {"batch": n}
    yield {"batch": n, "input_size": (1,) * p.ndim}
    yield {"batch": n, "input_size": tuple(map(effective_kernel, p.kernel_size, p.dilation))}


def _channels(p: ConvProblem, n: int) -> Iterator[Changes]:
    """Channels of a group, or groups."""
    g, per_in, per_out = p.groups, p.in_channels // p.groups, p.out_channels // p.groups
    yield {"in_channels": g * n}
    yield {"out_channels": g * n}
    yield {"in_channels": g * n, "out_channels": g * n}
    yield {"in_channels": g * n, "out_channels": max(1, per_out * n // per_in) * g}
    yield {"groups": n, "in_channels": n * per_in, "out_channels": n * per_out}
    yield {"groups": n, "in_channels": n, "out_channels": n}
    yield {"groups": n}


def _dimensions(name: str, *paddings: Callable[[ConvProblem, tuple[int, ...]], Any]) -> _Move:
    """One value for all dimensions, and for one after the other, or a tuple of them; also with these paddings."""

    def move(p: ConvProblem, n: Any) -> Iterator[Changes]:
        each = (_put(getattr(p, name), i, n) for i in range(p.ndim))
        for values in (n,) if isinstance(n, tuple) else ((n,) * p.ndim, *each):
            yield {name: values}
            for padding in paddings:
                yield {name: values, "padding": padding(p, values)}

    return move


def _padding(p: ConvProblem, n: int) -> Iterator[Changes]:
    yield {"padding": ((n, n),) * p.ndim}
    for i in range(p.ndim):
        for pair in ((n, n), (n, n + 1), (n + 1, n), (n, 0)):
            yield {"padding": _put(p.padding, i, pair)}


_AXES: Final = (
    _Axis(("batch",), _batch, (*_SMALL, 16, 17, 32, 33, 64, 67, 130), bounded=True),
    _Axis(("in_channels", "out_channels", "groups", "depthwise"), _channels, _CHANNELS, bounded=True),
    _Axis(("input_size", "output_size"), _dimensions("input_size"), _SIZES, bounded=True, tuples=True),
    _Axis(
        ("kernel_size", "pointwise"),
        _dimensions("kernel_size", lambda p, k: same_padding(k, p.dilation), lambda p, k: ((0, 0),) * p.ndim),
        (*_SMALL, 11, 13, 15, 21, 31),
        tuples=True,
    ),
    _Axis(("stride",), _dimensions("stride"), (1, 2, 3, 4, 5, 8), tuples=True),
    _Axis(
        ("dilation",),
        _dimensions("dilation", lambda p, d: same_padding(p.kernel_size, d)),
        (1, 2, 3, 4, 6, 12),
        tuples=True,
    ),
    _Axis(("padding", "symmetric"), _padding, (*range(8), 12, 15, -1, -2)),
    _Axis(("dtype",), lambda p, dtype: [{"dtype": dtype}], _DTYPES),
    _Axis(
        ("memory_format", "channels_last"),
        lambda p, last: [{"memory_format": channels_last_of(p.ndim) if last else torch.contiguous_format}],
        (False, True),
    ),
    _Axis(("origin", "transposed"), lambda p, origin: [{"origin": origin}], ("plain", "transposed")),
    _Axis(("has_bias",), lambda p, has: [{"has_bias": has}], (False, True)),
)


def _put(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _mix(search: _Search) -> None:
    """Ask for accepted problems with some attributes of other accepted ones."""
    rng = random.Random(0)
    by_ndim: dict[int, list[ConvProblem]] = {}
    for p in search.found():
        by_ndim.setdefault(p.ndim, []).append(p)
    for found in by_ndim.values():
        for _ in range(_MIXTURES // len(by_ndim)):
            p, q = rng.choice(found), rng.choice(found)
            parts = rng.sample(_PARTS, rng.randint(2, 6))
            search.accepted(changed(p, **{name: getattr(q, name) for part in parts for name in part}))
