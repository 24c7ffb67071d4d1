"""Problems to check a backend on: a table of small ones, layers of known networks, and those drawn for a kernel.

The table's are chosen for where kernels go wrong: one image, one channel, sizes that are no multiple of a vector or a
tile, borders wider than the image, strides that leave rows unread, kernels of even size, crops.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from .._compat import channels_last_of
from ..problem import ConvProblem, Dimension, PaddingMode, effective_kernel, fields_of, output_length

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Accepts = Callable[[ConvProblem], bool]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_TABLE = """
mb1ic1iw1oc1kw1; mb1ic3iw13oc5kw3; mb3ic4iw16oc8kw3pw1; mb2ic5iw17oc3kw4pw2; mb1ic2iw20oc4kw5sw2pw2;
mb2ic3iw19oc2kw3sw3pw1; mb2ic2iw23oc3kw3dw2pw2; mb2g2ic4iw11oc6kw2pw1; mb1g6ic6iw33oc6kw4ow33pw3;
mb2g16ic16iw37oc16kw3pw1; mb2g4ic4iw9oc12kw3pw1sw2; mb2g3ic6iw15oc3kw5pw2dw1; mb1ic3iw2oc3kw5pw2;
mb2ic2iw12oc2kw3ow9pw-1; mb1ic4iw9oc4kw4sw2pw1 transposed; mb2g4ic4iw7oc4ow15kw4sw2pw1 transposed

mb1ic1ih1oc1kh1; mb1ic3ih5iw7oc4kh3kw3ph1pw1; mb2ic8ih6iw9oc8kh1kw1; mb2ic6ih9iw8oc5kh1kw1sh2sw2;
mb3ic4ih8iw16oc8kh3kw3ph1pw1; mb2ic3ih13iw11oc2kh3kw3sh2sw2ph1pw1; mb1ic2ih12iw15oc3kh3kw3sh3sw3;
mb2ic2ih11iw10oc4kh4kw4sh2sw2ph1pw1; mb2ic3ih9iw12oc3kh2kw2; mb1ic2ih14iw13oc2kh3kw3ph2pw2dh1dw1;
mb2ic3ih10iw17oc2kh5kw3sh1sw2ph2pw0; mb1ic2ih9iw9oc2kh3kw2sh2sw3ph0pw1dh1dw0; mb1ic2ih3iw4oc3kh5kw5ph2pw2;
mb2ic2ih2iw3oc2kh3kw3ph3pw3; mb2g2ic4ih7iw10oc6kh3kw3ph1pw1; mb1g3ic6ih8iw5oc3kh3kw3sh2sw2ph1pw1;
mb1g8ic8ih9iw13oc8kh3kw3ph1pw1; mb2g32ic32ih7iw7oc32kh3kw3ph1pw1; mb2g5ic5ih11iw19oc5kh3kw3sh2sw2ph1pw1;
mb1g16ic16ih14iw14oc16kh5kw5ph2pw2; mb2g7ic7ih12iw9oc7kh7kw7ph3pw3; mb1g4ic4ih6iw21oc4kh3kw3ph2pw2dh1dw1;
mb2g3ic3ih10iw7oc6kh3kw3ph1pw1; mb1g4ic4ih9iw11oc12kh3kw3sh2sw2ph1pw1dh1dw1; mb1g2ic2ih17iw15oc2kh13kw13ph6pw6;
mb2g6ic6ih8oc6kh4oh8ph1; mb1g3ic3ih9iw10oc3kh2oh9ow10kw3ph0pw2; mb2ic2ih9iw8oc3kh3oh6ow6kw3ph-1pw0;
mb1g4ic4ih13iw12oc4kh3kw3sh4sw4; mb1ic3ih6iw5oc4kh3kw3 transposed;
mb2ic4ih5iw4oc3oh10ow8kh4kw4sh2sw2ph1pw1 transposed; mb1g6ic6ih7iw6oc6oh14ow12kh4kw4sh2sw2ph1pw1 transposed;
mb2g2ic4ih4iw5oc2oh9ow11kh3kw3sh2sw2ph0pw0 transposed; mb1ic16ih1iw1oc8kh1kw1; mb4ic7ih4iw4oc33kh3kw3ph1pw1;
mb2ic3ih7iw9oc4kh1kw5ph0pw2; mb1ic4ih9iw6oc3kh4kw1sh2sw1ph1pw0

mb1ic2id3ih4iw5oc3kd1kh1kw1; mb1ic2id5ih6iw7oc3kd3kh3kw3pd1ph1pw1; mb2ic3id4oc2kd3pd1sd2;
mb1ic2id6ih5iw9oc2kd2kh3kw4sd2sh1sw3ph1; mb1g4ic4id4ih7iw9oc4kd3kh3kw3pd1ph1pw1; mb2g3ic3id5oc6kd3sd2pd1;
mb1g2ic4id5ih6iw6oc2kd3kh3kw3pd2ph2pw2dd1dh1dw1; mb1g2ic2id7ih9iw8oc2kd5kh5kw5pd2ph2pw2;
mb1ic2id3ih3iw4oc2kd3kh3kw3sd2sh2sw2pd1ph1pw1 transposed
"""


def parsed(problem: ConvProblem | str) -> ConvProblem:
    """Return a problem that may be given as text."""
    return ConvProblem.parse(problem) if isinstance(problem, str) else problem


def changed(p: ConvProblem, **changes: Any) -> ConvProblem | None:
    """Return the problem with other values and the output size that follows from them; None if they make none."""
    names = ("input_size", "kernel_size", "stride", "padding", "dilation")
    dims = zip(*(changes.get(name, getattr(p, name)) for name in names), strict=True)
    out = tuple([output_length(n, k, s, low, high, d) for n, k, s, (low, high), d in dims])
    try:
        return p.replace(output_size=out, **{"name": "", **changes}).canonical()
    except ValueError:  # sizes that do not belong together, or that no memory holds
        return None


def default_problems() -> Iterator[ConvProblem]:
    """Yield problems for a check: each shape in float32, in channels_last, and in another dtype in turn.

    Equivalent to:
        >>> {p.ndim for p in default_problems()}
        {1, 2, 3}
    """
    others = FLOATS[1:]
    for table in _TABLE.split("\n\n"):
        for i, line in enumerate(table.split(";")):
            both = in_layouts(ConvProblem.parse(line))
            yield from both
            yield both[-1 if i // len(others) % 2 else 0].replace(dtype=others[i % len(others)])


def in_layouts(p: ConvProblem) -> list[ConvProblem]:
    """Return the problem, contiguous and, if it has images, in channels_last."""
    return [p.replace(memory_format=f) for f in dict.fromkeys((torch.contiguous_format, channels_last_of(p.ndim)))]


# ---- layers of known networks, of sizes that no small problem has ---------------------------------

_LAYERS = """
mb1ic3ih224oc32kh3sh2ph1n"MobileNetV2 stem"; mb1g32ic32ih112oc32kh3ph1n"MobileNetV2";
mb1g96ic96ih112oc96kh3sh2ph1n"MobileNetV2"; mb1g144ic144ih56oc144kh3sh2ph1n"MobileNetV2";
mb2g960ic960ih7oc960kh3ph1n"MobileNetV2"; mb1ic96ih56oc24kh1n"MobileNetV2"; mb1ic320ih7oc1280kh1n"MobileNetV2 head";
mb1g240ic240ih28oc240kh5sh2ph2n"EfficientNet"; mb1g672ic672ih14oc672kh5ph2n"EfficientNet";
mb1g1152ic1152ih7oc1152kh5ph2n"EfficientNet"; mb1ic3ih224oc96kh4sh4n"ConvNeXt stem";
mb1g96ic96ih56oc96kh7ph3n"ConvNeXt"; mb1g768ic768ih7oc768kh7ph3n"ConvNeXt"; mb1ic96ih28oc192kh2sh2n"ConvNeXt";
mb1g64ic64ih32oc64kh31ph15n"RepLKNet"; mb1ic3ih224oc64kh7sh2ph3n"ResNet stem"; mb1ic64ih56oc64kh3ph1n"ResNet";
mb1ic128ih28oc128kh3ph1n"ResNet"; mb1ic256ih14oc512kh1sh2n"ResNet"; mb1ic256ih14oc256kh3ph1n"ResNet";
mb1ic512ih7oc512kh3ph1n"ResNet"; mb1g32ic128ih56oc128kh3ph1n"ResNeXt"; mb1g8ic8ih64oc8kh3ph1n"64x64";
mb1g64ic64ih64oc64kh3ph1n"64x64"; mb1ic8ih64oc8kh3ph1n"64x64"; mb1ic64ih64oc64kh3ph1n"64x64";
mb1ic32ih32oc32kh3ph2dh1n"DeepLab"; mb1g512ic512ih32oc512kh3ph12dh11n"DeepLab";
mb1ic128ih16oc64oh32kh4sh2ph1n"DCGAN" transposed; mb2000g35ic35ih2oc35kh3ph1n"70,000 planes";
mb2200ic32ih1oc32kh3ph1n"70,400 planes"; mb1g1536ic1536iw64oc1536ow64kw4pw3n"Mamba";
mb1ic512iw199oc512kw3sw2n"wav2vec 2.0"; mb1g64ic64iw512oc64kw31pw15n"Conformer"; mb1ic64id8oc64kd3pd1n"R3D";
mb1g64ic64id14oc64kd3pd1n"X3D"; mb65537ic2ih1oc2kh3ph1n"65,537 images"; mb65537g2ic2ih1oc2kh3ph1n"65,537 images";
mb1g4ic4ih224oc4kh3ph1n"224x224"
"""


def real_layers() -> list[ConvProblem]:
    """Return layers of known networks in float32, contiguous and in channels_last."""
    return [p for line in _LAYERS.split(";") for p in in_layouts(ConvProblem.parse(line))]


# ---- problems for one kernel, and random ones ----------------------------------------------------

#: No drawn problem exceeds these: operations, and elements of one tensor.
_MOST_FLOPS, _MOST_ELEMENTS = 300_000_000, 5_000_000
#: How many are chosen for a check.
_MOST: Final = 120
#: How long the search may take.
_SECONDS = 20.0
#: Draws in any case, at most, and the number of accepted problems above which drawing ends.
_DRAWS, _MOST_DRAWS, _ENOUGH = 1_200, 20_000, 250
#: Draws after which the search ends where nothing was found: more than half of them are layers as networks have them.
_HOPELESS = 4_000
#: Above these the result of a check is compared in fewer ways: operations, elements of a kernel.
_LARGE_FLOPS, _LARGE_KERNEL = 2_500_000, 200

_SMALL = tuple(range(1, 10))
_BATCHES = (1, 2, 3, 4, 5, 7, 8, 16, 33, 65, 130)
_CHANNELS = (*_SMALL, 12, 15, 16, 17, 20, 24, 28, 31, 32, 33, 48, 63, 64, 65, 96, 128, 130, 192, 256, 257, 320, 384)
_SIZES = (*_SMALL, 10, 11, 12, 13, 14, 15, 16, 17, 20, 23, 28, 31, 32, 33, 56, 63, 64, 65, 112, 130, 160, 224, 257)
_KERNELS = (1, 2, 3, 3, 4, 5, 6, 7, 9, 11, 13, 31)
_STEPS = (1, 2, 2, 3, 4)
_OTHERS = (torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _elements(p: ConvProblem) -> list[int]:
    return [prod(shape) for shape in (p.input_shape, p.weight_shape, p.output_shape)]


def is_large(p: ConvProblem) -> bool:
    """Whether a check compares the result in fewer ways, since each costs much."""
    return p.flops > _LARGE_FLOPS or prod(p.kernel_size) > _LARGE_KERNEL


def cost(p: ConvProblem) -> float:
    """Return roughly how long a check of the problem takes, relative to other problems."""
    least = 0.02 + min(prod(p.kernel_size), _LARGE_KERNEL) * 3e-4
    return least + (p.flops / 1e8 + sum(_elements(p)) / 5e6) * (0.1 if is_large(p) else 1)


def drawn(
    accepts: Accepts, named: Sequence[ConvProblem] = (), modes: Sequence[PaddingMode] = ("zeros",)
) -> list[ConvProblem]:
    """Return up to 120 problems that a kernel accepts, without those named: known ones and their random neighbors.

    They are always the same, each time the one with the most values that were not met before for its cost; each in all
    of the padding ``modes`` that it has.
    """
    rng, end = random.Random(0), time.monotonic() + _SECONDS
    known = [*default_problems(), *real_layers()]
    found, asked = list(named), {*named}
    for number in range(-len(known), _MOST_DRAWS):
        enough, none = number >= _DRAWS and len(found) >= _ENOUGH, len(found) == len(named)
        if enough or (none and number >= _HOPELESS) or time.monotonic() > end:
            break
        start = known if number < 0 or not found or rng.random() >= 0.6 else found
        draw = _layer if none and number >= _DRAWS else _neighbor
        p = known[number] if number < 0 else draw(rng, rng.choice(start))
        if p is None or p in asked or p.empty:
            continue
        asked.add(p)
        if p.flops <= _MOST_FLOPS and max(_elements(p)) <= _MOST_ELEMENTS and accepts(p):
            found.append(p)
    values = {p: _values(p) for p in found}
    met, rest, result = {v for p in named for v in values[p]}, found[len(named) :], list[ConvProblem]()
    while rest and len(result) < _MOST:
        best = max(rest, key=lambda p: (0.01 + len(values[p] - met)) / cost(p))
        rest.remove(best)
        met |= values[best]
        result += [best, *(p for m in modes if m != "zeros" and (p := changed(best, padding_mode=m)) and accepts(p))]
    return result


def _values(p: ConvProblem) -> set[object]:
    """Return the values that a kernel may be wrong for; CUDA's grids and 16-bit counters end at 65,535."""
    names = (f.name for f in fields(p) if f.name not in ("input_size", "output_size", "name"))
    width, per_group = p.output_size[-1], (p.in_channels // p.groups, p.out_channels // p.groups)
    square = len({*p.input_size}) == 1 and p.input_size
    more = square, p.input_size[-1], width, width % 16, *per_group, p.depthwise, p.batch * p.out_channels > 65_535
    return {*enumerate((*(getattr(p, name) for name in names), *more))}


def random_problems(seed: int) -> Iterator[ConvProblem]:
    """Yield small problems without end, the same for the same seed, that PyTorch can state."""
    rng, known = random.Random(seed), [p for p in default_problems() if p.symmetric]
    while True:
        p = _neighbor(rng, _neighbor(rng, rng.choice(known)) or known[0])
        if p and p.dtype in FLOATS and not p.empty and p.symmetric and min(p.padding) >= (0, 0) and not is_large(p):
            yield p


def _neighbor(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    """Return the problem with one to three random changes; None if they make none."""
    q: ConvProblem | None = p
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        q = q and changed(q, **_change(rng, q))
    return q


def _change(rng: random.Random, p: ConvProblem) -> dict[str, Any]:
    """Return new values of one attribute, or of several that a layer's author changes together."""
    g, per_in, per_out, n = p.groups, p.in_channels // p.groups, p.out_channels // p.groups, rng.choice(_CHANNELS)
    kernel, dilation = _each(rng, p.kernel_size, _KERNELS), _each(rng, p.dilation, _STEPS)
    one, other = rng.randrange(5), rng.randrange(-1, 5)
    return rng.choice((
        {"batch": rng.choice(_BATCHES)},
        # A large batch is affordable where each image is small.
        {"batch": rng.choice(_BATCHES[-3:]), "input_size": tuple(map(effective_kernel, p.kernel_size, p.dilation))},
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
        *[{"dtype": rng.choice(FLOATS if rng.random() < 0.8 else _OTHERS)}] * 2,
        {"memory_format": torch.contiguous_format if p.channels_last else channels_last_of(p.ndim)},
        {"origin": "plain" if p.transposed else "transposed"},
        {"has_bias": not p.has_bias},
    ))  # fmt: skip


def _layer(rng: random.Random, p: ConvProblem) -> ConvProblem | None:
    """Return a layer as networks have it, with the batch, bias and direction of the problem; None if it is none."""
    channels, kernel = rng.choice((16, 32, 64, 128, 256)), (rng.choice((1, 3, 3, 4, 5, 7)),) * p.ndim
    dilation = (rng.choice((1, 1, 2)),) * p.ndim
    causal = tuple((effective_kernel(k, d) - 1, 0) for k, d in zip(kernel, dilation, strict=True))
    sizes = {"input_size": rng.choice((7, 14, 28)), "stride": rng.choice((1, 1, 2))}
    return changed(
        p,
        in_channels=channels,
        out_channels=channels,
        groups=rng.choice((1, channels)),
        kernel_size=kernel,
        dilation=dilation,
        padding=rng.choice((same_padding(kernel, dilation), causal, ((0, 0),) * p.ndim)),
        **{name: (size,) * p.ndim for name, size in sizes.items()},
        dtype=rng.choice(FLOATS if rng.random() < 0.8 else _OTHERS),
    )


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


# ---- the same convolution, smaller ------------------------------------------------------------------


#: What is made smaller, in this order, and down to which numbers.
_LIMITS = {"images": (2, 1), "groups": (16, 5, 3, 2), "channels of a group": (16, 7, 3), "rows": (16, 9, 5, 2, 1)}


def shrunk(p: ConvProblem, most_flops: int, accepts: Accepts = lambda p: True) -> ConvProblem:
    """Return a problem of at most about ``most_flops``, with equal kernel, stride, dilation, border and kind of groups.

    Each size keeps its remainder modulo the stride, so that rows that no kernel reads are still there.
    """
    for what, limits in _LIMITS.items():
        for most in limits:
            if p.flops > most_flops and not p.empty and accepts(small := _fewer(p, what, most).canonical()):
                p = small
    return p


def _fewer(p: ConvProblem, what: str, most: int) -> ConvProblem:
    """Return the problem with at most so many of one of `_LIMITS`."""
    if what == "images":
        return p.replace(batch=min(p.batch, most))
    if what == "rows":
        cuts = [min(max(0, d.output - most), max(0, (d.input - 1) // d.stride)) * d.stride for d in p.dims]
        return (
            changed(p, input_size=tuple(d.input - cut for d, cut in zip(p.dims, cuts, strict=True)), name=p.name) or p
        )
    groups = min(p.groups, most) if what == "groups" else p.groups
    channels = [n // p.groups for n in (p.in_channels, p.out_channels)]
    i, o = channels if what == "groups" else (min(n, most) for n in channels)
    return p.replace(groups=groups, in_channels=groups * i, out_channels=groups * o)


# ---- for tests -----------------------------------------------------------------------------------


def problems(
    *,
    ndim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    crops: bool = True,
    largest: int = 12,
) -> SearchStrategy[ConvProblem]:
    """Return a hypothesis strategy of small canonical problems.

    Args:
        ndim: 1, 2 or 3 dimensions only.
        dtypes: to draw from.
        crops: whether padding may be negative.
        largest: spatial size.

    Raises:
        ImportError: hypothesis is not installed.

    Equivalent to:
        >>> from hypothesis import find
        >>> find(problems(ndim=2), lambda p: p.depthwise and p.stride == (2, 2)).groups
        2
    """
    from hypothesis import strategies as st

    @st.composite
    def problem(draw: Callable[[SearchStrategy[Any]], Any]) -> ConvProblem:
        def upto(most: int, least: int = 1) -> int:
            return draw(st.integers(least, most))

        dims: list[Dimension] = []
        for _ in range(ndim or upto(3)):
            size, kernel, stride, dilation = map(upto, (largest, 5, 4, 3))
            low, high = (upto(4, -2 if crops else 0) for _ in range(2))
            size = max(size, effective_kernel(kernel, dilation) - low - high)  # the smallest input with an output
            out = output_length(size, kernel, stride, low, high, dilation)
            dims.append(Dimension(size, out, kernel, stride, low, high, dilation))
        groups = draw(st.sampled_from((1, 1, 2, 3, 5)))
        return ConvProblem(
            groups=groups, in_channels=groups * upto(3), out_channels=groups * upto(4), batch=upto(3),
            memory_format=draw(st.sampled_from((torch.contiguous_format, channels_last_of(len(dims))))),
            dtype=draw(st.sampled_from(dtypes)), has_bias=draw(st.booleans()),
            origin=draw(st.sampled_from(("plain", "transposed"))), **fields_of(dims),
        ).canonical()  # fmt: skip

    return problem()
