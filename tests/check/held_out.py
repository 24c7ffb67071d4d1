"""A second set of kernels with one bug each, of other kinds and other narrowness than `planted`.

They were written before the check that has to refuse them, and are not what it was tuned with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convgrad import ConvProblem

from .functions import WIDE, accepts, forward, grad_input, grad_weight
from .planted import Bug, Kernel, dense, depthwise, lost, taps, unwritten, when


def square(p: ConvProblem) -> bool:
    """Dense 3x3 layers that keep the size, with channels in fours."""
    return (
        dense(p)
        and p.kernel_size == (3, 3)
        and p.padding == ((1, 1), (1, 1))
        and p.stride in {(1, 1), (2, 2)}
        and p.dilation == (1, 1)
        and p.in_channels % 4 == p.out_channels % 4 == 0
    )


def grouped(p: ConvProblem) -> bool:
    return accepts(p) and p.groups > 1


def sequence(p: ConvProblem) -> bool:
    return p.ndim == 1 and p.symmetric and p.groups == 1


def conv1d(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    return F.conv1d(x, w, None, p.stride, p.padding[0][0], p.dilation, p.groups)


def conv3d(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    return F.conv3d(x, w, None, p.stride, [low for low, _ in p.padding], p.dilation, p.groups)


def multiplier_from_the_first(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Every output channel of a group reads the group's first input channel."""
    per_in = p.in_channels // p.groups
    first = x.unflatten(1, (p.groups, per_in))[:, :, :1].expand(-1, -1, per_in, -1, -1).flatten(1, 2)
    return forward(first, w, p)


def doubled_row(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """The last output row reads the border as if the image went on."""
    result = forward(x, w, p).clone()
    if p.padding[0][1] and p.output_size[0] > 1:
        padded = F.pad(x, [p.padding[1][0]] * 2 + [p.padding[0][0]] * 2)
        padded[:, :, -p.padding[0][1] :] = padded[:, :, -p.padding[0][1] - 1 : -p.padding[0][1]]
        result[:, :, -1] = F.conv2d(padded, w, None, p.stride, 0, p.dilation, p.groups)[:, :, -1]
    return result


def partly_summed(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """The sum starts in memory that is not cleared."""
    result = torch.empty(p.output_shape, dtype=p.dtype)
    result[:, ::2] = forward(x, w[::2], p) if p.groups == 1 else forward(x, w, p)[:, ::2]
    if p.out_channels > 1:
        result[:, 1::2] += forward(x, w, p)[:, 1::2]
    return result


def writing_behind(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """A whole vector is stored where less than one is left of the result."""
    result = forward(x, w, p).contiguous()
    out = torch.empty(result.shape, dtype=result.dtype).copy_(result)
    size = out.numel() * out.element_size()
    if size % 32:
        ctypes.memset(out.data_ptr() + size, 1, 32 - size % 32)
    return out


def writing_behind_the_input(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    size = x.numel() * x.element_size()
    ctypes.memset(x.data_ptr() + size, 0, 4)
    return forward(x, w, p)


def scaling_in_place(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """The weight is scaled, and scaled back."""
    w.mul_(2)
    result = forward(x, w, p) / 2
    w.div_(2)
    return result


def flat(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    """Takes any strides, as it says, and reads the weight as if it were dense."""
    dense_weight = w.as_strided(w.shape, torch.empty(w.shape, device="meta").stride())
    return forward(x, dense_weight, p)


class Slices:
    """The output channels are shared among PyTorch's threads; the last slice is cut too short."""

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        result = forward(x, w, p).clone()
        threads = torch.get_num_threads()
        if threads > 1 and p.out_channels % threads:
            result[:, -1] = 0
        return result


class Tiles:
    """Two threads of Python call it: the tile size of one is the other's."""

    def __init__(self) -> None:
        self.image: Tensor | None = None

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        self.image = x
        for _ in range(50):  # anything that lets another thread run
            torch.empty(1)
        return forward(self.image, w, p)


class Warm:
    """From the third call with one shape on a shorter program runs, which forgets the last image."""

    def __init__(self) -> None:
        self.calls: dict[Any, int] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        self.calls[p] = self.calls.get(p, 0) + 1
        result = forward(x, w, p).clone()
        if self.calls[p] > 2:
            result[-1] = 0
        return result


class Accumulating:
    """The buffer of grad_weight is cleared when it is made, not at each call."""

    def __init__(self) -> None:
        self.buffers: dict[Any, Tensor] = {}

    def __call__(self, g: Tensor, x: Tensor, p: ConvProblem) -> Tensor:
        result = grad_weight(g, x, p)
        return self.buffers.setdefault(p, torch.zeros_like(result)).add_(result).clone()


class OneMemory:
    """Every result is a view of one buffer that all problems share."""

    def __init__(self) -> None:
        self.memory: dict[torch.dtype, Tensor] = {}

    def __call__(self, x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        result = forward(x, w, p).contiguous(memory_format=p.memory_format)
        memory = self.memory.setdefault(result.dtype, torch.empty(6_000_000, dtype=result.dtype))
        return memory.as_strided(result.shape, result.stride()).copy_(result)


class FlippedOnce:
    """The flipped weight is stored by its address."""

    def __init__(self) -> None:
        self.weights: dict[Any, Tensor] = {}

    def __call__(self, g: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
        return grad_input(g, self.weights.setdefault((w.data_ptr(), p), w.clone()), p)


def sides_exchanged(x: Tensor, w: Tensor, p: ConvProblem) -> Tensor:
    sides = [side for low, high in reversed(p.padding) for side in (high, low)]
    return F.conv2d(F.pad(x, sides), w, None, p.stride, 0, p.dilation, p.groups)


def negated_in_both(g: Tensor, x: Tensor, w: Tensor, p: ConvProblem, mask: Any) -> tuple[Tensor, Tensor]:
    """Each gradient alone is right."""
    return grad_input(g, w, p), grad_weight(g, x, p) * (-1 if mask[0] and mask[1] else 1)


def flipped(right: Kernel) -> Kernel:
    """For odd kernels only the middle is right."""
    return lambda a, b, p: right(a, b, p).flip(2) if p.kernel_size[0] > p.kernel_size[1] else right(a, b, p)


def at(condition: Callable[[ConvProblem], bool], right: Kernel = forward) -> Kernel:
    return when(lambda a, b, p: condition(p), right)


def thin(p: ConvProblem) -> bool:
    return p.in_channels % 8 in (5, 7) and p.out_channels > 1


BUGS: dict[str, tuple[str, Bug]] = {
    "5 or 7 channels are left": ("forward", Bug(at(thin), dense)),
    "out channels 12 modulo 16": ("forward", Bug(at(lambda p: p.out_channels % 16 == 12), square)),
    "stride 3": ("forward", Bug(at(lambda p: 3 in p.stride), depthwise)),
    "stride along the rows only": ("forward", Bug(at(lambda p: p.stride[0] > p.stride[1] == 1))),
    "dilation with stride": ("forward", Bug(at(lambda p: max(p.dilation) > 1 < max(p.stride)))),
    "odd height": ("forward", Bug(at(lambda p: p.input_size[0] % 2 == 1 and p.stride == (2, 2)), square)),
    "one column": ("forward", Bug(at(lambda p: p.output_size[1] == 1))),
    "bfloat16 only": (
        "forward",
        Bug(at(lambda p: p.dtype == torch.bfloat16), accepts, {"dtypes": (*WIDE, torch.bfloat16)}),
    ),
    "second image": ("forward", Bug(lost(forward, lambda p: slice(1, 2)), square)),
    "groups with multipliers": ("forward", Bug(multiplier_from_the_first, grouped)),
    "depthwise multiplier": ("forward", Bug(at(lambda p: p.depthwise and p.out_channels > p.in_channels), grouped)),
    "last border row": ("forward", Bug(doubled_row, depthwise)),
    "sum not cleared": ("forward", Bug(partly_summed)),
    "column behind the tile": (
        "forward",
        Bug(unwritten(forward, lambda p: (..., slice(p.output_size[1] // 16 * 16, None))), dense),
    ),
    "store behind the result": ("forward", Bug(writing_behind)),
    "store behind the input": ("forward", Bug(writing_behind_the_input, square)),
    "weight scaled in place": ("forward", Bug(scaling_in_place, dense)),
    "strided, read as dense": ("forward", Bug(flat, accepts, {"layouts": "strided"})),
    "slices of threads": ("forward", Bug(Slices(), dense)),
    "called by two threads": ("forward", Bug(Tiles(), depthwise)),
    "result in float64": ("forward", Bug(lambda x, w, p: forward(x, w, p).double(), square)),
    "result without its last row": ("forward", Bug(lambda x, w, p: forward(x, w, p)[:, :, :-1], depthwise)),
    "third call": ("forward", Bug(Warm(), depthwise)),
    "padding wider than the kernel": (
        "forward",
        Bug(at(lambda p: any(low >= k > 1 for (low, _), k in zip(p.padding, p.kernel_size, strict=True)))),
    ),
    "even kernels": ("forward", Bug(at(lambda p: p.kernel_size[0] % 2 == 0), dense)),
    "rectangular dilation": ("forward", Bug(lambda x, w, p: taps(x, w, p, dilation=(p.dilation[0],) * 2))),
    "sequence, kernel of one": ("forward", Bug(when(lambda x, w, p: p.kernel_size == (1,), conv1d), sequence)),
    "sequence, long": ("forward", Bug(when(lambda x, w, p: p.output_size[0] > 128, conv1d), sequence)),
    "volume, depth padding": (
        "forward",
        Bug(
            when(lambda x, w, p: p.padding[0][0] > p.padding[1][0], conv3d),
            lambda p: p.ndim == 3 and p.symmetric and p.groups == 1,
        ),
    ),
    "view of one memory": ("forward", Bug(OneMemory(), square)),
    "sides exchanged": ("forward", Bug(sides_exchanged, lambda p: p.ndim == 2)),
    "flip stored by address": ("grad_input", Bug(FlippedOnce(), depthwise)),
    "weight's gradient, if both are needed": ("backward", Bug(negated_in_both)),
    "groups that shrink": ("forward", Bug(at(lambda p: p.in_channels > p.out_channels), grouped)),
    "NaN lost": ("forward", Bug(lambda x, w, p: forward(x.nan_to_num(nan=0.0), w, p), depthwise)),
    "grad_weight accumulates": ("grad_weight", Bug(Accumulating(), dense)),
    "grad_weight of wide kernels": (
        "grad_weight",
        Bug(when(lambda g, x, p: p.kernel_size[1] > 5, grad_weight), dense),
    ),
    "grad_weight of three images": (
        "grad_weight",
        Bug(when(lambda g, x, p: p.batch % 4 == 3, grad_weight), depthwise),
    ),
    "grad_input of a tall kernel": ("grad_input", Bug(flipped(grad_input), dense)),
    "grad_input, stride without padding": (
        "grad_input",
        Bug(
            when(lambda g, w, p: max(p.stride) > 1 and p.padding == ((0, 0),) * 2, grad_input), dense, {"dtypes": WIDE}
        ),
    ),
    "grad_input of channels_last": (
        "grad_input",
        Bug(when(lambda g, w, p: p.channels_last and p.batch > 1, grad_input), depthwise),
    ),
}

#: Right kernels that accept as little.
RIGHT: dict[str, tuple[Kernel, Callable[[ConvProblem], bool]]] = {
    "square": (forward, square),
    "grouped": (forward, grouped),
    "sequence": (conv1d, sequence),
    "volume": (conv3d, lambda p: p.ndim == 3 and p.symmetric and p.groups == 1),
}
