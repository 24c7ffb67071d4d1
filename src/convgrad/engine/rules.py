"""The rules: what is taken where nobody requested a backend and no kernel of the user's is there.

PyTorch's own kernels are, except where a rule below says otherwise. Each rule was read off the tables of
``benchmarks/results/`` (`benchmarks/cpu.py`, `benchmarks/routes.py`), where both were timed alternately. There is none
for a GPU: nobody has measured our kernels on one yet.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from operator import le

import torch

from .._compat import cpu_lacks
from ..problem import ConvProblem, Output

__all__ = ["why_native", "why_other"]

#: Bytes of all operands and the result beyond which no cache of a processor holds them.
_CACHED_BYTES = 16 << 20
#: FLOPs below which the call of a backend in Python costs more than a faster kernel gains.
_CALL = 4_000_000


def why_native(p: ConvProblem, outputs: tuple[Output, ...], device: torch.device, threads: int) -> str:
    """Why the compiled CPU kernels are expected to be faster than PyTorch's; empty where they are not."""
    if device.type != "cpu" or _mostly_padding(p):
        return ""
    return _depthwise(p, outputs, threads) if p.depthwise else _grouped(p, outputs, threads)


def _mostly_padding(p: ConvProblem) -> bool:
    """Nearly all of the image is padding, which our tiles write out."""
    padded = prod(n + max(low, 0) + max(high, 0) for n, (low, high) in zip(p.input_size, p.padding, strict=True))
    return padded > max(2**18, 16 * prod(p.input_size), 16 * prod(p.output_size))


def _depthwise(p: ConvProblem, outputs: tuple[Output, ...], threads: int) -> str:
    taps, pixels = prod(p.kernel_size), prod(p.output_size)
    one_to_one = p.dtype is torch.float32 and p.in_channels == p.out_channels and p.symmetric
    fast = one_to_one and p.ndim == 2 and max(p.dilation) == 1
    weight_alone = "grad_weight" in outputs and not {"forward", "grad_input"} & {*outputs}
    few = threads < 4
    if p.channels_last and outputs == ("forward",) and one_to_one and not (p.ndim == 3 and max(p.dilation) > 1):
        return _channels_last(
            p, outputs, taps, pixels, threads
        )  # PyTorch's is fast for these volumes and dilations too
    if not fast:
        return "PyTorch is slow for sequences, volumes, dilation, multipliers, one-sided padding and other dtypes"
    if "grad_weight" in outputs and taps >= 16:
        return "PyTorch is slow for weight gradients of wide depthwise kernels"
    if "grad_weight" in outputs:
        small = pixels < 36 if p.channels_last else 4 < pixels < 16
        return "" if weight_alone and small and few else "PyTorch is slower for depthwise weight gradients"
    if p.channels_last:
        return _channels_last(p, outputs, taps, pixels, threads)
    many_single_pixels = pixels < 4 and p.batch * p.in_channels >= 20_000 * threads
    return "" if many_single_pixels else "PyTorch is slower for contiguous depthwise images"


def _channels_last(p: ConvProblem, outputs: tuple[Output, ...], taps: int, pixels: int, threads: int) -> str:
    """PyTorch's kernels are near the memory's speed for large images and small kernels, and fast in the cache."""
    if taps > 100:
        return "PyTorch is slow for very large kernels"
    if p.ndim != 2 or max(p.stride) > 1 or max(p.dilation) > 1 or p.batch * p.in_channels * pixels < 500_000:
        return ""
    forward, in_memory = outputs == ("forward",), p.least_bytes > _CACHED_BYTES
    if pixels <= 1000 and taps <= 9:
        gains = pixels <= 400 or in_memory or threads > 1
    elif pixels <= 1000:
        gains = taps >= 49 or pixels > (60 if forward else 200)
    elif forward:
        gains = taps > 9
    else:
        gains = pixels <= 5000 and (in_memory or taps >= 49)
    return "PyTorch is slower for channels_last depthwise images of this size" if gains else ""


def _grouped(p: ConvProblem, outputs: tuple[Output, ...], threads: int) -> str:
    """Small groups: PyTorch is fast for float32 in multiples of 8 channels on small or strided images."""
    strided = max(p.stride) > 1
    if p.groups == 1:
        few = max(p.in_channels, p.out_channels) <= 16
        return "PyTorch is slow for 16 bits without their arithmetic" if few and cpu_lacks(p.dtype) else ""
    if p.dtype is not torch.float32 or any(n // p.groups % 8 for n in (p.in_channels, p.out_channels)):
        return "PyTorch is slow for groups whose channels are no multiple of 8, and for other dtypes"
    if max(p.dilation) > 1 and "grad_weight" in outputs and not strided:
        return "PyTorch is slow for weight gradients of dilated kernels"
    if strided:
        return (
            "PyTorch is slower for strided contiguous images in small groups"
            if not p.channels_last and threads >= 4
            else ""
        )
    return "PyTorch is slower for large images in small groups" if prod(p.output_size) >= 700 else ""


# ---- other ways to PyTorch's results -----------------------------------------------------------------


def why_other(p: ConvProblem, outputs: tuple[Output, ...], device: torch.device) -> tuple[str, str]:
    """A backend that is expected to be much faster than PyTorch's call as given, and why; twice nothing for none.

    Under torch.compile the graph then holds our operator, which Inductor does not look into: no small gain is worth it.
    """
    if device.type == "cpu":
        for name, applies, why in _OTHERS:
            if applies(p, outputs):
                return name, f"{why}; a compiled graph holds it as one operator"
    return "", ""


def _sixteen_bits(p: ConvProblem, outputs: tuple[Output, ...]) -> bool:
    return p.flops > 200_000 and cpu_lacks(p.dtype)  # converting costs more than fewer operations


def _small_volume(p: ConvProblem, outputs: tuple[Output, ...]) -> bool:
    """One for which PyTorch does not call oneDNN."""
    plain = p.ndim == 3 and p.dtype is torch.float32 and p.symmetric and not p.transposed and p.batch == p.groups == 1
    return (
        plain
        and prod(p.input_shape[:-1]) <= 20_480
        and 1 < min(p.kernel_size[1:]) <= 3  # oneDNN it is above
        and max(*p.stride, *p.dilation) == 1
        and p.in_channels >= 16
        and p.flops > 10**8
    )


def _of_input(p: ConvProblem, outputs: tuple[Output, ...]) -> bool:
    contiguous = p.dtype is torch.float32 and not p.channels_last
    return outputs == ("grad_input",) and contiguous and p.flops > _CALL


def _spread(p: ConvProblem, outputs: tuple[Output, ...]) -> bool:
    """Strides that no kernel bridges, of single pixels or of patches of few channels."""
    apart = max(p.stride) > 1 and all(map(le, p.kernel_size, p.stride)) and max(p.dilation) == 1
    few = p.in_channels // p.groups <= (256 if p.pointwise else 4)
    return _of_input(p, outputs) and apart and few


def _narrow(p: ConvProblem, outputs: tuple[Output, ...]) -> bool:
    """Many channels to few by a wide kernel."""
    few = p.out_channels // p.groups <= 4 and p.in_channels // p.groups > 16 and prod(p.kernel_size) >= 25
    return _of_input(p, outputs) and few


def _long(p: ConvProblem, outputs: tuple[Output, ...]) -> bool:
    """A long kernel over a sequence, in groups."""
    grouped = p.ndim == 1 and p.groups > 1 and p.in_channels // p.groups >= 16
    long = p.kernel_size[0] >= 64 and p.stride == (1,) and p.dtype is torch.float32
    return grouped and long and outputs != ("grad_weight",)


_Applies = Callable[[ConvProblem, tuple[Output, ...]], bool]
_OTHERS: tuple[tuple[str, _Applies, str], ...] = (
    ("aten:float32", _sixteen_bits, "this processor has no arithmetic for 16 bits, and PyTorch is slow without it"),
    ("aten:mkldnn", _small_volume, "PyTorch takes its own kernel for one small volume, and oneDNN's is faster"),
    ("im2col", _spread, "oneDNN is slow for the input gradient of strides wider than the kernel"),
    ("aten:channels_last", _narrow, "oneDNN is slow for the input gradient of few contiguous output channels"),
    ("aten:channels_last", _long, "oneDNN is slow for long kernels in groups of contiguous channels"),
)
