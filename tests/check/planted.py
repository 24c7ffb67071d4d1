"""Kernels with one bug each, as real kernels have them, and right ones of different narrowness."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from convgrad import ConvProblem

from .functions import WIDE, accepts, forward, grad_input, grad_weight

Kernel = Callable[..., Tensor]
Condition = Callable[[Tensor, Tensor, ConvProblem], bool]


def by_64(p: ConvProblem) -> bool:
    return accepts(p) and p.in_channels % 64 == 0


def depthwise(p: ConvProblem) -> bool:
    return accepts(p) and p.depthwise and p.in_channels == p.out_channels and p.kernel_size in {(3, 3), (5, 5)}


def dense(p: ConvProblem) -> bool:
    return accepts(p) and p.groups == 1


class Bug(NamedTuple):
    """A kernel that is wrong, what it accepts, and options of `register`."""

    kernel: Kernel
    accepts: Callable[[ConvProblem], bool] = accepts
    options: Mapping[str, Any] = MappingProxyType({})


# ---- what bugs are made of -----------------------------------------------------------------------


def taps(x: Tensor, w: Tensor, p: ConvProblem, **wrong: Any) -> Tensor:
    """The forward, one shifted image for each element of the weight, with some attributes taken for others."""
    stride, dilation = wrong.get("stride", p.stride), wrong.get("dilation", p.dilation)
    low = wrong.get("low", [low for low, _ in p.padding])
    margin = max(
        s * o + k * d + abs(a) for s, o, k, d, a in zip(stride, p.output_size, w.shape[2:], dilation, low, strict=True)
    )
    padded = F.pad(x, [margin] * 4).unflatten(1, (p.groups, -1))
    w = w.unflatten(0, (p.groups, -1))
    sums = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    result = torch.zeros(p.batch, p.groups, w.shape[1], *p.output_size, dtype=sums)
    for i in range(w.shape[3]):
        for j in range(w.shape[4]):
            y, z = (margin - a + k * d for a, k, d in zip(low, (i, j), dilation, strict=True))
            rows = slice(y, y + stride[0] * (p.output_size[0] - 1) + 1, stride[0])
            columns = slice(z, z + stride[1] * (p.output_size[1] - 1) + 1, stride[1])
            part = padded[..., rows, columns].to(sums)
            result += torch.einsum("ngiyx,goi->ngoyx", part, w[..., i, j].to(sums))
    return result.flatten(1, 2).to(x.dtype)


def when(condition: Condition, right: Kernel = forward) -> Kernel:
    """Twice the result where the condition holds."""

    def kernel(a: Tensor, b: Tensor, p: ConvProblem) -> Tensor:
        result = right(a, b, p)
        return result * 2 if condition(a, b, p) else result

    return kernel


def lost(right: Kernel, part: Callable[[ConvProblem], Any], fill: float = 0.0) -> Kernel:
    """Some elements are not computed."""

    def kernel(a: Tensor, b: Tensor, p: ConvProblem) -> Tensor:
        result = right(a, b, p).contiguous()
        result[part(p)] = fill
        return result

    return kernel


def unwritten(right: Kernel, part: Callable[[ConvProblem], Any]) -> Kernel:
    """Some elements are left as they were allocated."""

    def kernel(a: Tensor, b: Tensor, p: ConvProblem) -> Tensor:
        result = right(a, b, p)
        memory = torch.empty(result.shape, dtype=result.dtype)
        kept = memory[part(p)].clone()
        memory.copy_(result)
        memory[part(p)] = kept
        return memory

    return kernel


def in_float32(right: Kernel) -> Kernel:
    return lambda a, b, p: right(a.float(), b.float(), p).to(p.dtype)


def crash_at(size: tuple[int, int]) -> Kernel:
    def kernel(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        if x.shape[2:] == size:
            ctypes.string_at(0)
        return forward(x, w, p)

    return kernel


def reading(offset: Callable[[Tensor], int], which: int = 0) -> Kernel:
    """A vector is read that lies outside an operand; what it holds does not matter."""

    def kernel(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        operand = (x, w)[which]
        ctypes.string_at(operand.data_ptr() + offset(operand), 16)
        return forward(x, w, p)

    return kernel


def end(operand: Tensor) -> int:
    return operand.numel() * operand.element_size()


class OneBuffer:
    """Every call overwrites what the call before it returned."""

    def __init__(self) -> None:
        self.buffers: dict[ConvProblem, Tensor] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        result = forward(x, w, p).contiguous(memory_format=p.memory_format)
        return self.buffers.setdefault(p, result.clone()).copy_(result)


class SharedScratch:
    """All threads pad their images in the same memory."""

    def __init__(self) -> None:
        self.scratch: dict[ConvProblem, Tensor] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        scratch = self.scratch.setdefault(p, torch.empty_like(x)).copy_(x)
        time.sleep(0)
        return forward(scratch, w, p).clone()


class PackedWeights:
    """Weights are packed once for each shape, whatever their values."""

    def __init__(self) -> None:
        self.packed: dict[Any, Tensor] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        return forward(x, self.packed.setdefault((w.shape, w.dtype), w.clone()), p)


class PackedTensors:
    """Weights are packed once for each tensor: a step of the optimizer changes nothing."""

    def __init__(self) -> None:
        self.packed: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        known = self.packed.get(id(w))
        if known is None or known[0] is not w:
            known = self.packed[id(w)] = (w, w.clone())
        return forward(x, known[1], p)


def border_of_numpy(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """The image is padded in memory that is not zero everywhere, and PyTorch does not know of it."""
    (top, _), (left, _) = p.padding
    padded = np.empty((*x.shape[:2], x.shape[2] + 2 * top, x.shape[3] + 2 * left), x.numpy().dtype)
    padded[:, :, top : top + x.shape[2], left : left + x.shape[3]] = x.numpy()
    return F.conv2d(torch.from_numpy(padded), w, None, p.stride, 0, p.dilation, p.groups)


def racing(parts: Callable[[Tensor, Tensor, ConvProblem], list[Tensor]]) -> Kernel:
    """Two threads add to one result, each reading it before the other has written."""

    def kernel(a: Tensor, b: Tensor, p: ConvProblem) -> Tensor:
        found = parts(a, b, p)
        result, inference = torch.zeros_like(found[0]), torch.is_inference_mode_enabled()

        @torch.inference_mode(inference)  # of which a new thread knows nothing
        def add(part: Tensor) -> None:
            before = result.clone()
            time.sleep(0)
            result.copy_(before + part)

        threads = [threading.Thread(target=add, args=(part,)) for part in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return result

    return kernel


def halves_of_channels(x: Tensor, w: Tensor, p: ConvProblem) -> list[Tensor]:
    return [forward(part, weights, p) for part, weights in zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)]


def halves_of_images(g: Tensor, x: Tensor, p: ConvProblem) -> list[Tensor]:
    return [grad_weight(part, images, p) for part, images in zip(g.chunk(2), x.chunk(2), strict=True)]


def any_order(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Atomic additions: the order of the sum is another in every run."""
    order = torch.randperm(w.shape[1])
    return taps(x[:, order].contiguous(), w[:, order].contiguous(), p)


def writing(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    result = forward(x, w, p)
    x[..., -1] = 0
    return result


def narrow_sums(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Channel by channel, each sum rounded to the dtype."""
    parts = [forward(x[:, [c]], w[:, [c]], p) for c in range(x.shape[1])]
    return sum(parts[1:], parts[0])


def repeated_border(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    low = [low for low, _ in p.padding]
    padded = F.pad(x.double(), (low[1], low[1], low[0], low[0]), mode="replicate").to(x.dtype)
    return F.conv2d(padded, w, None, p.stride, 0, p.dilation, p.groups)


def mixed_groups(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Output channel o belongs to group o % groups."""
    order = torch.arange(p.out_channels).view(p.groups, -1).t().flatten()
    return forward(x, w[order], p)[:, torch.argsort(order)]


def swapped(p: ConvProblem, name: str) -> dict[str, Any]:
    value = [low for low, _ in p.padding] if name == "low" else getattr(p, name)
    return {name: (value[0], value[0])}


def from_the_start(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Reads the memory from where it was allocated, not from where the tensor begins."""
    return forward(x.as_strided(x.shape, x.stride(), 0), w, p)


def bias_twice(x: Tensor, w: Tensor, bias: Tensor | None, p: ConvProblem) -> Tensor:
    result = forward(x, w, p)
    return result if bias is None else result + 2 * bias.view(1, -1, 1, 1)


def zeros_times_the_border(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """What lies outside of the image is read in its last row and column, and multiplied by zero."""
    result = forward(x, w, p)
    spoiled = (x[..., -1:, -1:] * 0).sum((1, 2, 3)).view(-1, 1, 1, 1)
    return result + spoiled.to(result.dtype) if max(p.padding)[0] else result


PLANES = 65_535


def planes(p: ConvProblem) -> Any:
    return torch.arange(p.batch * p.out_channels).view(p.batch, -1) >= PLANES


FORWARD: dict[str, Bug] = {
    "float64 in float32": Bug(in_float32(forward), by_64),
    "one image": Bug(when(lambda x, w, p: len(x) == 1), by_64),
    "three images and more": Bug(when(lambda x, w, p: len(x) >= 3), by_64),
    "square images": Bug(when(lambda x, w, p: x.shape[2] == x.shape[3]), by_64),
    "images that are not square": Bug(when(lambda x, w, p: x.shape[2] != x.shape[3]), depthwise),
    "contiguous input": Bug(when(lambda x, w, p: not p.channels_last), by_64),
    "channels_last taken for contiguous": Bug(
        lambda x, w, p: forward(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()), w, p), dense
    ),
    "300 channels": Bug(when(lambda x, w, p: x.shape[1] >= 300)),
    "more than 64 columns": Bug(when(lambda x, w, p: x.shape[3] > 64), depthwise),
    "more than 64 images": Bug(when(lambda x, w, p: len(x) > 64), depthwise),
    "crash at 64x64": Bug(crash_at((64, 64)), depthwise),
    "65,535 planes": Bug(lost(forward, planes), depthwise),
    "last column of an odd width": Bug(
        lost(forward, lambda p: (..., slice(p.output_size[1] - (p.output_size[1] % 8 > 0), None))), dense
    ),
    "padding of the rows for the columns": Bug(lambda x, w, p: taps(x, w, p, **swapped(p, "low"))),
    "stride of the rows for the columns": Bug(lambda x, w, p: taps(x, w, p, **swapped(p, "stride"))),
    "dilation ignored": Bug(lambda x, w, p: taps(x, w, p, dilation=(1, 1))),
    "flipped weight": Bug(lambda x, w, p: forward(x, w.flip(2, 3), p), depthwise),
    "groups mixed": Bug(mixed_groups),
    "border repeated": Bug(repeated_border, depthwise),
    "race": Bug(racing(halves_of_channels), dense, {"dtypes": WIDE}),
    "atomics": Bug(any_order, dense, {"dtypes": WIDE}),
    "shared scratch": Bug(SharedScratch(), depthwise),
    "read behind the input": Bug(reading(end), depthwise),
    "read in front of the weight": Bug(reading(lambda w: -16, 1), by_64),
    "writes its input": Bug(writing, by_64),
    "last row of four not written": Bug(
        unwritten(forward, lambda p: (..., slice(p.output_size[0] // 4 * 4, None), slice(None))), depthwise
    ),
    "sums in 16 bits": Bug(narrow_sums, dense, {"dtypes": (torch.float16, torch.bfloat16)}),
    "storage offset ignored": Bug(from_the_start),
    "bias twice": Bug(bias_twice, accepts, {"args": ("input", "weight", "bias", "problem")}),
    "one buffer": Bug(OneBuffer(), depthwise),
    "packed weights": Bug(PackedWeights(), dense),
    "packed tensors": Bug(PackedTensors(), dense),
    "padding not written": Bug(border_of_numpy, depthwise, {"dtypes": WIDE}),
    "bfloat16 through float16": Bug(
        lambda x, w, p: forward(x.half(), w.half(), p).to(p.dtype), dense, {"dtypes": torch.bfloat16}
    ),
    "bias of every eighth channel": Bug(
        lambda x, w, b, p: forward(x, w, p) + (0 if b is None else b[torch.arange(len(b)) % 8].view(1, -1, 1, 1)),
        accepts,
        {"args": ("input", "weight", "bias", "problem"), "dtypes": WIDE},
    ),
    "zero times infinity": Bug(zeros_times_the_border, depthwise),
}

GRADIENTS: dict[str, tuple[str, Bug]] = {
    "first image only": ("grad_weight", Bug(lambda g, x, p: grad_weight(g[:1], x[:1], p.replace(batch=1)), dense)),
    "last row lost": ("grad_weight", Bug(lambda g, x, p: grad_weight(_without_last_row(g), x, p), depthwise)),
    "race over images": ("grad_weight", Bug(racing(halves_of_images), dense)),
    "float64 in float32": ("grad_weight", Bug(in_float32(grad_weight), depthwise)),
    "weight not flipped": ("grad_input", Bug(lambda g, w, p: grad_input(g, w.flip(2, 3), p), depthwise)),
    "rows that no output reads": (
        "grad_input",
        Bug(unwritten(grad_input, lambda p: (..., slice(_rows_read(p), None), slice(None))), depthwise),
    ),
    "writes grad_output": ("grad_input", Bug(lambda g, w, p: grad_input(g, w, p) + 0 * g.relu_().sum(), dense)),
    "300 channels": ("grad_input", Bug(when(lambda g, w, p: p.in_channels >= 300, grad_input), depthwise)),
}


def _without_last_row(g: Tensor) -> Tensor:
    g = g.clone()
    g[:, :, -1] = 0
    return g


def _rows_read(p: ConvProblem) -> int:
    last = (p.output_size[0] - 1) * p.stride[0] + (p.kernel_size[0] - 1) * p.dilation[0] - p.padding[0][0]
    return min(p.input_size[0], last + 1)


def summed_in_float32(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """As `forward`, where PyTorch's kernels of 16 bits are wrong too (`backends/aten_defects.py`)."""
    if x.dtype.itemsize > 2:
        return forward(x, w, p)
    return forward(x.float(), w.float(), p).to(x.dtype)


RIGHT: dict[str, tuple[Kernel, Callable[[ConvProblem], bool]]] = {
    "all in two dimensions": (summed_in_float32, accepts),
    "multiples of 64": (summed_in_float32, by_64),
    "depthwise": (taps, depthwise),
    "pointwise": (summed_in_float32, lambda p: dense(p) and p.pointwise and p.padding == ((0, 0), (0, 0))),
    "one dimension, causal": (
        lambda x, w, p: F.conv1d(F.pad(x, (3, 0)), w, groups=p.groups),
        lambda p: (
            p.ndim == 1
            and p.depthwise
            and p.in_channels == p.out_channels
            and (p.kernel_size, p.padding, p.stride, p.dilation) == ((4,), ((3, 0),), (1,), (1,))
        ),
    ),
    "one layer of one network": (
        summed_in_float32,
        lambda p: (
            dense(p)
            and p.in_channels == p.out_channels == 128
            and p.kernel_size == (3, 3)
            and p.padding == ((1, 1), (1, 1))
            and p.stride == (2, 2)
            and p.dilation == (1, 1)
            and p.channels_last
        ),
    ),
}
