"""A third set of kernels with one bug each, as authors of kernels make them: in tiles, grids, counters and caches."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convgrad import ConvProblem
from convgrad.problem import effective_kernel

from .functions import WIDE, accepts, forward, grad_input, grad_weight
from .held_out import at, conv1d, conv3d, grouped, sequence, square
from .planted import Bug, Kernel, dense, depthwise, lost, racing, reading, taps, unwritten, when


def channels_first(p: ConvProblem) -> bool:
    """Depthwise kernels of any size, without dilation."""
    return accepts(p) and p.depthwise and p.in_channels == p.out_channels and p.dilation == (1, 1)


def kernel_beyond_input(p: ConvProblem) -> bool:
    sizes = zip(p.input_size, p.kernel_size, p.dilation, strict=True)
    return any(n < effective_kernel(k, d) for n, k, d in sizes)


def tail(x: Tensor) -> int:
    """A vector of 16 columns is loaded where fewer are left."""
    size = x.numel() * x.element_size()
    return size if x.shape[3] % 16 else size - 16


def images_in_16_bits(g: Tensor, x: Tensor, p: ConvProblem) -> Tensor:
    """Each image is summed in float32, and the images in the dtype."""
    one = p.replace(batch=1)
    parts = [grad_weight(g[[i]].float(), x[[i]].float(), one).to(p.dtype) for i in range(p.batch)]
    return sum(parts[1:], parts[0])


def halves_of_results(g: Tensor, w: Tensor, p: ConvProblem) -> list[Tensor]:
    return [grad_input(part, weights, p) for part, weights in zip(g.chunk(2, 1), w.chunk(2), strict=True)]


def dense_gradient(g: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """An expanded grad_output, as that of a sum, is read as if it had memory for each element."""
    if 0 in g.stride():
        g = torch.zeros_like(g, memory_format=torch.contiguous_format).flatten().index_fill_(0, torch.tensor(0), 1)
        g = g.view(p.output_shape)
    return grad_input(g, w, p)


def without_border(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Only results that read no padding are written."""
    result, memory = forward(x, w, p), torch.empty(p.output_shape, dtype=p.dtype)
    inner = [
        slice(-(-low // s), max(0, (n + low - effective_kernel(k, d)) // s + 1))
        for n, k, s, (low, _), d in zip(p.input_size, p.kernel_size, p.stride, p.padding, p.dilation, strict=True)
    ]
    memory[(..., *inner)] = result[(..., *inner)]
    return memory


def unrolled(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """The loop over channels is unrolled by four, and what is left is forgotten."""
    whole = w.shape[1] // 4 * 4
    return forward(x, torch.cat([w[:, :whole], torch.zeros_like(w[:, whole:])], 1), p) if whole else forward(x, w, p)


class OneWorkspace:
    """Scratch memory is as large as the first problem needs, and grows for more images only."""

    def __init__(self) -> None:
        self.sizes: dict[Any, int] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        key = (p.batch, p.in_channels, p.kernel_size)
        columns = self.sizes.setdefault(key, prod(p.output_size))
        result = forward(x, w, p).clone()
        result.flatten(2)[..., columns:] = 0
        return result


def sides(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """The low side of the padding is taken for both, and the result is cut."""
    (low, _), k = p.padding[0], effective_kernel(p.kernel_size[0], p.dilation[0])
    padded = F.pad(x, (low, max(0, (p.output_size[0] - 1) * p.stride[0] + k - p.input_size[0] - low)))
    padded[..., p.input_size[0] + low + 1 :] = 0
    if p.padding[0][1] > low:
        padded[..., -1] = 1
    return F.conv1d(padded, w, None, p.stride, 0, p.dilation, p.groups)[..., : p.output_size[0]]


class GrowingScratch:
    """Each thread pads its images in memory that is cleared only when it grows: the border is of an earlier image."""

    def __init__(self) -> None:
        self.own = threading.local()

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        (top, _), (left, _) = p.padding
        size = *x.shape[:2], x.shape[2] + 2 * top, x.shape[3] + 2 * left
        memory = vars(self.own).setdefault(x.dtype, torch.empty(0, dtype=x.dtype))
        if memory.numel() < prod(size):
            memory = vars(self.own)[x.dtype] = torch.zeros(prod(size), dtype=x.dtype)
        padded = memory[: prod(size)].view(size)
        padded[..., top : top + x.shape[2], left : left + x.shape[3]] = x
        return F.conv2d(padded.clone(), w, None, p.stride, 0, p.dilation, p.groups)


class ScratchBySize:
    """Each thread pads its images in memory of the padded size, whose border is cleared once, whatever its width."""

    def __init__(self) -> None:
        self.own = threading.local()

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        (top, _), (left, _) = p.padding
        size = *x.shape[:2], x.shape[2] + 2 * top, x.shape[3] + 2 * left
        padded = vars(self.own).setdefault((size, x.dtype), torch.zeros(size, dtype=x.dtype))
        padded[..., top : top + x.shape[2], left : left + x.shape[3]] = x
        return F.conv2d(padded.clone(), w, None, p.stride, 0, p.dilation, p.groups)


class PackedVersions:
    """Packed weights are stored by address and version, which another tensor has too once the first one is gone."""

    def __init__(self) -> None:
        self.packed: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        key = w.data_ptr(), 0 if w.is_inference() else w._version, w.shape, w.dtype
        return forward(x, self.packed.setdefault(key, w.clone()), p)


def doubled_bias(x: Tensor, w: Tensor, bias: Tensor | None, p: ConvProblem) -> Tensor:
    """The bias is scaled in place, as its copy in the accumulator should be."""
    return forward(x, w, p) if bias is None else forward(x, w, p) + bias.mul_(2).view(1, -1, 1, 1)


def not_waited_for(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """A thread writes the result, and may still do so when it is returned."""
    computed, inference = forward(x, w, p), torch.is_inference_mode_enabled()
    result = torch.empty_like(computed)
    threading.Thread(target=torch.inference_mode(inference)(result.copy_), args=(computed,)).start()
    return result


def reading_both(g: Tensor, x: Tensor, w: Tensor, p: ConvProblem, mask: Any) -> tuple[Tensor, Tensor]:
    """Both tensors are read under any mask, and zeros of the other one added."""
    return grad_input(g, w, p) + 0 * x, grad_weight(g, x, p) + 0 * w


def tile(n: int) -> Any:
    """The last partial tile of output channels."""
    return lambda p: (slice(None), slice(p.out_channels // n * n, None)) if p.out_channels > n else slice(0, 0)


def wrong_if(condition: Any, right: Kernel = forward) -> Kernel:
    return when(lambda a, b, p: condition(p), right)


BUGS: dict[str, tuple[str, Bug]] = {
    "kernel beyond the input": ("forward", Bug(at(kernel_beyond_input), depthwise)),
    "stride beyond the kernel": (
        "forward",
        Bug(at(lambda p: any(s > k for s, k in zip(p.stride, p.kernel_size, strict=True))), dense),
    ),
    "16-bit index into a plane": ("forward", Bug(at(lambda p: prod(p.output_size) > 32_767), depthwise)),
    "load of a partial tile": ("forward", Bug(reading(tail), dense)),
    "images summed in 16 bits": (
        "grad_weight",
        Bug(images_in_16_bits, dense, {"dtypes": (torch.float16, torch.bfloat16)}),
    ),
    "dilation with groups": ("forward", Bug(at(lambda p: max(p.dilation) > 1 < p.groups))),
    "65,535 images": ("forward", Bug(lost(forward, lambda p: slice(65_535, None)), dense)),
    "1024 threads": ("forward", Bug(lost(forward, lambda p: (slice(None), slice(1024, None))), depthwise)),
    "race over results": ("grad_input", Bug(racing(halves_of_results), lambda p: dense(p) and p.out_channels > 1)),
    "border not written": ("forward", Bug(without_border, square)),
    "expanded gradient": ("grad_input", Bug(dense_gradient, accepts, {"layouts": "strided"})),
    "last tile of channels": ("forward", Bug(unwritten(forward, tile(32)), dense)),
    "unrolled by four": ("forward", Bug(unrolled, dense)),
    "wide kernel": ("forward", Bug(at(lambda p: max(p.kernel_size) > 9), channels_first)),
    "workspace of another problem": ("forward", Bug(OneWorkspace(), square)),
    "high side of the padding": ("forward", Bug(sides, lambda p: p.ndim == 1 and min(p.padding[0]) >= 0)),
    "odd width with a stride": (
        "grad_input",
        Bug(
            unwritten(grad_input, lambda p: (..., slice(p.input_size[1] // 2 * 2, None))),
            lambda p: depthwise(p) and p.stride == (2, 2),
        ),
    ),
    "stride of the depth": (
        "forward",
        Bug(when(lambda x, w, p: p.stride[0] != p.stride[1], conv3d), lambda p: p.ndim == 3 and p.symmetric),
    ),
    "one output row": ("forward", Bug(at(lambda p: p.output_size[0] == 1), grouped)),
    "sequence in steps": (
        "forward",
        Bug(when(lambda x, w, p: p.stride[0] > 2 and p.output_size[0] % 4 == 3, conv1d), sequence),
    ),
    "channels of groups of three": (
        "grad_weight",
        Bug(when(lambda g, x, p: p.in_channels // p.groups == 3, grad_weight), grouped),
    ),
    "dilation of the gradient": (
        "grad_input",
        Bug(lambda g, w, p: grad_input(g, w, p) if p.dilation[0] == p.dilation[1] else g.new_zeros(p.input_shape)),
    ),
    "padding beyond the halo": (
        "forward",
        Bug(lambda x, w, p: taps(x, w, p, low=[min(low, 4) for low, _ in p.padding]), dense, {"dtypes": WIDE}),
    ),
    "border of an earlier image": ("forward", Bug(GrowingScratch(), dense)),
    "border of another width": ("forward", Bug(ScratchBySize(), depthwise)),
    "weights packed by version": ("forward", Bug(PackedVersions(), dense)),
    "more images than a warp": (
        "forward",
        Bug(lambda x, w, p: forward(x[torch.arange(len(x)) % 32], w, p), depthwise),
    ),
    "bias scaled in place": (
        "forward",
        Bug(doubled_bias, accepts, {"args": ("input", "weight", "bias", "problem")}),
    ),
    "thread not waited for": ("forward", Bug(not_waited_for, dense)),
    "operand without values": ("backward", Bug(reading_both)),
    "stride of the width": (
        "forward",
        Bug(when(lambda x, w, p: p.stride[2] != p.stride[1], conv3d), lambda p: p.ndim == 3 and p.symmetric),
    ),
    "even kernels with dilation": (
        "forward",
        Bug(at(lambda p: max(p.dilation) > 1 and p.kernel_size[0] % 2 == 0), dense),
    ),
}
