"""The rules: what is taken where nobody requested a backend, no kernel of the user's is there and nothing was measured.

PyTorch's own kernels are, except for the kinds of problem in the table below. ``benchmarks/derive.py`` writes it from
what ``benchmarks/sweep.py`` measured; `kind_of` is written by hand, from what is known of the kernels on both sides.
Those of a GPU are in `proposals`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

import torch

from .._compat import avx512_here, cpu_lacks
from ..backends import MOST_A_GROUP, aten_choice, of_patches, transformed_dimensions
from ..problem import ConvProblem, Outputs
from ..settings import threads
from .environment import mkl_at_its_best

#: Kind of problem -> what is taken, the first that can, and how many times as fast as PyTorch's call as given it was in
#: the sweep, on geometric average.
# begin of the derived lines
TABLE: dict[str, dict[str, float]] = {
    "3x3": {"native:winograd": 1.6},
    "dense": {"native": 2.8},
    "depthwise": {"native": 7.8},
    "emulated": {"native": 8.9, "aten:float32": 3.9},
    "grouped": {"native": 3.0},
    "narrow": {"native": 2.5},
    "patches": {"native": 2.7},
    "pointwise": {"native": 1.9},
    "volume": {"native:amx": 4.9, "native": 2.7},
    "wide dense": {"native:amx": 1.7},
    "wide product": {"native:amx": 1.7, "native": 1.3},
    "wide volume": {"native:amx": 5.8, "native": 1.9, "aten:mkldnn": 2.2},
}
# end of the derived lines

#: FLOPs of a pass up to which PyTorch's autograd, whose calls take up to 45 us less than ours, gains more than a kernel
#: can; and of a matrix product, in which ours gain least.
_SMALL, _SMALL_PRODUCT = 1e6, 3e6
#: Channels on both sides from which AMX gains more than packing for it takes, in a pointwise convolution.
_WIDE = 64
#: In others: channels a group on both sides, products of each weight, and FLOPs for each byte of the operands.
_FULL_TILE, _MANY_PRODUCTS, _INTENSE = 17, 96, 24
#: How many products Winograd's transform of a weight takes as long as, and that of a value along one dimension or two.
_OF_A_WEIGHT, _OF_A_VALUE = 16, {1: 8, 2: 4}
#: Of a linear layer: rows from which ours gain, and the harmonic mean of its sizes from which AMX gains with fewer.
_MANY_ROWS, _MEAN_SIZE = 5000, 250
#: FLOPs of a pass from which arithmetic takes longer than a call of oneDNN, 40 us or more; of a pass and thread, from
#: which packing for AMX pays.
_LARGE = 1e7


def special_kinds(problem: ConvProblem) -> Iterator[tuple[str, str]]:
    """The kinds of problem that one backend is for, and which; without it they are of the next kind."""
    if _fills_tiles(problem):
        yield "wide dense", "native:amx"
    if _saves_products(problem):
        yield "3x3", "native:winograd"


def kind_of(problem: ConvProblem, outputs: Outputs, emulated: bool) -> str | None:
    """What else the table calls a problem on a CPU; None of one that is PyTorch's in any case.

    Args:
        outputs: the passes asked for.
        emulated: the processor has no arithmetic for its 16 bits, with which PyTorch is slow unless it is depthwise.
    """
    if _mostly_padding(problem):
        return None
    if problem.depthwise:
        return "depthwise"
    if emulated:
        return "emulated"
    full = _full_vectors(problem)
    narrow = full and _narrow(problem, outputs)
    if (full and not narrow) or _half_the_products(problem):
        return _volume(problem) or _scattered(problem, outputs)
    if problem.flops < (_SMALL_PRODUCT if problem.unpadded_pointwise else _SMALL) and _cheap_call(problem):
        return None
    if problem.groups > 1:
        return "grouped"
    if not problem.unpadded_pointwise:
        return "narrow" if narrow else "dense"
    wide = min(problem.in_channels, problem.out_channels) >= _WIDE and problem.flops >= _LARGE * threads()
    return "wide product" if wide and problem.dtype is torch.float32 and problem.matrix_product else "pointwise"


def by_rule(problem: ConvProblem, outputs: Outputs, device: torch.device) -> Iterator[tuple[str, str]]:
    """The backends that are expected to be faster than PyTorch's own on a CPU, best first, and why."""
    lacking = cpu_lacks(problem.dtype)
    on_cpu = device.type == "cpu"
    for_mkl = on_cpu and not lacking and mkl_at_its_best() and _is_linear(problem)
    if on_cpu and not lacking and _one_patch(problem):
        yield "aten:patches", "the kernel covers the whole input, so that a pass is one product of matrices as they lie"
    special = [kind for kind, _ in special_kinds(problem)]
    for kind in (*special, kind_of(problem, outputs, bool(lacking))) if on_cpu else ():
        for way, gain in TABLE.get(kind or "", {}).items():
            if for_mkl and not _beats_mkl(way, problem):
                break
            if way != "aten:float32" or worth_converting(problem, outputs, lacking):
                yield way, f"on {kind} problems {way} is {gain}x as fast as PyTorch, on average"
    if on_cpu and not lacking and "grad_input" in outputs and _slow_scatter(problem):
        yield "aten:patches", "kernels do not overlap, and PyTorch's gradient of the input takes several times as long"
    if for_mkl:
        yield "aten:matmul", "a linear layer, and MKL is made for this processor"


def worth_converting(p: ConvProblem, outputs: Outputs, lacking: str) -> bool:
    """Whether each value of the operands is in ten products or more; in fewer, converting takes longer than they do.

    For the gradient of the weight it is worth while in any case: some processors have no kernel for that in 16 bits.

    Args:
        lacking: `cpu_lacks`.
    """
    values = sum(map(prod, (p.input_shape, p.weight_shape, p.output_shape)))
    return "grad_weight" in outputs or (lacking == "all" and p.flops >= 20 * values)


def linear_gains(elements: int, out_features: int, in_features: int) -> bool:
    """Whether a linear layer is large enough to gain as a pointwise convolution: as such it costs 50 to 80 us more.

    On one and two threads of a Zen 4, with 64 to 46000 rows and 2 to 4096 features that lie in no cache, 449 layers of
    4 to 70 million FLOPs a pass and thread were 1.42x to 1.76x as fast as PyTorch's on geometric average, the least
    0.80x below 16 million and 0.95x above. With 32 to 160 rows, 206 layers were 1.22x to 1.50x, the least 0.99x; with
    fewer rows two of 61 lost, 0.89x. (For MKL see `_beats_mkl`.) One output feature is no product of matrices
    (0.6x to 0.8x). Nor is one input feature, whose stride may be anything: as an image it may lie contiguously, and its
    result then has no rows in memory.

    Args:
        elements: of the input.
    """
    enough = 2 * elements * out_features >= 2**24 * threads() and min(out_features, in_features) > 1
    return enough and elements >= 32 * in_features


def _is_linear(p: ConvProblem) -> bool:
    """A linear layer, which is an image of one row in channels_last."""
    return p.matrix_product and p.channels_last and p.groups == p.batch == p.input_size[0] == 1


def _beats_mkl(way: str, p: ConvProblem) -> bool:
    """Whether this kernel of ours computes a linear layer faster than MKL at its best.

    With few rows, packing the weight and writing its gradient are much of the work; with few output features packing
    the input is; with many input features both are as fast as arithmetic lets them. Elsewhere 48 random layers were
    1.16x (one thread) and 1.20x (two) as fast on a Xeon with AVX-512, the least 0.97x. Without it nothing was measured.

    AMX multiplies so fast that packing is much of the work where any size is small; 529 random layers that it computes
    were 1.31x (one thread) and 1.22x (two) as fast, 10 of them below 0.95x.
    """
    rows, many = p.input_size[1], p.input_size[1] >= _MANY_ROWS
    if way == "native:amx":
        return many or 3 / (1 / rows + 1 / p.in_channels + 1 / p.out_channels) >= _MEAN_SIZE
    return many and p.in_channels <= 512 and p.out_channels >= 48 and avx512_here()


def _fills_tiles(p: ConvProblem) -> bool:
    """Tiles of AMX gain more than packing takes: that of the weight, which is in many products, and of the rest."""
    if p.dtype is not torch.float32 or p.flops < _LARGE * threads() or (p.matrix_product and p.groups == 1):
        return False
    channels, products = min(p.in_channels, p.out_channels) // p.groups, p.batch * prod(p.output_size)
    return channels >= _FULL_TILE and products >= _MANY_PRODUCTS and p.flops >= _INTENSE * p.least_bytes


def _saves_products(p: ConvProblem) -> bool:
    """Winograd's algorithm saves more products than its transforms take: of values, which are in a product for each
    channel on the other side, and of weights, which are in one for each tile."""
    along = transformed_dimensions(p)
    if not along or p.flops < _SMALL or p.dtype.itemsize < 4:
        return False
    tiles, elements = p.batch, 1
    for d, (size, kernel, dilation) in enumerate(zip(p.output_size, p.kernel_size, p.dilation, strict=True)):
        apart = min(dilation, size)  # the results of a tile; with each of those between them other tiles begin
        tiles *= apart * ceil(size / apart / 2) if d in along else size
        elements *= 4 if d in along else kernel
    products = tiles * elements * p.in_channels * p.out_channels // p.groups
    # 1.5 or 2.25 at best; a tile at a border computes more than there is
    saved = p.flops / 2 * _part_inside(p) / products
    per_channel = p.groups / p.in_channels + p.groups / p.out_channels
    return saved >= 1 + _OF_A_WEIGHT / tiles + _OF_A_VALUE[len(along)] * per_channel


def _mostly_padding(p: ConvProblem) -> bool:
    """Our tiles, which hold the padding, would have more of it than there are products to compute."""
    padded = prod(dim.padded for dim in p.dims)
    return padded - prod(p.input_size) > prod(p.output_size) * prod(p.kernel_size)


def _full_vectors(p: ConvProblem) -> bool:
    """A vector of channels, as oneDNN computes with, is as full as one of pixels is in our kernels.

    With more than 16 channels a group it is, except in four cases. Contiguous images of at most eight results fill half
    of it. (Few inputs are read as they lie.) Small problems, unless their kernels are large and do not overlap, take
    less time than a call of oneDNN; larger ones with several positions for each channel have few products for the time
    that laying them out anew takes. So have sequences. With 12 to 16 channels it is as full where ours hold pixels of
    small slices of a volume, and in any case where large kernels do not overlap. In float64, which oneDNN lacks, only
    what does not overlap is PyTorch's: it writes columns down, and there it writes no element twice.
    """
    inputs, outputs = p.in_channels // p.groups, p.out_channels // p.groups
    if p.depthwise or p.unpadded_pointwise or (p.dtype is torch.float64 and _overlapping(p)):
        return False
    if p.flops >= _SMALL and not _overlapping(p) and prod(p.kernel_size) >= 50:
        return True
    if max(inputs, outputs) <= 16:
        small_slices = p.ndim == 3 and prod(p.output_size[1:]) <= 128
        undilated = max(p.dilation) == 1 < max(p.kernel_size)
        return small_slices and undilated and min(inputs, outputs) >= 12 and p.dtype.itemsize == 4
    if p.flops < 3 * _SMALL and (_overlapping(p) or prod(p.kernel_size) <= 16):
        return False
    if _overlapping(p) and p.flops < _LARGE and p.batch * prod(p.output_size) >= 4 * max(inputs, outputs):
        return False
    return p.ndim > 1 and (outputs > 8 or p.channels_last or not _overlapping(p))


def _narrow(p: ConvProblem, outputs: Outputs) -> bool:
    """A result of at most eight channels, which oneDNN's vectors hold: an image by a decoder, or its gradient.

    So are the gradients of a first layer, whose images have long rows and few channels and lie in PyTorch's order.
    Where kernels do not overlap the problem is a matrix product of patches.
    """
    long_rows = p.ndim == 2 and p.output_size[-1] >= 64 and not p.channels_last and p.dtype is torch.float32
    first_layer = long_rows and p.in_channels <= 16 * p.groups and "forward" not in outputs
    channels = {"forward": p.out_channels, "grad_input": p.in_channels}
    few = p.groups == 1 and any(channels.get(output, 9) <= 8 for output in outputs)
    return _overlapping(p) and (few or first_layer)


def _overlapping(p: ConvProblem) -> bool:
    return any(step < k for step, k in zip(p.stride, p.kernel_size, strict=True))


def _one_patch(p: ConvProblem) -> bool:
    """A kernel as large as the input, as in an encoder that gets its patches one by one."""
    return of_patches(p) and prod(p.output_size) == 1 and p.flops >= _SMALL


def _slow_scatter(p: ConvProblem) -> bool:
    """Kernels that do not overlap, of a problem whose gradient of the input oneDNN is slow at; it has no float64."""
    return of_patches(p) and p.flops >= _SMALL and p.dtype.itemsize <= 4


def _patches(p: ConvProblem) -> bool:
    """Kernels that do not overlap: the problem is a matrix product of patches."""
    return not (_overlapping(p) or p.unpadded_pointwise)


def _volume(p: ConvProblem) -> str | None:
    """A volume for which PyTorch does not call oneDNN, but writes columns down: k**3 times the input.

    It does so with one image of up to 20480 elements, and its count leaves out the width of a volume. Our kernels gain
    where the weights, which they lay out anew, are used often enough. Wider volumes are for oneDNN by name, which gets
    copies: these are worth it if an input is in several columns, and a column as wide as a vector.
    """
    positions, channels = prod(p.output_size), (p.in_channels // p.groups, p.out_channels // p.groups)
    if p.ndim < 3 or p.flops < _LARGE or p.dtype is not torch.float32 or not _writes_columns(p):
        return None
    if max(channels) <= MOST_A_GROUP and positions >= 12 * max(channels):
        return "volume"
    repeated = any(k > step for k, step in zip(p.kernel_size, p.stride, strict=True))
    wide = repeated and min(channels) >= 16 and positions >= 200
    return "wide volume" if wide else None


def _scattered(p: ConvProblem, outputs: Outputs) -> str | None:
    """The gradient of the input alone, or the result of a transposed convolution, by kernels that do not overlap.

    Ours writes each element once, in its place; kernels of more than 512 elements are too large for that.
    """
    large = p.flops >= _SMALL and p.dtype.itemsize <= 4 and prod(p.kernel_size) <= 512
    return "patches" if large and outputs == ("grad_input",) and _patches(p) else None


def _half_the_products(p: ConvProblem) -> bool:
    """A large problem that takes oneDNN at most half as many instructions as our kernels.

    It multiplies two numbers of 16 bits at a time, which ours convert, leaves out products with the padding of images,
    and where kernels do not overlap it loads a vector of channels where ours gather pixels. Groups must fill half a
    vector of its, and contiguous matrix products of up to 128 channels are ours: it lays them out anew, which takes
    longer than their arithmetic.
    """
    if p.flops < _LARGE or p.dtype.itemsize > 4:
        return False
    if p.groups == 1 and _patches(p) and p.ndim > 1:
        return True
    narrower = min(p.in_channels, p.out_channels) / p.groups
    wide = narrower >= 8
    if p.dtype.itemsize == 2:
        return p.channels_last or (wide and not (p.unpadded_pointwise and narrower <= 128))
    return wide and p.ndim > 1 and _part_inside(p) <= 0.5


def _part_inside(p: ConvProblem) -> float:
    """The part of the products whose input lies inside the image and not in its padding."""
    part = 1.0
    for n, out, k, stride, low, _, dilation in p.dims:
        starts = (low - i * dilation for i in range(k))  # in the padded image, where this kernel element's input begins
        part *= sum(max(0, min(out, -(-(s + n) // stride)) - max(0, -(-s // stride))) for s in starts) / (k * out)
    return part


def _cheap_call(p: ConvProblem) -> bool:
    """Whether PyTorch calls a matrix product instead of oneDNN, once for each image, as it does with a small one.

    A volume in channels_last it copies first.
    """
    copied = p.ndim == 3 and p.channels_last
    return p.groups == 1 and p.dtype.itemsize > 2 and not copied and _writes_columns(p)


def _writes_columns(p: ConvProblem) -> bool:
    """Whether PyTorch computes matrix products of columns (or of the image itself), and does not call oneDNN."""
    return aten_choice(p, torch.device("cpu")).name.startswith("Slow")
